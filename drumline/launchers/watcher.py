"""Watches the ranks of one host that another program has started (torchrun, srun, mpirun and others): `python -m
drumline.launchers.watcher POST`. The first rank of the host starts it, and it ends with that rank. No torch here.

Ranks that hang are named on standard error and in the run folder, and killed: whoever started them sees a rank that failed, and starts all
of them again if it does so. Under `launch.kind: slurm` it notes the hang where the job finds it, which reports and starts again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from drumline.core import heartbeat
from drumline.core.files import write_whole
from drumline.core.process import ProcessId, here, process, start_module
from drumline.launchers.environment import launched_by
from drumline.launchers.hangs import Hang
from drumline.launchers.local import furthest_step, next_attempt, report_failure
from drumline.launchers.postmortem import RankEnd
from drumline.launchers.watch import Watch

LOOK_SECONDS = 0.25
KILL_SECONDS = 2.0  # for the report: a disk that stalls must not keep the ranks


@dataclass(frozen=True)
class Post:
    """`parent`: the rank to end with; `board`: a folder; `ranks`: of this host, of `world_size`; `logs`: where ends of ranks are noted for
    our own launcher; empty under another one, `program`."""

    parent: int
    board: str
    ranks: int
    world_size: int
    run_dir: str
    logs: str
    host: str
    program: str


def begin(name: str, rank: int, world_size: int, run_dir: Path) -> None:
    """Have this rank watched, where no launcher does. `name`: what the ranks of this start have in common, and nobody else knows."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # Containers may share memory and the host's name, but not the numbers of processes.
    space = here()[2].strip("pid:[]")
    try:
        if not space:
            raise OSError("/proc is of another container")
        folder, first = heartbeat.common_board(f"{name}-{host}-{space}", world_size)
    except OSError as error:
        print(f"note: rank {rank} is not watched: {error}", file=sys.stderr)
        return
    os.environ[heartbeat.VARIABLE] = f"{folder}:{rank}"
    if first:
        # The second is deepspeed's.
        ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "/")).parent
        ours = str(logs) if logs.parent == (run_dir / "logs").absolute() else ""
        program = launched_by() or "srun"
        post = Post(
            os.getpid(),
            str(folder),
            int(ranks),
            world_size,
            str(run_dir.absolute()),
            ours,
            host,
            program,
        )
        start_module("drumline.launchers.watcher", json.dumps(asdict(post)), keeps=())


def keep(post: Post) -> None:
    """Watch until the parent has ended, or ranks hang."""
    board = heartbeat.Board(Path(post.board), 0)
    watch, known = Watch(post.ranks, 0, post.world_size, board), dict[int, ProcessId]()
    try:
        while os.getppid() == post.parent:
            running = _running(board, post.world_size, known)
            if (hang := watch.look(running)) is not None:
                _end(post, hang, running)
                return
            time.sleep(LOOK_SECONDS)
    finally:
        watch.close()


def _running(
    board: heartbeat.Board, world_size: int, known: dict[int, ProcessId]
) -> dict[int, int]:
    """Rank → process id, of those that have begun and not ended."""
    for rank in range(world_size):
        if rank not in known and (pid := board.ints[rank * heartbeat.SLOT + heartbeat.PID]):
            known[rank] = process(pid)
    return {rank: of.pid for rank, of in known.items() if of.alive() is not False}


def _end(post: Post, hang: Hang, running: Mapping[int, int]) -> None:
    error, rank, run_dir = hang.error(), hang.of.rank, Path(post.run_dir)
    logs = Path(post.logs) if post.logs else run_dir / "logs" / f"attempt-{next_attempt(run_dir)}"
    victims = [running[rank]] if post.logs else list(running.values())
    late = threading.Timer(KILL_SECONDS, _kill, [victims])
    late.start()
    if post.logs:
        write_whole(
            logs / f"rank-{rank}.json",
            json.dumps({"message": {"drumline": {**error, "host": post.host}}}),
        )
    else:
        logs.mkdir(parents=True, exist_ok=True)
        end = RankEnd(
            rank, 1, error, logs / f"rank-{rank}.log", killed=True, at=error["time"], host=post.host
        )
        attempt, reason = (
            int(logs.name.removeprefix("attempt-")),
            f"its ranks are killed, and {post.program} decides about another start",
        )
        report_failure(
            end,
            [end],
            attempt,
            max(furthest_step(run_dir), 0),
            reason,
            "",
            run_dir / "events.jsonl",
            None,
        )
    late.cancel()
    # At once: ranks of other hosts that wait for these would report an error of their own.
    _kill(victims)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # A batch system sends them to all that a task has started.
        signal.signal(number, signal.SIG_IGN)
    keep(Post(**json.loads(sys.argv[1])))

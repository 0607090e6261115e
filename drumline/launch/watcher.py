"""Watch the ranks of one host that another program has started (torchrun, srun, mpirun and others).

The first rank of the host starts the watcher as a process, `python -m drumline.launch.watcher JSON`
with a `WatchedHost` as JSON. It ends with that rank. This module does not import torch.

Ranks that hang are named on standard error and in the run folder, and killed. The program that
started them sees that a rank has failed, and may start all of them again. Under
`launch.kind: slurm` the hang is noted where the job finds it, which reports it and starts again.
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
from typing import Any

from drumline.launch.environment import launched_by
from drumline.launch.hangs import Hang
from drumline.launch.local import furthest_step, next_attempt, report_failure
from drumline.launch.postmortem import RankEnd
from drumline.launch.watch import Watch
from drumline.system import heartbeat
from drumline.system.files import write_whole
from drumline.system.process import ProcessId, host_identity, process, start_module

LOOK_SECONDS = 0.25
KILL_SECONDS = 2.0  # for the report: a disk that stalls must not keep the ranks


@dataclass(frozen=True)
class WatchedHost:
    """What the first rank of a host tells the watcher that it starts, as JSON."""

    parent: int  # process id of the rank that has started the watcher, and with which it ends
    board: str  # folder of the heartbeats
    ranks: int  # number of ranks of this host
    world_size: int
    run_dir: str
    logs: str  # folder in which Drumline's launcher reads how ranks ended; empty if another program started them
    host: str
    program: str  # name of the program that has started the ranks


def watch_this_rank(name: str, rank: int, world_size: int, run_dir: Path) -> None:
    """Have this rank watched for hangs by the watcher of its host.

    The first rank of the host that calls this starts the watcher.

    A rank that cannot be watched runs all the same, and a note says so.

    Args:
        name: A text that the ranks of this start share, and that nobody else knows. The ranks find
            their common board in shared memory by it.
        rank: This rank.
        world_size: Number of ranks of the run.
        run_dir: The run folder.
    """
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # Containers may share /dev/shm and the host's name. Their process ids are their own.
    pid_namespace = host_identity()[2].strip("pid:[]")
    try:
        if not pid_namespace:
            raise OSError("/proc is of another container")
        folder, is_creator = heartbeat.common_board(f"{name}-{host}-{pid_namespace}", world_size)
    except OSError as error:
        print(f"note: rank {rank} is not watched: {error}", file=sys.stderr)
        return
    os.environ[heartbeat.VARIABLE] = f"{folder}:{rank}"
    if is_creator:
        watched = _watched_host(str(folder), world_size, run_dir, host)
        start_module("drumline.launch.watcher", json.dumps(asdict(watched)), pass_fds=())


def _watched_host(board: str, world_size: int, run_dir: Path, host: str) -> WatchedHost:
    """Return the facts for the watcher of this host, which is to end with this process."""
    # LOCAL_SIZE is deepspeed's name of the variable.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "/")).parent
    if logs.parent == (run_dir / "logs").absolute():
        own_logs = str(logs)
    else:
        own_logs = ""
    return WatchedHost(
        parent=os.getpid(),
        board=board,
        ranks=int(ranks),
        world_size=world_size,
        run_dir=str(run_dir.absolute()),
        logs=own_logs,
        host=host,
        program=launched_by() or "srun",
    )


def watch_host(watched: WatchedHost) -> None:
    """Watch the ranks of a host until the rank that started the watcher ends, or until they hang.

    Ranks that hang are reported and killed.
    """
    board = heartbeat.Board(Path(watched.board), 0)
    watch = Watch(watched.ranks, 0, watched.world_size, board)
    known: dict[int, ProcessId] = {}
    try:
        # The system gives orphans a new parent, so another parent means that the rank has ended.
        while os.getppid() == watched.parent:
            running = _running_ranks(board, watched.world_size, known)
            hang = watch.look(running)
            if hang is not None:
                _report_and_kill(watched, hang, running)
                return
            time.sleep(LOOK_SECONDS)
    finally:
        watch.close()


def _running_ranks(
    board: heartbeat.Board, world_size: int, known: dict[int, ProcessId]
) -> dict[int, int]:
    """Return the process id of each rank that has begun and not ended.

    Args:
        board: The heartbeats, in which a rank writes its process id as it begins.
        world_size: Number of ranks of the run.
        known: The ranks that have begun. New ones are added.
    """
    for rank in range(world_size):
        if rank in known:
            continue
        pid = board.ints[rank * heartbeat.RANK_WORDS + heartbeat.PID]
        if pid:
            known[rank] = process(pid)
    return {rank: each.pid for rank, each in known.items() if each.alive() is not False}


def _report_and_kill(watched: WatchedHost, hang: Hang, running: Mapping[int, int]) -> None:
    """Report a hang and kill the ranks.

    Under Drumline's own launcher only the culprit is killed, since the launcher ends the rest.
    """
    error = hang.error()
    rank = hang.subject.rank
    attempt = 0
    if watched.logs:
        victims = [running[rank]]
    else:
        victims = list(running.values())
        attempt = next_attempt(Path(watched.run_dir))
    # The report may hang on a disk that stalls. The ranks are killed in time all the same.
    kill_timer = threading.Timer(KILL_SECONDS, _kill, [victims])
    kill_timer.start()
    if watched.logs:
        noted = {"message": {"drumline": {**error, "host": watched.host}}}
        write_whole(Path(watched.logs) / f"rank-{rank}.json", json.dumps(noted))
    else:
        _report_hang(watched, rank, error, attempt)
    kill_timer.cancel()
    # Without a chance to save: ranks of other hosts that wait for these would run into their own
    # time limits, and report errors that hide the cause.
    _kill(victims)


def _report_hang(watched: WatchedHost, rank: int, error: dict[str, Any], attempt: int) -> None:
    """Name a hang on standard error and in the run folder."""
    run_dir = Path(watched.run_dir)
    logs = run_dir / "logs" / f"attempt-{attempt}"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"rank-{rank}.log"
    end = RankEnd(rank, 1, error, log, killed=True, at=error["time"], host=watched.host)
    step = max(furthest_step(run_dir), 0)
    reason = f"its ranks are killed, and {watched.program} decides about another start"
    report_failure(end, [end], attempt, step, reason, "", run_dir / "events.jsonl", None)


def _kill(pids: list[int]) -> None:
    """Send SIGKILL to processes. Those that have gone are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # A batch system sends these to all processes of a task. The ranks save then; the watcher
        # ends with its rank, and not before.
        signal.signal(number, signal.SIG_IGN)
    watch_host(WatchedHost(**json.loads(sys.argv[1])))

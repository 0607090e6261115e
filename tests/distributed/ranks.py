"""Run many plans in one process group: `python -m tests.distributed.ranks PLAN...`, once for each
rank.

Importing torch costs seconds; training a tiny model costs little. So ranks are forked from one
process that has imported it (tests/forks.py), and a test hands them every plan of that world size.
"""

from __future__ import annotations

import functools
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.config.resume import Resume
from drumline.launch.postmortem import CONSEQUENCES
from tests.forks import Forked
from tests.harness import ENV

if TYPE_CHECKING:
    from drumline.plan.plan import Plan

UNCOUNTED = "--uncounted"


def run_plans(
    plans: list[Path],
    world_size: int,
    timeout: float | None = None,
    *,
    counted: bool | Sequence[Path] = False,
) -> None:
    """Train every plan (files, in order) on `world_size` real processes over gloo; one whose run
    folder has a checkpoint goes on from it.

    `counted`: of all, or of these, count the bytes that the third step holds and sends, as a user's
    run does; that takes as long as the other three steps. These are first. Raises AssertionError
    with the failed ranks' output.
    """
    first = plans if counted is True else counted or []
    rest = [plan for plan in plans if plan not in first]
    run_module(
        "tests.distributed.ranks",
        [*first, UNCOUNTED, *rest],
        world_size,
        timeout or 240 + 20 * len(plans),
    )


def run_module(
    name: str, arguments: Sequence[object], world_size: int, timeout: float = 240
) -> None:
    """`python -m name arguments…` once for each rank, with the variables of a rendezvous.

    Raises AssertionError with the failed ranks' output.
    """
    local = {"LOCAL_WORLD_SIZE": str(world_size)}
    ranks = start_ranks(name, *arguments, world_size=world_size, **local)
    deadline = time.monotonic() + timeout
    failed: dict[int, str] = {}
    for number, process in enumerate(ranks):
        left = deadline - time.monotonic()
        try:
            code = process.wait(max(0.01, left))
        except subprocess.TimeoutExpired:
            failed[number] = "ran out of time"
            process.end()
        else:
            if code != 0:
                failed[number] = f"exited with {code}"
    # A rank that only tells that another one went away comes first: what is read is the end.
    consequences = []
    causes = []
    for number, how in failed.items():
        output = "".join(ranks[number].communicate())
        if any(words in output for words in CONSEQUENCES):
            consequences.append(f"rank {number} {how}:\n{output[-500:]}")
        else:
            causes.append(f"rank {number} {how}:\n{output[-4000:]}")
    assert not failed, "\n".join(consequences + causes)


def start_ranks(
    name: str,
    *arguments: object,
    world_size: int = 2,
    host: str = "127.0.0.1",
    port: int | None = None,
    cwd: Path | None = None,
    **env: str,
) -> list[Forked]:
    """Start a module once for each rank, with the variables of a rendezvous, as mpirun or a batch
    system would. Without a `port` the rendezvous has a free one."""
    usual = {
        **ENV,
        **env,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port or free_port()),
    }
    ranks = []
    for rank in range(world_size):
        mine = {**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(Forked(name, *arguments, env=mine, cwd=cwd))
    return ranks


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, and that the system gives to nobody in the
    meantime: below its ephemeral range."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def share_groups() -> None:
    """From now on the groups of one plan serve the next: gloo has threads for each that look for
    work all the time, and those of twenty plans slow down all that runs on the machine."""
    from drumline.checkpoint.ranks import RankGroup
    from drumline.dist import mesh

    mesh._cached_mesh = functools.cache(mesh._cached_mesh.__wrapped__)  # type: ignore[assignment]
    RankGroup.create_separate = staticmethod(functools.cache(RankGroup.create_separate))  # type: ignore[method-assign]


def each_plan(paths: Sequence[str]) -> Iterator[tuple[Plan, int, Path]]:
    """Join the other ranks of a worker. Yields plans, this rank, and the folder of each plan;
    leaves at the end."""
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    for path in map(Path, paths):
        yield Plan.load(path), ranks.rank, path.parent
    stop()


def main(arguments: list[str]) -> None:
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan
    from drumline.system.signals import StopFlag
    from drumline.telemetry.events import EventLog
    from drumline.telemetry.traffic import Traffic
    from drumline.train.entry import Reporter, train_on
    from drumline.train.state import Goodput

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    with StopFlag() as asked:
        for argument in arguments:
            if argument == UNCOUNTED:
                Traffic.FIRST = sys.maxsize
                continue
            plan = Plan.load(Path(argument))
            run_dir = Path(plan.run_dir)
            log: EventLog | Reporter = Reporter()
            if ranks.rank == 0:
                log = EventLog(run_dir / "events.jsonl")
            resume = None
            if any((run_dir / "checkpoints").glob("step-*")):
                resume = Resume()
            goodput = Goodput(time.time())
            train_on(plan, ranks, resume, emit=log.emit, stop_flag=asked, past=[], goodput=goodput)
    stop()


if __name__ == "__main__":
    main(sys.argv[1:])

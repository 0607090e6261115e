"""A rank without a model that is watched as a real one is, and stands still in one of many ways.

`behave` in the run folder is JSON: {"steps": N, "how": ..., "rank": R, "at": STEP}. In the first
attempt the rank R does `how` at the step:
nothing      goes on (the test does something to it)
data         its stream's thread loops for ever
reward       a function that it calls waits for a lock that nobody gives back
eval         its evaluation, one of many, loops for ever
skip         leaves a collective out, and goes on
shape        begins one with another shape
report       is long at what it does alone, and goes on
save         writes to a disk, which the test has frozen
lock         holds Python's lock in C for ever
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drumline.dist.start import start, stop
from drumline.plan.plan import Plan
from drumline.system import heartbeat
from drumline.telemetry.events import Eval, EventLog
from drumline.train.entry import start_heartbeats
from drumline.train.failure import exit_on_error, record_failure

STEP_SECONDS, REPORT_SECONDS = 0.02, 15.0


def endless(step: int) -> int:
    while True:
        step += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    plan = Plan.load(parser.parse_args().plan)
    run = Path(plan.run_dir)
    with exit_on_error():
        start_heartbeats(plan)
        ranks = start("cpu", "gloo", 120)
        heartbeat.register_answer(
            "samples", lambda: [heartbeat.position(), heartbeat.position() + 1]
        )
        (run / f"pid-{ranks.rank}").write_text(str(os.getpid()))
        try:
            walk(run, ranks.rank)
        except BaseException as error:
            record_failure(error)
            raise
        finally:
            stop()


def is_first_attempt() -> bool:
    attempt = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.name
    if attempt.startswith("attempt-"):
        return attempt == "attempt-0"
    # torchrun has folders of its own, and counts.
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def walk(run: Path, rank: int) -> None:
    behave: dict[str, Any] = json.loads((run / "behave").read_text())
    misbehaves = is_first_attempt() and rank == behave["rank"]
    log = None
    if rank == 0:
        log = EventLog(run / "events.jsonl")
    loader = ThreadPoolExecutor(1, "loader")
    for step in range(behave["steps"]):
        how = "nothing"
        if misbehaves and step == behave["at"]:
            how = behave["how"]
        heartbeat.step(step, 2 * step)
        heartbeat.beat("data")
        read = endless if how == "data" else abs
        loader.submit(read, step).result()
        if how == "reward":
            heartbeat.beat("rollout")
            reward()
        heartbeat.beat("forward")
        if how == "lock":
            re.match("(a+)+$", "a" * 60 + "b")
        time.sleep(STEP_SECONDS)
        heartbeat.beat("backward")
        average(how)
        heartbeat.beat("collective")
        dist.all_reduce(torch.ones(3))
        if how == "save":
            heartbeat.beat("save")
            save(Path(behave["disk"]))
        if step % 5 == 0:
            heartbeat.beat("eval")
            evaluate = endless if how == "eval" else abs
            evaluate(step)
        heartbeat.beat("report")
        if how == "report":
            time.sleep(REPORT_SECONDS)
        if log:
            log.emit(Eval(step=step + 1, samples=1, seconds=0.0))
    wait_for_rank_zero(run, rank)
    heartbeat.beat("done")


def wait_for_rank_zero(run: Path, rank: int) -> None:
    """Wait until rank 0 has come to the end, too."""
    finished = run / "finished"
    if rank == 0:
        finished.touch()
    heartbeat.beat("save")
    while not finished.exists():
        time.sleep(0.1)


def average(how: str) -> None:
    """Gradients of three weights."""
    size = 7 if how == "shape" else 3
    dist.all_reduce(torch.ones(size))
    if how != "skip":
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))


def reward() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def save(disk: Path) -> None:
    (disk / "wait").touch()
    while not (disk.parent / "frozen").exists():
        heartbeat.alive()
        time.sleep(0.05)
    (disk / "checkpoint").write_bytes(b"0" * 2**20)


if __name__ == "__main__":
    main()

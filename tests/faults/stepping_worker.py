"""A rank without a model that walks like a real one: agrees on signals, saves every fifth step, resumes from the newest.

`behave` in the run folder is JSON: {"steps": N, "kills": [[RANK, STEP], ...], "how": ..., "rank": R, "at": STEP, "attempts": N}.
kills: in attempt K the rank kills itself with SIGKILL at the step. how, where it is given, in the first N attempts:
raise        ValueError
raise-stuck  ValueError, and the rank never gets out of its teardown
abort        ValueError in that rank; the other one is ended by SIGABRT, as C++ code does that cannot go on
fail-save    ValueError when asked to stop
child        the rank starts a process that sleeps, and goes on
slow-import  the rank takes a while before it can listen to signals
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drumline.dist.start import start, stop
from drumline.errors import Preempted
from drumline.plan.plan import Plan
from drumline.system.signals import StopFlag
from drumline.telemetry.events import Eval, EventLog, Restore, Save
from drumline.train.failure import exit_on_error, record_failure

SAVE_EVERY = 5
STEP_SECONDS = 0.02


class Walk:
    """The steps of one rank."""

    def __init__(self, run: Path, rank: int, asked: StopFlag) -> None:
        self.run, self.rank, self.asked = run, rank, asked
        self.behave: dict[str, Any] = json.loads((run / "behave").read_text())
        self.attempt = int(
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.name.removeprefix("attempt-")
        )
        self.log = EventLog(run / "events.jsonl") if rank == 0 else None
        (run / f"pid-{rank}").write_text(str(os.getpid()))

    def go(self, resume: str | None) -> None:
        saved = [
            int(path.name.removeprefix("step-"))
            for path in (self.run / "checkpoints").glob("step-*")
        ]
        step = max(saved, default=0) if resume == "newest" else 0
        if self.log and resume:
            self.log.emit(Restore(step=step, path="", seconds=0.0, skipped=[]))
        while step < self.behave["steps"]:
            signals = torch.zeros(2)
            signals[self.rank] = self.asked.requested
            dist.all_reduce(signals)
            if signals.max() > 0:
                self.stopped(step, int(signals.max()))
            step += 1
            if self.log:
                self.log.emit(Eval(step=step, samples=1, seconds=0.0))
            if [self.rank, step] in self.behave.get("kills", [])[self.attempt : self.attempt + 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == self.behave.get("at") and self.attempt < self.behave.get("attempts", 1):
                self.misbehave(step)
            if step % SAVE_EVERY == 0:
                self.save(step)
            time.sleep(STEP_SECONDS)

    def stopped(self, step: int, number: int) -> None:
        if self.behave.get("how") == "fail-save" and self.rank == self.behave["rank"]:
            raise ValueError("this checkpoint cannot be written")
        self.save(step)
        dist.barrier()  # as a checkpoint is: whole on all ranks before any of them says so
        raise Preempted(f"signal {number}: stopped and saved at step {step}")

    def save(self, step: int) -> None:
        if self.log:
            folder = self.run / "checkpoints" / f"step-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            self.log.emit(
                Save(
                    step=step,
                    path=str(folder),
                    seconds=0.0,
                    bytes=0,
                    blocked_seconds=0.0,
                    error=None,
                )
            )

    def misbehave(self, step: int) -> None:
        how, mine = self.behave["how"], self.rank == self.behave["rank"]
        if how == "abort" and not mine:
            time.sleep(0.5)
            os.abort()
        if mine and how in ("raise", "raise-stuck", "abort"):
            raise ValueError(f"rank {self.rank} does not like step {step}")
        if mine and how == "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(self.run)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    options = parser.parse_args()
    plan = Plan.load(options.plan)
    run = Path(plan.run_dir)
    behave = json.loads((run / "behave").read_text())
    if behave.get("how") == "slow-import" and os.environ["RANK"] == str(behave["rank"]):
        (run / "importing").touch()
        time.sleep(600)
    with exit_on_error(), StopFlag() as asked:
        ranks = start("cpu", "gloo", min(60, plan.config.launch.timeout_seconds or 60))
        try:
            Walk(run, ranks.rank, asked).go(options.resume)
        except BaseException as error:
            record_failure(error)
            if behave.get("how") == "raise-stuck" and ranks.rank == behave["rank"]:
                time.sleep(600)
            raise
        finally:
            stop()


if __name__ == "__main__":
    main()

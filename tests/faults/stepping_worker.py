"""A rank without a model that walks like a real one: agrees on signals, saves every fifth step,
resumes from the newest.

`behave` in the run folder is JSON:
{"steps": N, "kills": [[RANK, STEP], ...], "how": ..., "rank": R, "at": STEP, "attempts": N}.
kills: in attempt K the rank kills itself with SIGKILL at the step.
how, if it is given, in the first N attempts:
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
        self.run = run
        self.rank = rank
        self.asked = asked

        self.behave: dict[str, Any] = json.loads((run / "behave").read_text())
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
        self.attempt = int(folder.name.removeprefix("attempt-"))

        self.log: EventLog | None = None
        if rank == 0:
            self.log = EventLog(run / "events.jsonl")
        (run / f"pid-{rank}").write_text(str(os.getpid()))

    def go(self, resume: str | None) -> None:
        step = 0
        if resume == "newest":
            step = self.saved_step()
        if self.log and resume:
            self.log.emit(Restore(step=step, path="", seconds=0.0, skipped=[]))

        while step < self.behave["steps"]:
            self.stop_if_asked(step)
            step += 1
            if self.log:
                self.log.emit(Eval(step=step, samples=1, seconds=0.0))
            self.die_if_due(step)
            if step == self.behave.get("at") and self.attempt < self.behave.get("attempts", 1):
                self.misbehave(step)
            if step % SAVE_EVERY == 0:
                self.save(step)
            time.sleep(STEP_SECONDS)

    def saved_step(self) -> int:
        newest = 0
        for path in (self.run / "checkpoints").glob("step-*"):
            newest = max(newest, int(path.name.removeprefix("step-")))
        return newest

    def stop_if_asked(self, step: int) -> None:
        """Agree with the other ranks on signals, and stop on any."""
        signals = torch.zeros(2)
        signals[self.rank] = self.asked.requested
        dist.all_reduce(signals)
        number = int(signals.max())
        if number == 0:
            return
        if self.behave.get("how") == "fail-save" and self.rank == self.behave["rank"]:
            raise ValueError("this checkpoint cannot be written")
        self.save(step)
        dist.barrier()  # as a checkpoint is: whole on all ranks before any of them says so
        raise Preempted(f"signal {number}: stopped and saved at step {step}")

    def die_if_due(self, step: int) -> None:
        kills = self.behave.get("kills", [])
        if self.attempt >= len(kills):
            return
        if kills[self.attempt] == [self.rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, step: int) -> None:
        if self.log is None:
            return
        folder = self.run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        saved = Save(
            step=step,
            path=str(folder),
            seconds=0.0,
            bytes=0,
            blocked_seconds=0.0,
            error=None,
        )
        self.log.emit(saved)

    def misbehave(self, step: int) -> None:
        how = self.behave["how"]
        if self.rank != self.behave["rank"]:
            if how == "abort":
                time.sleep(0.5)
                os.abort()
            return
        if how in ("raise", "raise-stuck", "abort"):
            raise ValueError(f"rank {self.rank} does not like step {step}")
        if how == "child":
            code = "import time; time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", code, str(self.run)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume")
    options = parser.parse_args()
    plan = Plan.load(options.plan)
    run = Path(plan.run_dir)
    behave = json.loads((run / "behave").read_text())
    how = behave.get("how")
    if how == "slow-import" and os.environ["RANK"] == str(behave["rank"]):
        (run / "importing").touch()
        time.sleep(600)
    with exit_on_error(), StopFlag() as asked:
        timeout = min(60, plan.config.launch.timeout_seconds or 60)
        ranks = start("cpu", "gloo", timeout)
        try:
            Walk(run, ranks.rank, asked).go(options.resume)
        except BaseException as error:
            record_failure(error)
            if how == "raise-stuck" and ranks.rank == behave["rank"]:
                time.sleep(600)
            raise
        finally:
            stop()


if __name__ == "__main__":
    main()

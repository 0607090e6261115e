"""The checkpoints of a run, whoever drives its loop: what is in one, what is reported of it, and how long the last one is tried again."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from drumline.checkpoint.memory import Memory
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.core.heartbeat import alive
from drumline.core.plan import Plan
from drumline.core.signals import StopFlag
from drumline.dist.reduce import Gather
from drumline.errors import NotSaved, Preempted
from drumline.telemetry.events import Emit, Preempt, Save
from drumline.train.state import TrainState, fallback_folder


class Saved(Protocol):
    """The part of an engine that a checkpoint is made of."""

    def tensors(self) -> dict[str, torch.Tensor]: ...
    def state(self) -> dict[str, Any]: ...


@dataclass
class Saver:
    """`saved_step`: whose checkpoint is written or on its way (-1: none). `resume`: how one goes on from the newest checkpoint, and from a
    folder."""

    plan: Plan
    engine: Saved
    state: TrainState
    checkpointer: Checkpointer
    emit: Emit
    gather: Gather
    stop_flag: StopFlag
    saved_step: int = -1
    resume: tuple[str, str] = ("--resume", "--resume {}")
    memory: Memory | None = None
    failed: int = 0  # in a row
    memory_failed: bool = False  # it is reported once
    metric: float | None = None  # with which the last checkpoint was saved
    # The step from which on a failed save is tried again; all ranks come to the same.
    retry_at: float = math.inf

    def save(self, metric: float | None) -> None:
        """Hand the state to the checkpointer. `metric`: of these very weights. Collective."""
        alive()
        self.report(self.checkpointer.wait())
        self.checkpointer.save(self.state.step, self.engine.tensors(), self._dump(), metric)
        self.saved_step, self.metric = self.state.step, metric

    def keep_in_memory(self) -> None:
        """Keep the state in the memory of hosts. Collective."""
        assert self.memory is not None, "checkpoint.in_memory_every is set"
        for result in self.memory.keep(self.state.step, self.engine.tensors(), self._dump()):
            if result.error and not self.memory_failed:
                spent: dict[str, Any] = {
                    "seconds": result.seconds,
                    "blocked_seconds": result.blocked_seconds,
                }
                self.emit(
                    Save(
                        step=result.step,
                        path=None,
                        bytes=0,
                        error=f"in memory: {result.error}",
                        **spent,
                    )
                )
            self.memory_failed = result.error is not None

    def wait(self) -> None:
        """Until nothing is on its way to disk or memory."""
        self.report(self.checkpointer.wait())
        if self.memory is not None:
            self.memory.wait()

    def save_last(self, metric: float | None) -> None:
        """Leave the run with these very weights on disk, and with their metric where that is known.

        Weights that are saved already get a metric that is only known now beside them. A save that fails in a way that may pass is tried
        again: for `checkpoint.wait_seconds`, and after a stop signal for half of `launch.grace_seconds`; the other half is for another
        disk. Collective. Raises NotSaved.
        """
        # Waiting first: only then do all ranks know the same of the save in flight, and decide alike.
        self.report(self.checkpointer.wait())
        began, limit, hurried = 0.0, self.plan.config.checkpoint.wait_seconds, False
        self.failed = 0
        is_unrated = self.saved_step == self.state.step and self.metric is None
        if metric is not None and is_unrated:
            error = self.checkpointer.write_metric(self.state.step, metric)
            if error is None:
                self.metric = metric
            else:
                # Saving again writes both, or says what is wrong with the disk.
                self.saved_step = -1
        while self.saved_step != self.state.step:
            self.save(metric)
            results = self.checkpointer.wait()
            self.report(results)
            if self.saved_step != self.state.step:
                began = began or time.monotonic()
                waited = time.monotonic() - began
                if self.stop_flag.requested and not hurried:
                    hurried, limit = (
                        True,
                        min(limit, waited + self.plan.config.launch.grace_seconds / 2),
                    )
                _, (over,) = self.gather({}, float(waited >= limit or results[-1].lasting))
                if any(over):
                    self._give_up(f"{results[-1].error}; tried for {waited:.0f} s", metric)
                # Nothing is trained beside it any more, and memory for copies may be what it lacked.
                self.checkpointer.asynchronous = False
                alive(math.inf)
                time.sleep(max(1.0, results[-1].seconds))
        if self.memory is not None:
            self.memory.clear()

    def leave(self, number: int) -> NoReturn:
        """Raises Preempted: a signal of this number asked the run to stop, and these very weights are saved."""
        name, step = signal.Signals(number).name, self.state.step
        self.emit(Preempt(step=step, signal=name))
        raise Preempted(
            f"{name}: stopped and saved at step {step}",
            where=self.plan.run_dir,
            fix=f"go on with {self.resume[0]}",
        )

    def report(self, results: list[SaveResult]) -> None:
        for result in results:
            if result.path is not None:
                self.failed, self.retry_at = 0, math.inf
            else:
                if result.step == self.saved_step:
                    self.saved_step = -1
                self.failed += 1
                # Looking for room costs nothing; what broke off in the middle of writing is tried ever less often.
                self.retry_at = result.step + (2**self.failed if result.begun else 0)
                if self.failed > 1 and not result.begun:
                    continue  # it is reported already
            path = str(result.path) if result.path else None
            spent: dict[str, Any] = {
                "seconds": result.seconds,
                "blocked_seconds": result.blocked_seconds,
            }
            self.emit(
                Save(step=result.step, path=path, bytes=result.bytes, error=result.error, **spent)
            )

    def _dump(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        data = self.plan.data
        return {
            "trainer": self.state.dump(),
            "engine": self.engine.state(),
            "config": self.plan.config.model_dump(mode="json"),
            "world_size": self.gather.world_size,
            "global_samples": self.plan.batch.global_samples,
            "lr": self.plan.lr,
            "steps": self.plan.steps,
            "warmup_steps": self.plan.warmup_steps,
            "base": self.plan.base,
            "data": data.identity.model_dump() if data and data.identity else None,
        }

    def _give_up(self, error: str, metric: float | None) -> NoReturn:
        """Try the other disk, and leave. Raises NotSaved."""
        newest, named = self.resume
        what, fix = (
            f"the last checkpoint could not be written: {error}",
            f"free some space; {newest} goes on from the newest checkpoint",
        )
        folder = fallback_folder(self.plan.config, self.plan.run_dir)
        if folder is not None:
            result, whole = self.checkpointer.rescue(
                folder, self.state.step, self.engine.tensors(), self._dump(), metric
            )
            if result.path is None:
                what += f"; nor in checkpoint.fallback_dir: {result.error}"
            elif whole:
                what, fix = (
                    f"{what}; it lies in {result.path}",
                    f"free some space, and go on with {named.format(result.path)}",
                )
            else:
                what = f"{what}; its weights alone lie in {result.path}"
                fix = f"free some space, and move that folder to {self.plan.run_dir}/checkpoints to export it"
        raise NotSaved(what, where=self.plan.run_dir, fix=fix)

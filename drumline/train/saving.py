"""`Saver`: what a checkpoint holds, how a save is reported, and when a failed save is tried again.

The loop of a config and the loop of a session both use it.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from drumline.checkpoint.memory import Memory
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.dist.reduce import SumReducer
from drumline.errors import NotSaved, Preempted
from drumline.plan.plan import Plan
from drumline.system.heartbeat import alive
from drumline.system.signals import StopFlag
from drumline.telemetry.events import Emit, Preempt, Save
from drumline.train.state import TrainState, fallback_folder


class SavedEngine(Protocol):
    """The part of an engine that a checkpoint is made of."""

    def tensors(self) -> dict[str, torch.Tensor]: ...
    def state(self) -> dict[str, Any]: ...


class ResumeHints(NamedTuple):
    """How error messages tell the user to resume.

    `newest`: from the newest checkpoint. `folder`: from a folder, whose path takes the place of {}.
    """

    newest: str = "--resume"
    folder: str = "--resume {}"


@dataclass
class Saver:
    """Writes the checkpoints of a run, and reports each one as an event."""

    plan: Plan
    engine: SavedEngine
    state: TrainState
    checkpointer: Checkpointer
    emit: Emit
    reducer: SumReducer
    stop_flag: StopFlag
    # The step of the newest checkpoint that was written, or is being written; -1 for none.
    saved_step: int = -1
    resume_hints: ResumeHints = ResumeHints()
    # The checkpoints that hosts keep in memory (`checkpoint.in_memory_every`); None without them.
    memory_checkpoints: Memory | None = None
    # How many saves in a row have failed.
    failed: int = 0
    # Whether the last state could not be kept in memory. Of failures in a row one is reported.
    memory_failed: bool = False
    # The metric with which the last checkpoint was saved; None without one.
    metric: float | None = None
    # A failed save is tried again after the first step greater than this; infinity if no save has
    # failed. The maximum over the ranks decides: a rank that knows of no failure yet prevents it.
    retry_after_step: float = math.inf

    def save(self, metric: float | None) -> None:
        """Hand the state to the checkpointer. Collective.

        `metric`: eval.metric of exactly these weights; None if it is not known.
        """
        alive()
        self.report(self.checkpointer.wait())
        self.checkpointer.save(self.state.step, self.engine.tensors(), self._dump(), metric)
        self.saved_step = self.state.step
        self.metric = metric

    def keep_in_memory(self) -> None:
        """Keep the state in the memory of hosts. Collective."""
        assert self.memory_checkpoints is not None, "checkpoint.in_memory_every is set"
        for result in self.memory_checkpoints.keep(
            self.state.step, self.engine.tensors(), self._dump()
        ):
            if result.error and not self.memory_failed:
                self._emit_save(result, path=None, size=0, error=f"in memory: {result.error}")
            self.memory_failed = result.error is not None

    def wait(self) -> None:
        """Wait until no save is in flight, to disk or to memory."""
        self.report(self.checkpointer.wait())
        if self.memory_checkpoints is not None:
            self.memory_checkpoints.wait()

    def save_last(self, metric: float | None) -> None:
        """Save the current weights as the last ones of the run, and wait until they are on disk.

        Collective. If they are saved already, only a metric that was not known then is written into
        their checkpoint.

        A save that fails for a reason that may pass is repeated for `checkpoint.wait_seconds`. After
        a stop signal it is repeated for half of `launch.grace_seconds`, and the other half is left
        for `checkpoint.fallback_dir`.

        Raises NotSaved.
        """
        # Waiting comes first: only after it do all ranks know the same of the save in flight, and
        # so take the same decisions.
        self.report(self.checkpointer.wait())
        self.failed = 0
        self._write_missing_metric(metric)
        limit = self.plan.config.checkpoint.wait_seconds
        first_failure: float | None = None
        has_shortened_limit = False
        while self.saved_step != self.state.step:
            self.save(metric)
            results = self.checkpointer.wait()
            self.report(results)
            if self.saved_step == self.state.step:
                break
            now = time.monotonic()
            if first_failure is None:
                first_failure = now
            waited = now - first_failure
            if self.stop_flag.requested and not has_shortened_limit:
                has_shortened_limit = True
                limit = min(limit, waited + self.plan.config.launch.grace_seconds / 2)
            # One rank that has to give up is enough.
            gives_up = waited >= limit or results[-1].is_permanent
            _, (rank_gives_up,) = self.reducer({}, float(gives_up))
            if any(rank_gives_up):
                self._give_up(f"{results[-1].error}; tried for {waited:.0f} s", metric)
            # Training is over, so a save may block it. Memory for copies may be what was lacking.
            self.checkpointer.asynchronous = False
            alive(math.inf)
            time.sleep(max(1.0, results[-1].seconds))
        if self.memory_checkpoints is not None:
            self.memory_checkpoints.clear()

    def _write_missing_metric(self, metric: float | None) -> None:
        """Write a metric into the checkpoint of these weights, if they were saved without one."""
        was_saved_without = self.saved_step == self.state.step and self.metric is None
        if metric is None or not was_saved_without:
            return
        error = self.checkpointer.write_metric(self.state.step, metric)
        if error is None:
            self.metric = metric
        else:
            # The weights are saved again, which writes both, or shows what is wrong with the disk.
            self.saved_step = -1

    def raise_preempted(self, signal_number: int) -> NoReturn:
        """Emit the event of a stop signal, and raise Preempted. The caller has saved the state."""
        name = signal.Signals(signal_number).name
        step = self.state.step
        self.emit(Preempt(step=step, signal=name))
        raise Preempted(
            f"{name}: stopped and saved at step {step}",
            where=self.plan.run_dir,
            fix=f"go on with {self.resume_hints.newest}",
        )

    def report(self, results: list[SaveResult]) -> None:
        """Emit an event for each save that has ended, and decide when a failed one is retried."""
        for result in results:
            if result.path is not None:
                self.failed = 0
                self.retry_after_step = math.inf
                self._emit_save(result, str(result.path), result.bytes, result.error)
                continue
            if result.step == self.saved_step:
                self.saved_step = -1
            self.failed += 1
            self.retry_after_step = result.step
            if result.begun:
                # A save that failed while it was writing is tried after ever more steps. One that
                # found too little space is tried again at once, since looking costs nothing.
                self.retry_after_step += 2**self.failed
            is_reported_already = self.failed > 1 and not result.begun
            if not is_reported_already:
                self._emit_save(result, None, result.bytes, result.error)

    def _emit_save(
        self, result: SaveResult, path: str | None, size: int, error: str | None
    ) -> None:
        """Emit the event of a save. `size`: bytes."""
        event = Save(
            step=result.step,
            path=path,
            bytes=size,
            error=error,
            seconds=result.seconds,
            blocked_seconds=result.blocked_seconds,
        )
        self.emit(event)

    def _dump(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides tensors."""
        data = self.plan.data
        identity: dict[str, Any] | None = None
        if data and data.identity:
            identity = data.identity.model_dump()
        return {
            "trainer": self.state.dump(),
            "engine": self.engine.state(),
            "config": self.plan.config.model_dump(mode="json"),
            "world_size": self.reducer.world_size,
            "global_samples": self.plan.batch.global_samples,
            "lr": self.plan.lr,
            "steps": self.plan.steps,
            "warmup_steps": self.plan.warmup_steps,
            "base": self.plan.base,
            "data": identity,
        }

    def _give_up(self, error: str, metric: float | None) -> NoReturn:
        """Save to `checkpoint.fallback_dir` if it is set, and raise NotSaved, which says what lies there."""
        what = f"the last checkpoint could not be written: {error}"
        fix = f"free some space; {self.resume_hints.newest} goes on from the newest checkpoint"
        folder = fallback_folder(self.plan.config, self.plan.run_dir)
        if folder is not None:
            result, is_complete = self.checkpointer.rescue(
                folder, self.state.step, self.engine.tensors(), self._dump(), metric
            )
            if result.path is None:
                what += f"; nor in checkpoint.fallback_dir: {result.error}"
            elif is_complete:
                what += f"; it lies in {result.path}"
                fix = f"free some space, and go on with {self.resume_hints.folder.format(result.path)}"
            else:
                what += f"; its weights alone lie in {result.path}"
                fix = f"free some space, and move that folder to {self.plan.run_dir}/checkpoints to export it"
        raise NotSaved(what, where=self.plan.run_dir, fix=fix)

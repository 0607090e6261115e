"""`run.profile`: a trace of a few steps by torch.profiler, a snapshot of a GPU's memory, and the dearest operators as an event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from drumline.core.plan import Plan
from drumline.telemetry.events import Emit, Profiled

DEAREST = 10
NO_SNAPSHOT = "none: only the allocator of a GPU keeps what one is made of"


class Profile:
    """Of the steps that `run.profile` names, on its ranks, into RUN/profile: rank-N.trace.json.gz (for chrome://tracing or Perfetto), and
    on a GPU rank-N.memory.pickle (for pytorch.org/memory_viz). Nothing that is computed changes."""

    def __init__(self, plan: Plan, rank: int, emit: Emit) -> None:
        wanted = plan.config.run.profile
        self.steps = (
            range(0)
            if wanted is None or rank not in wanted.ranks
            else range(wanted.at - 1, wanted.at - 1 + wanted.steps)
        )
        self.folder, self.rank, self.emit, self.on_gpu = (
            Path(plan.run_dir) / "profile",
            rank,
            emit,
            plan.device == "cuda",
        )
        self.profiler: Any = None

    def before(self, step: int) -> None:
        """Before the step after `step` steps."""
        if self.profiler is not None or step not in self.steps:
            return
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.on_gpu]
        if self.on_gpu:
            from drumline.vendor.torch import record_memory_history

            record_memory_history(max_entries=200_000)
        self.first, self.profiler = (
            step + 1,
            profile(activities=kinds, profile_memory=True, acc_events=True),
        )
        self.profiler.start()

    def after(self, step: int, last: bool = False) -> None:
        """After `step` steps. `last`: no more follow."""
        if self.profiler is None or (step < self.steps.stop and not last):
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        done, self.profiler = self.profiler, None
        done.stop()
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"rank-{self.rank}.trace.json.gz"
        done.export_chrome_trace(str(trace))
        snapshot = NO_SNAPSHOT
        if self.on_gpu:
            from drumline.vendor.torch import dump_memory_snapshot, record_memory_history

            snapshot = str(self.folder / f"rank-{self.rank}.memory.pickle")
            dump_memory_snapshot(snapshot)
            record_memory_history(enabled=None)
        dearest = operators(done, self.on_gpu)
        self.emit(
            Profiled(
                rank=self.rank,
                step=self.first,
                steps=step - self.first + 1,
                trace=str(trace),
                snapshot=snapshot,
                operators=dearest,
            )
        )


def operators(done: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """The dearest by seconds of their own, on a GPU those of the device: {name, calls, seconds, share of all, bytes taken and kept}."""
    kind = "device" if on_gpu else "cpu"
    each = [(getattr(one, f"self_{kind}_time_total") / 1e6, one) for one in done.key_averages()]
    total = sum(seconds for seconds, _ in each) or 1.0
    dearest = sorted(each, key=lambda pair: -pair[0])[:DEAREST]
    return [
        {
            "name": one.key,
            "calls": one.count,
            "seconds": seconds,
            "share": seconds / total,
            "bytes": getattr(one, f"self_{kind}_memory_usage"),
        }
        for seconds, one in dearest
    ]

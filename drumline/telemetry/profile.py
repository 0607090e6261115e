"""Profile a few steps by torch.profiler, for the key `run.profile`.

The results are a trace, a snapshot of a GPU's memory, and an event with the most expensive
operators.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from drumline.plan.plan import Plan
from drumline.telemetry.events import Emit, Profiled

# Number of operators in the event: those with the most seconds of their own.
TOP_OPERATORS = 10
# Events of the allocator that a snapshot keeps, at most.
MOST_MEMORY_EVENTS = 200_000
NO_SNAPSHOT = "none: memory snapshots need a GPU"


class Profile:
    """Profiles the steps that `run.profile` names, on its ranks.

    It writes to RUN/profile: rank-N.trace.json.gz (for chrome://tracing or Perfetto), and on a GPU
    rank-N.memory.pickle (for pytorch.org/memory_viz). No result changes.
    """

    def __init__(self, plan: Plan, rank: int, emit: Emit) -> None:
        options = plan.config.run.profile
        # The steps to profile, each as the number of steps before it.
        self.steps = range(0)
        if options is not None and rank in options.ranks:
            first = options.at - 1
            self.steps = range(first, first + options.steps)
        self.folder = Path(plan.run_dir) / "profile"
        self.rank = rank
        self.emit = emit
        self.on_gpu = plan.device == "cuda"
        self.profiler: Any = None

    def start_if_due(self, steps_done: int) -> None:
        """Start the profiler if the step after `steps_done` steps is the first one to profile."""
        if self.profiler is not None or steps_done not in self.steps:
            return
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            from drumline.vendor.torch import record_memory_history

            activities.append(ProfilerActivity.CUDA)
            record_memory_history(max_entries=MOST_MEMORY_EVENTS)
        self.first = steps_done + 1
        self.profiler = profile(activities=activities, profile_memory=True, acc_events=True)
        self.profiler.start()

    def stop_if_due(self, steps_done: int, last: bool = False) -> None:
        """Stop the profiler and write its files if the last step to profile is done.

        Args:
            steps_done: Number of steps that are done.
            last: Whether no more steps follow.
        """
        if self.profiler is None or (steps_done < self.steps.stop and not last):
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        done = self.profiler
        self.profiler = None
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
        top_operators = operators(done, self.on_gpu)
        self.emit(
            Profiled(
                rank=self.rank,
                step=self.first,
                steps=steps_done - self.first + 1,
                trace=str(trace),
                snapshot=snapshot,
                operators=top_operators,
            )
        )


def operators(done: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """Return the most expensive operators of a finished profiler.

    They are sorted by their own seconds, on a GPU those of the device. Each is {name, calls,
    seconds, share of all seconds, net bytes allocated}.
    """
    device = "device" if on_gpu else "cpu"
    timed = []
    for operator in done.key_averages():
        microseconds = getattr(operator, f"self_{device}_time_total")
        timed.append((microseconds / 1e6, operator))
    total = sum(seconds for seconds, _ in timed) or 1.0
    timed.sort(key=itemgetter(0), reverse=True)
    result = []
    for seconds, operator in timed[:TOP_OPERATORS]:
        result.append(
            {
                "name": operator.key,
                "calls": operator.count,
                "seconds": seconds,
                "share": seconds / total,
                "bytes": getattr(operator, f"self_{device}_memory_usage"),
            }
        )
    return result

"""Find stragglers, the ranks that hold up the others.

The seconds of a rank's own work are compared with the median rank's, as medians over a window of
steps. All ranks have the same numbers, so they agree without another message.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from drumline.dist.reduce import SumReducer, gather_from_ranks
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import Straggler

# Least number of steps of a window.
WINDOW = 20
# Least seconds of a window: shorter delays come from the host's other work.
WINDOW_SECONDS = 2.0
# A delay below this share of a step is not worth a line.
LEAST = 0.05
# A rank is blamed for at most this share of a step.
MOST_SAVED = 0.99


class _Step(NamedTuple):
    """A step of the window, over all ranks."""

    seconds: float
    tokens: int


class Stragglers:
    """Finds ranks that hold up the others.

    The training loop calls `add` after each step, on all ranks with the same numbers.
    """

    def __init__(self, reducer: SumReducer, emit: Emit, ratio: float) -> None:
        """Make a watch over the ranks. Collective.

        `ratio`: a rank is slow if it takes this many times the median rank's seconds.
        """
        self.emit = emit
        self.ratio = ratio
        device = "cpu"
        if reducer.fp64_device != "cpu":
            device = f"{reducer.device} {torch.cuda.get_device_name(reducer.device)}"
        # Names of the host and the device of each rank.
        self.hosts_and_devices = gather_from_ranks((socket.gethostname(), device))
        # Step of the window → rank → seconds of the rank's own work, without waits for other ranks.
        self.work_seconds: list[list[float]] = []
        self.steps: list[_Step] = []
        self.slow: set[int] = set()

    def add(
        self,
        step_number: int,
        seconds: float,
        tokens: int,
        data: Sequence[float],
        communication: Sequence[float],
    ) -> None:
        """Add a step, and report slow ranks at the end of a window.

        Args:
            step_number: Number of the step, from 1.
            seconds: Seconds that the step took.
            tokens: Tokens of its global batch.
            data: Seconds that each rank waited for its own data.
            communication: Seconds that each rank waited for other ranks. They are NaN if not
                measured: under model parallelism, and under FSDP2 and ZeRO on a GPU, ranks wait within
                their computation. Then only the seconds of `data` are compared.
        """
        if len(data) == 1:
            # A single rank holds up nobody.
            return
        work_s = []
        for data_seconds, communication_seconds in zip(data, communication, strict=True):
            if math.isnan(communication_seconds):
                work_s.append(data_seconds)
            else:
                work_s.append(seconds - communication_seconds)
        self.work_seconds.append(work_s)
        self.steps.append(_Step(seconds, tokens))
        window_seconds = sum(each.seconds for each in self.steps)
        if len(self.work_seconds) >= WINDOW and window_seconds >= WINDOW_SECONDS:
            self._report(step_number)
            self.work_seconds.clear()
            self.steps.clear()

    def _report(self, step_number: int) -> None:
        """Emit an event for each rank that has become slow in this window."""
        medians = _medians_by_rank(self.work_seconds)
        seconds = statistics.median(each.seconds for each in self.steps)
        tokens = statistics.fmean(each.tokens for each in self.steps)
        tokens_per_s = tokens / seconds
        # A rank that is slow in only one half was slow by chance.
        half = len(self.work_seconds) // 2
        first_medians = _medians_by_rank(self.work_seconds[:half])
        last_medians = _medians_by_rank(self.work_seconds[half:])
        slow = self._slow_ranks(medians, seconds)
        slow &= self._slow_ranks(first_medians, seconds)
        slow &= self._slow_ranks(last_medians, seconds)
        # Without a slow rank the slowest of the rest would set the pace.
        rest = [work_s for rank, work_s in enumerate(medians) if rank not in slow]
        slowest_of_rest = max(rest, default=0)
        # A rank that stays slow is reported once, and again if it was fast in between.
        newly_slow = slow - self.slow
        for rank in sorted(newly_slow):
            host, device = self.hosts_and_devices[rank]
            saved = min(medians[rank] - slowest_of_rest, seconds * MOST_SAVED)
            lost_tokens_per_s = tokens_per_s * saved / (seconds - saved)
            event = Straggler(
                step=step_number,
                rank=rank,
                host=host,
                device=device,
                seconds=medians[rank],
                median=statistics.median_low(medians),
                lost_tokens_per_s=lost_tokens_per_s,
            )
            self.emit(event)
        self.slow = slow

    def _slow_ranks(self, medians: list[float], seconds: float) -> set[int]:
        """Return the ranks whose own work takes much longer than the median rank's.

        `medians`: seconds of own work of each rank. `seconds`: of a step.
        """
        # The lower of the two middle values: of two ranks it is that of the fast one.
        typical = statistics.median_low(medians)
        slow = set()
        for rank, work_s in enumerate(medians):
            is_longer = work_s > self.ratio * typical
            is_worth_a_line = work_s - typical > LEAST * seconds
            if is_longer and is_worth_a_line:
                slow.add(rank)
        return slow


def _medians_by_rank(work_seconds: list[list[float]]) -> list[float]:
    """Return each rank's median over steps. `work_seconds`: seconds of each rank, for each step."""
    return [statistics.median(of_rank) for of_rank in zip(*work_seconds, strict=True)]

"""Ranks that hold up the others: seconds of their own work against the median rank's, medians over a window of steps."""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Sequence

import torch

from drumline.dist.reduce import Gather, from_all
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import Straggler

WINDOW = 20  # steps
WINDOW_SECONDS = 2.0  # at least: what lasts less is the host's own business
LEAST = 0.05  # of a step: what costs less is not worth a line


class Stragglers:
    """All ranks call `add` after the same steps, with the same numbers."""

    def __init__(self, gather: Gather, emit: Emit, ratio: float) -> None:
        """`ratio`: of the median rank's seconds. Collective."""
        self.emit, self.ratio = emit, ratio
        device = torch.cuda.get_device_name(gather.device) if gather.exact_on != "cpu" else "cpu"
        self.places = from_all(
            (socket.gethostname(), f"{gather.device} {device}" if device != "cpu" else device)
        )
        self.own: list[list[float]] = []
        self.steps: list[tuple[float, int]] = []  # seconds, tokens of all ranks
        self.slow: set[int] = set()

    def add(
        self,
        step: int,
        seconds: float,
        tokens: int,
        data: Sequence[float],
        communication: Sequence[float],
    ) -> None:
        """A step took `seconds`, of which each rank spent `data` waiting for its own data, and `communication` for other ranks. Where that
        is not measured (NaN: models that are cut wait within their computing, on a GPU FSDP2 and ZeRO, too) its data alone are compared."""
        if len(data) == 1:
            return
        self.own.append(
            [d if math.isnan(c) else seconds - c for d, c in zip(data, communication, strict=True)]
        )
        self.steps.append((seconds, tokens))
        if len(self.own) >= WINDOW and sum(seconds for seconds, _ in self.steps) >= WINDOW_SECONDS:
            self._judge(step)
            self.own.clear()
            self.steps.clear()

    def _judge(self, step: int) -> None:
        medians = _medians(self.own)
        seconds = statistics.median(seconds for seconds, _ in self.steps)
        rate = statistics.fmean(tokens for _, tokens in self.steps) / seconds
        half = len(self.own) // 2  # one that is slow in one half alone was slow by chance
        slow = set.intersection(
            *(
                self._slow(_medians(part), seconds)
                for part in (self.own, self.own[:half], self.own[half:])
            )
        )
        rest = sorted(own for rank, own in enumerate(medians) if rank not in slow)
        for rank in sorted(slow - self.slow):
            host, device = self.places[rank]
            # Without it the slowest of the others would set the pace.
            saved = min(medians[rank] - rest[-1], seconds * 0.99)
            lost, typical = rate * saved / (seconds - saved), statistics.median_low(medians)
            self.emit(
                Straggler(
                    step=step,
                    rank=rank,
                    host=host,
                    device=device,
                    seconds=medians[rank],
                    median=typical,
                    lost_tokens_per_s=lost,
                )
            )
        self.slow = slow

    def _slow(self, medians: list[float], seconds: float) -> set[int]:
        typical = statistics.median_low(medians)
        return {
            rank
            for rank, own in enumerate(medians)
            if own > self.ratio * typical and own - typical > LEAST * seconds
        }


def _medians(own: list[list[float]]) -> list[float]:
    """Of each rank."""
    return [statistics.median(column) for column in zip(*own, strict=True)]

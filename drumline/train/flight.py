"""A step between its update and what is said of it: on a GPU the host goes on while the figures travel."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property

from drumline.data.stream import Ints
from drumline.dist.reduce import Gathered


@dataclass
class Flight:
    """A step whose update is made, or under way on a GPU, and whose figures are on their way to the host."""

    gathered: Gathered
    step: int  # steps done with it
    position: int
    sample_ids: Ints  # of the global batch, without fillers
    tokens: int
    denominator: float  # of the loss; 0: what the sum `weight` turns out to be
    lr: float
    began: float  # unix, with waiting for data
    data_s: float  # that this rank waited for data
    sent: int | None = None
    clock: str | None = None  # what Measure calls its seconds

    def __post_init__(self) -> None:
        self.computed = time.time()

    @cached_property
    def arrived(self) -> tuple[dict[str, float], list[list[float]], float]:
        """Sums over all samples, numbers by rank, and when the step ended: on a GPU the host goes on before."""
        total, by_rank = self.gathered.read()
        return total, by_rank, self.computed if self.gathered.arrived is None else time.time()

    @property
    def total(self) -> dict[str, float]:
        return self.arrived[0]

    @property
    def by_rank(self) -> list[list[float]]:
        """Signal, `retry_at`, seconds waited for data and for others, bytes of memory of each rank; then the gradient norm alone."""
        return self.arrived[1]

    @property
    def loss(self) -> float:
        return self.total["loss"] / (self.denominator or self.total["weight"] or 1.0)

    @property
    def grad_norm(self) -> float:
        return self.by_rank[-1][0]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

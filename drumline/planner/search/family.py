"""The best candidates of a family of strategies, as far as a search has looked. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from drumline.errors import PlanError
from drumline.planner.search.answer import (
    TIE,
    Candidate,
    is_faster_by_tie,
    risk_adjusted_speed,
)

# The most strategies of a family that an answer holds.
FEW = 3


class Bar:
    """The speed that a layout must reach to be looked at.

    Of a strategy a layout is chosen whose risk-adjusted speed is within TIE of the fastest one. No
    risk makes it faster than its discounted speed, so memory need not be predicted of a slower one.

    Attributes:
        fastest: The risk-adjusted speed of the fastest candidate so far, in tokens/s; 0 without one.
    """

    def __init__(self, fastest: float = 0.0) -> None:
        self.fastest = fastest

    def raise_to(self, candidate: Candidate) -> None:
        """Count a candidate that fits."""
        self.fastest = max(self.fastest, risk_adjusted_speed(candidate))

    def is_reached(self, speed: float) -> bool:
        """Return whether a layout of this discounted speed may be chosen."""
        return speed >= (1 - TIE) * self.fastest

    def is_passed(self, speed: float) -> bool:
        """Return whether a layout of this discounted speed is faster than all so far by more than TIE."""
        return speed * (1 - TIE) > self.fastest


@dataclass
class Family:
    """What a search has found of a family so far."""

    # The best few candidates, one of each strategy.
    best: list[Candidate] = field(default_factory=list)
    # Of the candidates that do not fit, the one that needs least memory.
    nearest: Candidate | None = None
    # The fastest of the tight candidates.
    tight: Candidate | None = None
    # The reason of the first refusal.
    reason: str = ""
    # The number of layouts whose speed was predicted, and of which memory was predicted, too.
    looked_at: int = 0
    estimated: int = 0
    # Some layouts were passed over, since they are slower than what was found by then.
    is_cut: bool = False

    @property
    def slowest_kept(self) -> float:
        """The risk-adjusted speed that another strategy must exceed to be kept; 0 if there is room."""
        if len(self.best) < FEW:
            return 0.0
        return min(risk_adjusted_speed(candidate) for candidate in self.best)

    def keep(self, candidate: Candidate) -> None:
        """Keep the best candidate of a strategy if it is among the best few."""
        self.best = heapq.nlargest(FEW, [*self.best, candidate], risk_adjusted_speed)

    def add(self, other: Family) -> None:
        """Add what was found of another part of the family, of which nothing fits."""
        self.looked_at += other.looked_at
        self.estimated += other.estimated
        nearest = other.nearest
        if nearest is not None:
            self._keep_nearest(nearest)

    def _keep_nearest(self, candidate: Candidate) -> None:
        """Keep a candidate that does not fit if it needs less memory than all before it.

        Of those that need as much of a device, the one that needs least of its host is kept.
        """
        nearest = self.nearest
        if nearest is None or _needs(candidate) < _needs(nearest):
            self.nearest = candidate

    def refuse(self, error: PlanError) -> None:
        """Keep the reason of a refusal if it is the first."""
        self.reason = self.reason or describe_refusal(error)

    def record(self, candidate: Candidate, exclude_tight: bool) -> None:
        """Count a candidate, and keep it if it is the nearest or the fastest tight one so far."""
        self.estimated += 1
        estimated = candidate.estimate
        if not counts_as_fitting(candidate, exclude_tight):
            self._keep_nearest(candidate)
        elif estimated.verdict == "tight":
            tight = self.tight
            is_fastest = tight is None or is_faster_by_tie(estimated, tight.estimate)
            if is_fastest:
                self.tight = candidate


def _needs(candidate: Candidate) -> tuple[int, int]:
    """Return the bytes that a candidate needs of a device, and of a host."""
    return candidate.estimate.memory.reserved, candidate.estimate.host.most


def counts_as_fitting(candidate: Candidate, exclude_tight: bool) -> bool:
    """Return whether a candidate `fits`, or is `tight` and these are not excluded."""
    verdict = candidate.estimate.verdict
    if verdict == "tight":
        return not exclude_tight
    return verdict == "fits"


def describe_refusal(error: PlanError) -> str:
    """Return what an error says, with its fix."""
    if error.fix:
        return f"{error.what} — {error.fix}"
    return error.what

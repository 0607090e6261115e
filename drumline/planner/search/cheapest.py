"""The cheapest cluster that trains a number of tokens within some hours. Pure.

Whole hosts are rented: of each kind of host that is offered, more and more are planned for until a run
is in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from drumline.plan.estimate import Interval
from drumline.planner.cluster import with_nodes
from drumline.planner.search.answer import Candidate, Question
from drumline.planner.search.search import search

# The most hosts of a kind that are planned for: a choice.
MOST_HOSTS = 256
# Whether a run is in time: `yes` if it is at the slow end of its range too, `likely` if as expected.
InTime = Literal["yes", "likely", "no"]


@dataclass(frozen=True)
class Rented:
    """A number of hosts, the first plan on them, and how long it takes.

    `question`: with the cluster of these hosts. `best`: None if nothing fits. `hours`: of the run;
    `deadline`: the hours that there are.
    """

    question: Question
    best: Candidate | None
    tokens: float | None
    deadline: float

    @property
    def nodes(self) -> int:
        """Return the number of hosts."""
        return self.question.cluster.nodes

    @property
    def hours(self) -> float | None:
        """Return the expected hours; None if nothing fits."""
        if self.best is None:
            return None
        return self.best.hours(self.tokens)

    @property
    def hours_range(self) -> Interval | None:
        """Return the fewest and the most hours; None if nothing fits."""
        if self.best is None or self.hours is None:
            return None
        fast, slow = self.best.estimate.seconds_range
        return fast * self.hours, slow * self.hours

    @property
    def in_time(self) -> InTime:
        """Return whether the run is over before the deadline."""
        ends = self.hours_range
        if self.hours is None or ends is None or self.hours > self.deadline:
            return "no"
        return "yes" if ends[1] <= self.deadline else "likely"

    @property
    def device_hours(self) -> float | None:
        """Return the hours times the devices of all hosts, also of those that the plan leaves idle."""
        if self.hours is None:
            return None
        return self.hours * self.question.cluster.world_size

    @property
    def cost(self) -> float | None:
        """Return what the hosts cost; None if the price is not known, or nothing fits."""
        price = self.question.cluster.price_per_device_hour
        if price is None or self.device_hours is None:
            return None
        return price * self.device_hours

    @property
    def worth(self) -> float:
        """Return the cost, or without a price the hours of devices, by which offers are compared."""
        worth = self.device_hours if self.cost is None else self.cost
        assert worth is not None
        return worth


def rent(question: Question, tokens: float | None, deadline: float) -> list[Rented]:
    """Return the numbers of hosts of one kind that were planned for, the fewest first.

    They are doubled until a run is in time at the slow end of its range. Numbers between the last two
    are then halved, down to the fewest hosts that are in time.

    `question`: its cluster is of such hosts. `tokens`: of the whole run; None: those of its steps.
    `deadline`: hours.
    """
    by_nodes: dict[int, Rented] = {}
    for nodes in _doublings():
        by_nodes[nodes] = _plan(question, nodes, tokens, deadline)
        if by_nodes[nodes].in_time == "yes":
            break
    most = max(by_nodes)
    if by_nodes[most].in_time == "yes":
        too_few = most // 2
        enough = most
        while enough - too_few > 1:
            between = (too_few + enough) // 2
            by_nodes[between] = _plan(question, between, tokens, deadline)
            if by_nodes[between].in_time == "yes":
                enough = between
            else:
                too_few = between
    return [by_nodes[nodes] for nodes in sorted(by_nodes)]


def _doublings() -> Iterator[int]:
    """Yield 1, 2, 4, … hosts."""
    nodes = 1
    while nodes <= MOST_HOSTS:
        yield nodes
        nodes *= 2


def _plan(question: Question, nodes: int, tokens: float | None, deadline: float) -> Rented:
    """Return the first plan on so many hosts."""
    changed = replace(question, cluster=with_nodes(question.cluster, nodes))
    ranked = search(changed).ranked
    best = ranked[0] if ranked else None
    return Rented(changed, best, tokens, deadline)


def cheapest(offers: Sequence[Rented]) -> Rented | None:
    """Return the cheapest of those that are in time; None if none is.

    Those that are in time at the slow end of their range go before those that are as expected.
    """
    for wanted in ("yes", "likely"):
        in_time = [offer for offer in offers if offer.in_time == wanted]
        if in_time:
            return min(in_time, key=lambda offer: (offer.worth, offer.nodes))
    return None

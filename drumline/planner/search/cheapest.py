"""The cheapest cluster that trains a number of tokens within some hours. Pure.

Whole hosts are rented: of each kind of host that is offered, more and more are planned for until a run
is in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from drumline.plan.estimate import Interval
from drumline.planner.cluster import with_nodes
from drumline.planner.cost.fitted import SPEED_ERROR
from drumline.planner.search.answer import (
    SECONDS_PER_HOUR,
    TIE,
    Candidate,
    Question,
    select_fastest,
)
from drumline.planner.search.search import search, search_space

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

    They begin with the fewest hosts that could be in time at the devices' full rate, and are doubled
    until a run is in time at the slow end of its range. Numbers between the last two are then halved,
    down to the fewest hosts that are in time.

    `question`: its cluster is of such hosts. `tokens`: of the whole run; None: those of its steps.
    `deadline`: hours.
    """
    hosts = _Hosts(question, tokens, deadline)
    nodes = _fewest_hosts(question, tokens, deadline)
    too_few = nodes - 1
    planned = hosts.plan(nodes)
    if planned.best is not None and planned.hours is None:
        # How long the run is is not known, so no number of hosts is in time.
        return hosts.list_by_hosts()
    while planned.in_time != "yes" and nodes < MOST_HOSTS:
        too_few = nodes
        nodes = min(MOST_HOSTS, 2 * nodes)
        planned = hosts.plan(nodes)
    if planned.in_time == "yes":
        _halve(hosts, too_few, nodes)
    chosen = cheapest(hosts.list_by_hosts())
    if chosen is not None:
        hosts.plan_whole(chosen.nodes)
    return hosts.list_by_hosts()


def _halve(hosts: _Hosts, too_few: int, enough: int) -> None:
    """Plan for numbers of hosts between two, down to the fewest that are in time."""
    while enough - too_few > 1:
        between = (too_few + enough) // 2
        if hosts.plan(between).in_time == "yes":
            enough = between
        else:
            too_few = between


def _fewest_hosts(question: Question, tokens: float | None, deadline: float) -> int:
    """Return a number of hosts such that no fewer can be in time; at most MOST_HOSTS.

    On fewer, the products of the model's weights alone take longer, at the highest rate of the
    datasheet. It is 1 if the length of the run is not known, and on a CPU, whose rate is not known
    exactly.
    """
    cluster = question.cluster
    is_counted_in_tokens = tokens is not None and not question.config.images_alone
    if not is_counted_in_tokens or cluster.device.kind != "cuda":
        return 1
    assert tokens is not None
    facts = question.facts
    # How much of attention a kernel computes depends on its mask.
    flops_per_token = facts.flops_per_token - facts.layers * facts.attention_flops
    rates = dict(cluster.device.flops)
    if question.config.precision.kind != "fp8":
        rates.pop("fp8", None)
    rate = cluster.per_node * max(rates.values())
    hours_on_one_host = tokens * flops_per_token / rate / SECONDS_PER_HOUR
    return max(1, min(MOST_HOSTS, math.ceil(hours_on_one_host / deadline)))


class _Hosts:
    """The plans on numbers of hosts of one kind.

    All strategies are searched for the first number, and for the first one of several hosts, since
    some families need several. Each other number is planned for with the families that were near the
    best there, which takes a fraction of a search.
    """

    def __init__(self, question: Question, tokens: float | None, deadline: float) -> None:
        self.question = question
        self.tokens = tokens
        self.deadline = deadline
        self._rented: dict[int, Rented] = {}
        # Numbers that were planned for with all strategies.
        self._whole: set[int] = set()
        # The families that were near the best on any of these.
        self._families: set[str] = set()

    def list_by_hosts(self) -> list[Rented]:
        """Return what was planned for, the fewest hosts first."""
        return [self._rented[nodes] for nodes in sorted(self._rented)]

    def plan(self, nodes: int) -> Rented:
        """Return the best plan on so many hosts, of the families that were near the best."""
        spans_hosts = nodes > 1
        if not any((planned > 1) == spans_hosts for planned in self._whole):
            return self.plan_whole(nodes)
        changed = self._question_for_hosts(nodes)
        among = []
        for strategy in search_space(changed):
            if strategy.names(changed.cluster.world_size).family in self._families:
                among.append(strategy)
        ranked = search(changed, among, first_only=True).ranked if among else ()
        if not ranked:
            return self.plan_whole(nodes)
        self._rented[nodes] = Rented(changed, ranked[0], self.tokens, self.deadline)
        return self._rented[nodes]

    def plan_whole(self, nodes: int) -> Rented:
        """Return the best plan of all strategies on so many hosts."""
        if nodes in self._whole:
            return self._rented[nodes]
        changed = self._question_for_hosts(nodes)
        ranked = search(changed, first_only=True).ranked
        best = None
        if ranked:
            best = ranked[0]
            # Within the error of a prediction another family may be the first on more hosts.
            for candidate in select_fastest(ranked, SPEED_ERROR):
                self._families.add(candidate.family)
        self._whole.add(nodes)
        self._rented[nodes] = Rented(changed, best, self.tokens, self.deadline)
        return self._rented[nodes]

    def _question_for_hosts(self, nodes: int) -> Question:
        """Return the question on so many hosts."""
        return replace(self.question, cluster=with_nodes(self.question.cluster, nodes))


def cheapest(offers: Sequence[Rented]) -> Rented | None:
    """Return the cheapest of those that are in time; None if none is.

    Those that are in time at the slow end of their range go before those that are as expected. Of
    those that cost as much within TIE, the one with the fewest devices is taken.
    """
    for wanted in ("yes", "likely"):
        in_time = [offer for offer in offers if offer.in_time == wanted]
        if in_time:
            least = min(offer.worth for offer in in_time)
            as_cheap = [offer for offer in in_time if (1 - TIE) * offer.worth <= least]
            return min(as_cheap, key=lambda offer: (offer.question.cluster.world_size, offer.worth))
    return None

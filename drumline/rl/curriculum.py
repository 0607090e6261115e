"""Which prompts a rollout takes: in the data's order, or a share of each domain.

All numbers are integers and floats of the host, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drumline.config.rollouts import CurriculumConfig
from drumline.data.stream import GlobalOrder
from drumline.dist.seeds import derive
from drumline.errors import PlanError


def require_domains(weights: Mapping[str, float], domains: set[str]) -> None:
    """Raise PlanError if the weights do not name exactly these domains."""
    if weights.keys() != domains:
        fix = f"the data has {', '.join(sorted(domains))}"
        raise PlanError(
            "the shares must name each domain once", where="algorithm.curriculum.weights", fix=fix
        )


class Curriculum:
    """Draws sample ids without end.

    The prompts of a domain come in an order of their own, each once before any comes again. Prompts are
    whole, so a domain may be owed a part of one. It is carried over to later rollouts, so the shares
    are exact over many rollouts.

    With `kind: data` there is one domain, named "".
    """

    def __init__(
        self, config: CurriculumConfig, domains: Sequence[str], seed: int, shuffle: bool
    ) -> None:
        """`domains`: the domain of each sample."""
        self.config = config
        if config.kind == "data":
            domains = [""] * len(domains)
        names = sorted(set(domains))
        domains_N = np.asarray(list(domains))
        # The sample ids of each domain, and the order in which they come.
        self.members = {name: np.flatnonzero(domains_N == name) for name in names}
        self.orders = {}
        for name, ids in self.members.items():
            order_seed = derive(seed, "order", name) if name else derive(seed, "order")
            self.orders[name] = GlobalOrder(len(ids), order_seed, shuffle)
        # Prompts drawn so far, and parts of prompts that are owed.
        self.taken = dict.fromkeys(names, 0)
        self.owed = dict.fromkeys(names, 0.0)
        # Smoothed share of solved episodes, of the domains that were sampled.
        self.rates: dict[str, float] = {}

    def draw(self, count: int) -> list[int]:
        """Return the sample ids of the next `count` prompts."""
        for name, share in self.shares().items():
            self.owed[name] += share * count
        ids: list[int] = []
        for name, number in self._round_owed(count).items():
            start = self.taken[name]
            positions = self.orders[name].ids(start, start + number)
            ids += self.members[name][positions].tolist()
            self.taken[name] += number
            self.owed[name] -= number
        return ids

    def _round_owed(self, count: int) -> dict[str, int]:
        """Return how many prompts each domain gives, `count` in all.

        It is what each is owed, rounded down, and one more for those with the largest remainders. What
        earlier rollouts owe may round down to one too many in all; then the smallest remainders lose one.
        """
        numbers = {name: max(0, int(owed)) for name, owed in self.owed.items()}

        def remainder(name: str) -> tuple[float, str]:
            return self.owed[name] - numbers[name], name

        def excess(name: str) -> tuple[float, str]:
            return numbers[name] - self.owed[name], name

        missing = count - sum(numbers.values())
        for _ in range(missing):
            numbers[max(numbers, key=remainder)] += 1
        for _ in range(-missing):
            nonzero = [name for name in numbers if numbers[name] > 0]
            numbers[max(nonzero, key=excess)] -= 1
        return numbers

    def shares(self) -> dict[str, float]:
        """Return the share of the prompts that each domain is to give."""
        floor = 0.0
        if self.config.kind == "weights":
            weights = dict(self.config.weights)
        elif self.config.kind == "success":
            floor = self.config.floor
            weights = self._variances()
        else:
            weights = dict.fromkeys(self.members, 1.0)
        total = sum(weights.values())
        if total == 0:
            weights = dict.fromkeys(self.members, 1.0)
            total = float(len(weights))
        even_share = floor / len(weights)
        return {name: even_share + (1 - floor) * weight / total for name, weight in weights.items()}

    def _variances(self) -> dict[str, float]:
        """Return the Bernoulli variance of each domain's outcome: how much a prompt of it may teach.

        A domain that was not sampled yet is as uncertain as can be.
        """
        variances = {}
        for name in self.members:
            rate = self.rates.get(name, 0.5)
            variances[name] = rate * (1 - rate)
        return variances

    def learn(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Update the success rates with the rewards of a rollout's episodes, given by domain."""
        for name, values in rewards.items():
            if not values:
                continue
            rate = sum(value >= self.config.solved for value in values) / len(values)
            memory = self.config.memory if name in self.rates else 0.0
            self.rates[name] = memory * self.rates.get(name, 0.0) + (1 - memory) * rate

    def state(self) -> dict[str, Any]:
        return {"taken": dict(self.taken), "owed": dict(self.owed), "rates": dict(self.rates)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Domains that it does not have start afresh."""
        for name in self.members:
            if name in state["taken"]:
                self.taken[name] = state["taken"][name]
            if name in state["owed"]:
                self.owed[name] = state["owed"][name]
        self.rates = dict(state["rates"])

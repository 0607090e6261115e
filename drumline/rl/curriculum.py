"""Which prompts a rollout takes: in the data's order, or a share of each domain.

All numbers are integers and floats of the host, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drumline.config.rollouts import CurriculumConfig
from drumline.data.order import GlobalOrder
from drumline.dist.seeds import derive
from drumline.errors import PlanError


def require_domains(weights: Mapping[str, float], domains: set[str]) -> None:
    """Raise PlanError if the weights do not name exactly these domains.

    Args:
        weights: Domain → share, as the config has them.
        domains: Those of the data.
    """
    if weights.keys() != domains:
        fix = f"the data has {', '.join(sorted(domains))}"
        raise PlanError(
            "the shares must name each domain once",
            where="algorithm.curriculum.weights",
            fix=fix,
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
        """Set up the orders of all domains.

        Args:
            config: The section `algorithm.curriculum`.
            domains: The domain of each sample.
            seed: Of the run.
            shuffle: Whether a domain's prompts come in a random order.
        """
        self.config = config
        if config.kind == "data":
            domains = [""] * len(domains)
        # Sorted, so that all ranks go through them in the same order.
        names = sorted(set(domains))
        domains_N = np.asarray(list(domains))
        # The sample ids of each domain, and the order in which they come.
        self.members = {}
        self.orders = {}
        for name in names:
            ids = np.flatnonzero(domains_N == name)
            # Without domains the order is that of any other training.
            if name:
                order_seed = derive(seed, "order", name)
            else:
                order_seed = derive(seed, "order")
            self.members[name] = ids
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
            # Places within the domain, which `members` makes sample ids of.
            positions = self.orders[name].ids(start, start + number)
            ids_of_domain = self.members[name][positions]
            ids += ids_of_domain.tolist()
            self.taken[name] += number
            self.owed[name] -= number
        return ids

    def _round_owed(self, count: int) -> dict[str, int]:
        """Return how many prompts each domain gives, `count` in all.

        It is what each is owed, rounded down, and one more for those with the largest remainders. What
        earlier rollouts owe may round down to one too many in all; then the smallest remainders lose one.
        """
        numbers = {}
        for name, owed in self.owed.items():
            # A domain that got more than its share is owed less than nothing.
            numbers[name] = max(0, int(owed))

        # The name decides between equal remainders, so that all ranks choose the same domain.
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
        """Return the share of the prompts that each domain is to give. The shares add up to 1.

        With `kind: success` every domain keeps an even part of `floor`, so that a domain which is
        solved, or never solved, is still tried.
        """
        floor = 0.0
        if self.config.kind == "weights":
            weights = dict(self.config.weights)
        elif self.config.kind == "success":
            floor = self.config.floor
            weights = self._variances()
        else:
            weights = dict.fromkeys(self.members, 1.0)
        total = sum(weights.values())
        # No domain teaches anything more: all are solved, or none is.
        if total == 0:
            weights = dict.fromkeys(self.members, 1.0)
            total = float(len(weights))
        even_share = floor / len(weights)
        shares = {}
        for name, weight in weights.items():
            shares[name] = even_share + (1 - floor) * weight / total
        return shares

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
            solved = sum(value >= self.config.solved for value in values)
            rate = solved / len(values)
            # The first rollout of a domain has nothing to be smoothed with.
            memory = 0.0
            if name in self.rates:
                memory = self.config.memory
            earlier_rate = self.rates.get(name, 0.0)
            self.rates[name] = memory * earlier_rate + (1 - memory) * rate

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the curriculum, as copies."""
        return {
            "taken": dict(self.taken),
            "owed": dict(self.owed),
            "rates": dict(self.rates),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Domains that it does not have start afresh."""
        for name in self.members:
            if name in state["taken"]:
                self.taken[name] = state["taken"][name]
            if name in state["owed"]:
                self.owed[name] = state["owed"][name]
        self.rates = dict(state["rates"])

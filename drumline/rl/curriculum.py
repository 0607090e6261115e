"""Choose the prompts of a rollout: in the data's order, or a share of each domain.

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
        weights: Domain → share, from the config.
        domains: The domains of the data.
    """
    if weights.keys() != domains:
        fix = f"the data has {', '.join(sorted(domains))}"
        raise PlanError(
            "the shares must name each domain once",
            where="algorithm.curriculum.weights",
            fix=fix,
        )


class Curriculum:
    """Draws the sample ids of prompts, without end.

    Each domain has an order of its own, in which every prompt comes once before any comes again. A
    domain's share of a rollout may not be a whole number of prompts. The rest is carried over to later
    rollouts in `owed`, so the shares are exact over many rollouts.

    With `kind: data` there is one domain, named "".
    """

    def __init__(
        self, config: CurriculumConfig, domains: Sequence[str], seed: int, shuffle: bool
    ) -> None:
        """Set up the orders of all domains.

        Args:
            config: The section `algorithm.curriculum`.
            domains: The domain of each sample.
            seed: The seed of the run.
            shuffle: Whether a domain's prompts come in a random order.
        """
        self.config = config
        if config.kind == "data":
            domains = [""] * len(domains)
        # Sorted, so that all ranks iterate over them in the same order.
        names = sorted(set(domains))
        domains_N = np.asarray(list(domains))
        # The sample ids of each domain, and the order in which they come.
        self.members = {}
        self.orders = {}
        for name in names:
            ids = np.flatnonzero(domains_N == name)
            # Without domains the order is the same as in training without rollouts.
            if name:
                order_seed = derive(seed, "order", name)
            else:
                order_seed = derive(seed, "order")
            self.members[name] = ids
            self.orders[name] = GlobalOrder(len(ids), order_seed, shuffle)
        # Domain → prompts drawn from it so far.
        self.taken = dict.fromkeys(names, 0)
        # Domain → its share of all rollouts so far, less the prompts drawn from it. Negative for a
        # domain that is ahead of its share.
        self.owed = dict.fromkeys(names, 0.0)
        # Domain → smoothed share of solved episodes, for domains that were sampled.
        self.rates: dict[str, float] = {}

    def draw(self, count: int) -> list[int]:
        """Return the sample ids of the next `count` prompts."""
        for name, share in self.shares().items():
            self.owed[name] += share * count
        ids: list[int] = []
        for name, number in self._round_owed(count).items():
            start = self.taken[name]
            # Positions within the domain; `members` has the sample id of each.
            positions = self.orders[name].ids(start, start + number)
            ids_of_domain = self.members[name][positions]
            ids += ids_of_domain.tolist()
            self.taken[name] += number
            self.owed[name] -= number
        return ids

    def _round_owed(self, count: int) -> dict[str, int]:
        """Return the number of prompts to draw from each domain, `count` in all.

        This is the largest-remainder method: `owed` is rounded down, and the domains with the largest
        remainders get one more until the sum is `count`. For example, with `count` 2, owed 1.3 and 0.7
        becomes 1 and 1. The sum may also be too large, since a negative `owed` is rounded up to 0: owed
        3.0 and -1.0 becomes 3 and 0. Then the domains with the smallest remainders get one less.
        """
        numbers = {}
        for name, owed in self.owed.items():
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
        """Return each domain's share of the prompts. The shares add up to 1.

        With `kind: success` every domain has an equal part of `floor`, so that a domain which is always
        or never solved is still tried.
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
        # All variances are 0: each domain is always solved, or never.
        if total == 0:
            weights = dict.fromkeys(self.members, 1.0)
            total = float(len(weights))
        even_share = floor / len(weights)
        shares = {}
        for name, weight in weights.items():
            shares[name] = even_share + (1 - floor) * weight / total
        return shares

    def _variances(self) -> dict[str, float]:
        """Return rate · (1 − rate) of each domain: the variance of whether an episode is solved.

        The larger it is, the more prompts of the domain can teach. A domain that was not sampled yet
        has the largest variance, with the rate ½.
        """
        variances = {}
        for name in self.members:
            rate = self.rates.get(name, 0.5)
            variances[name] = rate * (1 - rate)
        return variances

    def learn(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Update the success rates. `rewards`: domain → rewards of the episodes of a rollout."""
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
        """Return the state for a checkpoint, as a copy."""
        return {
            "taken": dict(self.taken),
            "owed": dict(self.owed),
            "rates": dict(self.rates),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned. Domains that are new since then start from 0."""
        for name in self.members:
            if name in state["taken"]:
                self.taken[name] = state["taken"][name]
            if name in state["owed"]:
                self.owed[name] = state["owed"][name]
        self.rates = dict(state["rates"])

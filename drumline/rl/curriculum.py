"""Which prompts a rollout takes: in the data's order, or so many of each domain. Integers and host floats, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drumline.core.rollouts import CurriculumConfig
from drumline.data.stream import GlobalOrder
from drumline.dist.seeds import derive
from drumline.errors import PlanError


def require_domains(weights: Mapping[str, float], domains: set[str]) -> None:
    """Raises PlanError where the weights name other domains than these."""
    if weights.keys() != domains:
        fix = f"the data has {', '.join(sorted(domains))}"
        raise PlanError(
            "the shares must name each domain once", where="algorithm.curriculum.weights", fix=fix
        )


class Curriculum:
    """Draws sample ids without end. A domain's prompts come in an order of their own, each once before any comes again.

    What a domain is owed but not given, for prompts are whole, it gets in later rollouts: over many, shares are exact.
    """

    def __init__(
        self, config: CurriculumConfig, domains: Sequence[str], seed: int, shuffle: bool
    ) -> None:
        """`domains`: of each sample."""
        self.config = config
        everything = [""] * len(domains) if config.kind == "data" else list(domains)
        self.members = {
            name: np.flatnonzero(np.asarray(everything) == name) for name in sorted(set(everything))
        }
        self.orders = {
            name: GlobalOrder(
                len(ids), derive(seed, "order", name) if name else derive(seed, "order"), shuffle
            )
            for name, ids in self.members.items()
        }
        self.taken = dict.fromkeys(self.members, 0)
        self.owed = dict.fromkeys(self.members, 0.0)
        self.rates: dict[str, float] = {}  # of the domains that were sampled

    def draw(self, count: int) -> list[int]:
        """The ids of the next `count` prompts: of each domain what is owed rounded down, then one more where most is left."""
        for name, share in self.shares().items():
            self.owed[name] += share * count
        numbers = {name: max(0, int(owed)) for name, owed in self.owed.items()}
        while (missing := count - sum(numbers.values())) != 0:
            # Debts of earlier rollouts may round to one too many.
            step = 1 if missing > 0 else -1
            choices = [name for name in numbers if step > 0 or numbers[name] > 0]
            numbers[
                max(choices, key=lambda name: (step * (self.owed[name] - numbers[name]), name))
            ] += step
        ids: list[int] = []
        for name, number in numbers.items():
            at = self.taken[name]
            ids += self.members[name][self.orders[name].ids(at, at + number)].tolist()
            self.taken[name] += number
            self.owed[name] -= number
        return ids

    def shares(self) -> dict[str, float]:
        """The part of the prompts that each domain is to give; with `kind: data`, of all prompts as they come ("")."""
        weights = dict.fromkeys(self.members, 1.0)
        if self.config.kind == "weights":
            weights = dict(self.config.weights)
        elif self.config.kind == "success":
            # Bernoulli variance of the outcome: what a prompt of the domain may teach. An untried domain is as uncertain as can be.
            weights = {
                name: rate * (1 - rate)
                for name in self.members
                for rate in [self.rates.get(name, 0.5)]
            }
        total = sum(weights.values())
        if total == 0:
            weights, total = dict.fromkeys(self.members, 1.0), float(len(self.members))
        floor = self.config.floor if self.config.kind == "success" else 0.0
        return {
            name: floor / len(weights) + (1 - floor) * weight / total
            for name, weight in weights.items()
        }

    def learn(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Take note of a rollout: rewards of its episodes by domain."""
        for name, values in rewards.items():
            if values:
                rate = sum(value >= self.config.solved for value in values) / len(values)
                memory = self.config.memory if name in self.rates else 0.0
                self.rates[name] = memory * self.rates.get(name, 0.0) + (1 - memory) * rate

    def state(self) -> dict[str, Any]:
        return {"taken": dict(self.taken), "owed": dict(self.owed), "rates": dict(self.rates)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; domains that it did not know start afresh."""
        for mine, saved in ((self.taken, state["taken"]), (self.owed, state["owed"])):
            mine.update({name: saved[name] for name in mine if name in saved})
        self.rates = dict(state["rates"])

"""`drumline.plan(…)` from Python: the answer of `drumline plan` as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drumline.core.load import Overrides, overrides_of
from drumline.core.yaml_lines import write_yaml
from drumline.planner.question import Flags, ask, load_with_flags
from drumline.planner.report.explanation import explain
from drumline.planner.report.yaml_output import full_config
from drumline.planner.search.advice import nothing_fits, refusal
from drumline.planner.search.answer import Answer, Candidate, Refused
from drumline.planner.search.search import search
from drumline.report.bars import aside


@dataclass(frozen=True)
class RankedPlan:
    """One plan that fits. `seconds`: of a step; `memory_bytes`: reserved on the fullest device; `verdict`: fits or tight."""

    candidate: Candidate
    answer: Answer

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def verdict(self) -> str:
        return self.candidate.estimate.verdict

    @property
    def memory_bytes(self) -> int:
        return self.candidate.estimate.memory.reserved

    @property
    def seconds(self) -> float:
        return self.candidate.estimate.seconds.total

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.candidate.estimate.tokens_per_s

    @property
    def config(self) -> dict[str, Any]:
        """The YAML's keys: what was planned for, and this plan's sections over it. `drumline.train` takes it."""
        return full_config(self.answer.question.config, self.candidate)

    def yaml(self) -> str:
        """The same as the text of a YAML."""
        return write_yaml(self.config)

    def hours(self, tokens: float | None = None) -> float | None:
        """Hours of the run, or for `tokens`; None where neither is known."""
        return self.candidate.hours(tokens)

    def cost(self, tokens: float | None = None) -> float | None:
        """The price of those hours on all devices; None where there is no price."""
        return self.candidate.cost(self.answer.question.cluster.price_per_device_hour, tokens)

    def explain(self) -> str:
        """The explanation of memory and time by category."""
        return explain(self.answer, self.candidate.name)


@dataclass(frozen=True)
class Plans:
    """The plans that fit, the best first, and those that do not, with their reason. `notes`: what the planner assumed."""

    answer: Answer
    notes: tuple[str, ...]

    @cached_property
    def ranked(self) -> tuple[RankedPlan, ...]:
        return tuple(RankedPlan(candidate, self.answer) for candidate in self.answer.ranked)

    @property
    def refused(self) -> tuple[Refused, ...]:
        return self.answer.refused

    @property
    def best(self) -> RankedPlan:
        """Raises PlanError, with what would help, where nothing fits."""
        if not self.ranked:
            raise refusal(self.answer, nothing_fits(self.answer))
        return self.ranked[0]


def plan(
    config: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    model: str | None = None,
    cluster: str | None = None,
    length: int | None = None,
    adapter: str | None = None,
    batch: int | None = None,
    algorithm: str | None = None,
    precision: str | None = None,
    price: float | None = None,
    display: bool = False,
) -> Plans:
    """All plans that fit. Nothing is launched, and no weights and no data are needed. Give a config (a path, or its keys), or a model and
    the devices, or both: the options are those of `drumline plan`. Raises UserError and its kinds."""
    flags = Flags(model, cluster, length, adapter, batch, algorithm, precision, price)
    loaded = load_with_flags(config, overrides_of(overrides), flags)
    with aside(display) as on_progress:
        found = ask(loaded, on_progress)
    return Plans(search(found.question), found.notes)

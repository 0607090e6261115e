"""`drumline.plan(…)` from Python: the answer of `drumline plan` as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config.load import Overrides, overrides_of
from drumline.plan.out_of_memory import memory_errors
from drumline.planner.question import Flags, build_request, load_with_flags
from drumline.planner.report.explanation import explain
from drumline.planner.report.output import full_config
from drumline.planner.search.advice import nothing_fits_error, smallest_changes
from drumline.planner.search.answer import Answer, Candidate, Refused
from drumline.planner.search.auto import heuristic_first
from drumline.planner.search.search import search
from drumline.report.bars import stderr_bars
from drumline.system.yaml_lines import write_yaml


@dataclass(frozen=True)
class RankedPlan:
    """One plan that fits.

    `verdict`: fits or tight.
    `memory_bytes`: reserved on the fullest device.
    `seconds`: of a step.
    `tokens_per_s`: of all devices.
    """

    name: str
    verdict: str
    memory_bytes: int
    seconds: float
    tokens_per_s: float
    candidate: Candidate
    answer: Answer

    @property
    def config(self) -> dict[str, Any]:
        """Return the YAML's keys: what was planned for, with this plan's sections over it.

        `drumline.train` takes it.
        """
        return full_config(self.answer.question.config, self.candidate)

    def yaml(self) -> str:
        """Return the config as the text of a YAML."""
        return write_yaml(self.config)

    def hours(self, tokens: float | None = None) -> float | None:
        """Return the hours of the run, or those for `tokens`; None if neither is known."""
        return self.candidate.hours(tokens)

    def cost(self, tokens: float | None = None) -> float | None:
        """Return the price of those hours on all devices; None if there is no price."""
        price = self.answer.question.cluster.price_per_device_hour
        return self.candidate.cost(price, tokens)

    def explain(self) -> str:
        """Return the explanation of memory and time by category, as text."""
        return explain(self.answer, self.candidate.name)


@dataclass(frozen=True)
class Plans:
    """The plans that fit, the best first, and the families that do not, with their reason.

    `notes`: what the planner assumed.
    """

    ranked: tuple[RankedPlan, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]
    answer: Answer

    @property
    def best(self) -> RankedPlan:
        """Return the best plan. Raises PlanError, with what would help, if nothing fits."""
        if not self.ranked:
            raise nothing_fits_error(self.answer, smallest_changes(self.answer))
        return self.ranked[0]


@memory_errors()
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
    """Return all plans that fit. Nothing is launched, and no weights and no data are needed.

    Give a config (a path, or its keys), or a model and the devices, or both: the options are those of
    `drumline plan`. Raises UserError and its kinds.
    """
    flags = Flags(
        model=model,
        cluster=cluster,
        length=length,
        adapter=adapter,
        batch=batch,
        algorithm=algorithm,
        precision=precision,
        price=price,
    )
    loaded = load_with_flags(config, overrides_of(overrides), flags)
    with stderr_bars(display) as on_progress:
        found = build_request(loaded, on_progress)
    answer, _ = heuristic_first(search(found.question))
    plans = []
    for candidate in answer.ranked:
        estimate = candidate.estimate
        ranked_plan = RankedPlan(
            name=candidate.name,
            verdict=estimate.verdict,
            memory_bytes=estimate.memory.reserved,
            seconds=estimate.seconds.total,
            tokens_per_s=estimate.tokens_per_s,
            candidate=candidate,
            answer=answer,
        )
        plans.append(ranked_plan)
    return Plans(tuple(plans), answer.refused, found.notes, answer)

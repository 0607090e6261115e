"""What a plan has that a plain run lacks, and what each such choice gains by itself. Pure.

A plain run has FSDP2 (one device: nothing), one row at a time, full activation checkpointing, and
eager blocks. Each choice is undone alone, and the layout is estimated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from drumline.config.config import Config
from drumline.errors import PlanError
from drumline.plan.explain import describe_checkpointing
from drumline.planner.search.answer import Candidate, Question
from drumline.planner.search.compiling import set_compile
from drumline.planner.search.search import evaluate, search_space


class Change(NamedTuple):
    """A choice of a plan, and the config that has the plain value in its place.

    Attributes:
        choice: The choice, in words.
        plain: The plain value, in words.
        config: The config with the plain value.
    """

    choice: str
    plain: str
    config: Config


class Gain(NamedTuple):
    """What a choice gains.

    Attributes:
        choice: The choice, in words.
        plain: The plain value, in words.
        candidate: The plan with the plain value; None if rules or numbers refuse it.
        reason: Why it is refused; empty if it is not.
    """

    choice: str
    plain: str
    candidate: Candidate | None
    reason: str


def gains(question: Question, candidate: Candidate) -> list[Gain]:
    """Return each choice of a plan that a plain run lacks, with the plan that lacks it alone."""
    found = []
    for change in _changes(question, candidate):
        try:
            other = evaluate(question, change.config, change.plain)
        except PlanError as error:
            found.append(Gain(change.choice, change.plain, None, error.what))
        else:
            found.append(Gain(change.choice, change.plain, other, ""))
    return found


def _changes(question: Question, candidate: Candidate) -> Iterator[Change]:
    """Yield the choices of a plan that a plain run lacks."""
    layout = candidate.layout
    # The global batch stays, and the accumulation follows from the micro-batch.
    batch = {"global_samples": layout.batch.global_samples, "accumulation": None}
    config = _with_values(layout.config, "batch", micro_batch=layout.batch.micro_batch, **batch)
    config = _with_values(
        config, "memory", activation_checkpointing=layout.activation_checkpointing
    )
    plain_strategy = _plain_strategy(question)
    if plain_strategy is not None and layout.strategy != plain_strategy:
        # Another strategy has other data ranks, so the micro-batch is open.
        changed = _with_values(layout.config, "batch", micro_batch=None, **batch)
        changed = changed.model_copy(update={"strategy": plain_strategy})
        name = plain_strategy.names(question.cluster.world_size).name
        yield Change(f"strategy {candidate.name}", name, changed)
    if layout.batch.micro_batch > 1:
        changed = _with_values(config, "batch", micro_batch=1, **batch)
        yield Change(f"micro-batch {layout.batch.micro_batch}", "micro-batch 1", changed)
    if layout.activation_checkpointing != "full":
        changed = _with_values(
            config, "memory", activation_checkpointing="full", checkpointed_blocks=None
        )
        yield Change(f"checkpointing {describe_checkpointing(layout)}", "full", changed)
    if layout.config.compile.enabled:
        yield Change("compiled blocks", "eager", set_compile(config, False))


def _plain_strategy(question: Question) -> Any:
    """Return FSDP2 without further parallelism; None for one device, or if it is not to be searched."""
    for strategy in search_space(question):
        names = strategy.names(question.cluster.world_size)
        if names.name == "fsdp2" and question.cluster.world_size > 1:
            return strategy
    return None


def _with_values(config: Config, section: str, **values: Any) -> Config:
    """Return the config with keys of a section set."""
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})

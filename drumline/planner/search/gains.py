"""What a plan has that a plain run lacks, and what each such choice gains by itself. Pure.

A plain run has FSDP2 (one device: nothing), one row at a time, full activation checkpointing of all
blocks, eager blocks, whole hidden states on each rank of tensor parallelism, and fp32 master weights.
Each choice is undone alone, and the layout is estimated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    open_batch = replace(question, config=layout.config)
    open_batch = open_batch.with_values("batch", micro_batch=None, **batch)
    # A question whose config has each choice of the plan.
    chosen = open_batch.with_values("batch", micro_batch=layout.batch.micro_batch)
    chosen = chosen.with_values("memory", activation_checkpointing=layout.activation_checkpointing)
    plain_strategy = _plain_strategy(question)
    if plain_strategy is not None and layout.strategy != plain_strategy:
        # Another strategy has other data ranks, so the micro-batch is open.
        config = open_batch.config.model_copy(update={"strategy": plain_strategy})
        name = plain_strategy.names(question.cluster.world_size).name
        yield Change(f"strategy {candidate.name}", name, config)
    if layout.batch.micro_batch > 1:
        changed = chosen.with_values("batch", micro_batch=1)
        yield Change(f"micro-batch {layout.batch.micro_batch}", "micro-batch 1", changed.config)
    has_unequal_blocks = layout.config.memory.checkpointed_blocks is not None
    if layout.activation_checkpointing != "full" or has_unequal_blocks:
        changed = chosen.with_values(
            "memory", activation_checkpointing="full", checkpointed_blocks=None
        )
        kind = describe_checkpointing(layout)
        yield Change(f"checkpointing {kind}", "full of all blocks", changed.config)
    if layout.config.memory.activation_offload:
        changed = chosen.with_values("memory", activation_offload=False)
        yield Change("activations on the host", "activations on the device", changed.config)
    if layout.config.memory.mlp_chunk is not None:
        changed = chosen.with_values("memory", mlp_chunk=None)
        yield Change("feed-forward parts in chunks", "whole ones", changed.config)
    if layout.config.compile.enabled:
        yield Change("compiled blocks", "eager", set_compile(chosen.config, False))
    if layout.stream_parts > 1:
        whole = layout.strategy.model_copy(update={"sequence_parallel": False})
        config = chosen.config.model_copy(update={"strategy": whole})
        yield Change("sequence parallelism", "whole hidden states on each rank", config)
    if layout.is_pure_bf16:
        changed = chosen.with_values("precision", master="fp32")
        yield Change("bf16 weights and moments", "fp32 ones", changed.config)


def _plain_strategy(question: Question) -> Any:
    """Return FSDP2 without further parallelism; None for one device, or if it is not to be searched."""
    for strategy in search_space(question):
        names = strategy.names(question.cluster.world_size)
        if names.name == "fsdp2" and question.cluster.world_size > 1:
            return strategy
    return None

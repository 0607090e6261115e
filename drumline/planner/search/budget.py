"""Choose the activation checkpointing that keeps within a budget of memory (`memory.budget_gb`). Pure.

It chooses the kind of checkpointing, and how many blocks are checkpointed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from drumline.config.config import MemoryConfig
from drumline.errors import PlanError
from drumline.hardware.cluster import Cluster
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.planner.cost.memory import memory
from drumline.planner.cost.times import estimate

# From least to most recomputation.
CHECKPOINTING = ("none", "selective", "full")
GB = 1e9
L = TypeVar("L", bound=Layout)


def checkpointing_modes(options: MemoryConfig) -> Sequence[str]:
    """Return the kinds of checkpointing to try: the one that the config sets, or else all."""
    if "activation_checkpointing" in options.model_fields_set:
        return (options.activation_checkpointing,)
    return CHECKPOINTING


class _Needs(NamedTuple):
    """The bytes that a layout needs with a kind of checkpointing over all blocks."""

    bytes_: int
    kind: str


def fit_to_budget(layout: L, facts: ModelFacts, cluster: Cluster, kinds: Sequence[str]) -> L:
    """Return the layout with the fastest checkpointing that its budget allows.

    For each of `kinds`, as few blocks are checkpointed as the budget allows, or all blocks if a rule
    says that blocks must not differ. The fastest of these layouts is returned; without a budget, the
    layout as it is. Raises PlanError if nothing stays within the budget.
    """
    budget_gb = layout.config.memory.budget_gb
    if budget_gb is None:
        return layout
    budget = budget_gb * GB

    def with_checkpointing(kind: str, blocks: int | None) -> L:
        options = layout.config.memory.model_copy(
            update={"activation_checkpointing": kind, "checkpointed_blocks": blocks}
        )
        config = layout.config.model_copy(update={"memory": options})
        check_rules(Case(config, layout.mesh, layout.device, layout.precision, facts))
        return layout.model_copy(update={"config": config, "activation_checkpointing": kind})

    def fits_over(kind: str, blocks: int) -> bool:
        return memory(with_checkpointing(kind, blocks), facts, cluster).reserved <= budget

    found: list[L] = []
    needs_of_kinds: list[_Needs] = []
    for kind in kinds:
        # The rules refuse some kinds, and some numbers of blocks.
        with suppress(PlanError):
            over_all = with_checkpointing(kind, None)
            needs = memory(over_all, facts, cluster).reserved
            needs_of_kinds.append(_Needs(needs, kind))
            if needs > budget:
                continue
            found.append(over_all)
            if kind != "none":
                numbers = range(1, facts.layers)
                # How many of these numbers of blocks are too few to stay within the budget.
                too_few = bisect_left(numbers, True, key=partial(fits_over, kind))
                found.append(with_checkpointing(kind, 1 + too_few))
    if not found:
        raise _budget_error(min(needs_of_kinds))
    return min(found, key=lambda each: estimate(each, facts, cluster).seconds.total)


def _budget_error(least: _Needs) -> PlanError:
    """Return the error that nothing stays within the budget."""
    # Rounded up to three digits, so that the step fits into the number that is shown.
    unit = 10 ** max(0, len(str(least.bytes_)) - 3)
    needs_gb = -(-least.bytes_ // unit) * unit / GB
    return PlanError(
        f"a step takes {needs_gb:g} GB at least, with activation_checkpointing={least.kind}",
        where="memory.budget_gb",
        fix="give more, or use a smaller micro-batch or memory.activation_offload=true",
    )

"""Checkpointing by a budget of memory (`memory.budget_gb`): what is computed again, over how many blocks. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from drumline.core.config import MemoryConfig
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.rule import Case
from drumline.core.rules import check_rules
from drumline.errors import PlanError
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.memory import memory
from drumline.planner.cost.times import estimate

CHECKPOINTING = ("none", "selective", "full")
L = TypeVar("L", bound=Layout)


def kinds_of(options: MemoryConfig) -> Sequence[str]:
    """The kinds of checkpointing that a config leaves open: all, or the one it sets."""
    return (
        (options.activation_checkpointing,)
        if "activation_checkpointing" in options.model_fields_set
        else CHECKPOINTING
    )


def within_budget(layout: L, facts: ModelFacts, cluster: Cluster, kinds: Sequence[str]) -> L:
    """The layout with the fastest of `kinds` of checkpointing over as few blocks as its budget allows (where blocks may not differ, over
    all); itself without a budget. Raises PlanError where nothing stays within it."""
    budget, found, least = layout.config.memory.budget_gb, list[L](), list[tuple[int, str]]()
    if budget is None:
        return layout

    def at(kind: str, blocks: int | None) -> L:
        options = layout.config.memory.model_copy(
            update={"activation_checkpointing": kind, "checkpointed_blocks": blocks}
        )
        config = layout.config.model_copy(update={"memory": options})
        check_rules(Case(config, layout.mesh, layout.device, layout.precision, facts))
        return layout.model_copy(update={"config": config, "activation_checkpointing": kind})

    def needs(candidate: L) -> int:
        return memory(candidate, facts, cluster).reserved

    for kind in kinds:
        with suppress(PlanError):
            every = at(kind, None)
            least.append((needs(every), kind))
            if least[-1][0] <= budget * 1e9:
                found.append(every)
                if kind != "none":  # of all blocks it is enough, of none it may be
                    blocks = 1 + bisect_left(
                        range(1, facts.layers),
                        True,
                        key=lambda number: needs(at(kind, number)) <= budget * 1e9,
                    )
                    found.append(at(kind, blocks))
    if not found:
        bytes_, kind = min(least)
        # Rounded up to three digits: with that much it goes.
        unit = 10 ** max(0, len(str(bytes_)) - 3)
        what = f"a step takes {-(-bytes_ // unit) * unit / 1e9:g} GB at least, with activation_checkpointing={kind}"
        raise PlanError(
            what,
            where="memory.budget_gb",
            fix="give more, or use a smaller micro-batch or memory.activation_offload=true",
        )
    return min(found, key=lambda each: estimate(each, facts, cluster).seconds.total)

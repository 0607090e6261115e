"""The search space: each strategy that the planner looks at for a run on a cluster, in families. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline.core.facts import ModelFacts
from drumline.core.registry import kinds
from drumline.core.strategy import Space, StrategySpec
from drumline.hardware.cluster import Cluster


@dataclass(frozen=True)
class Option:
    """One strategy. `family`: its name without numbers; `name`: with them; `simple`: less is simpler."""

    family: str
    name: str
    strategy: StrategySpec
    simple: int


def search_space(given: StrategySpec, cluster: Cluster, facts: ModelFacts, nvme: str | None = None) -> Iterator[Option]:
    """Each strategy once by name. What `given` sets is kept in all options of its kind; strategies that are
    looked at only by name (dp, local_sgd, diloco, tp, cp, pp, model_parallel) are there where it names them. `nvme`: a folder on a disk
    that ZeRO-3 may offload to."""
    seen = set[str]()
    for strategy in _all(given, cluster, facts, nvme):
        merged = _merge(given, strategy)
        if merged is None:
            continue
        option = describe(merged, cluster.world_size)
        if option.name not in seen:
            seen.add(option.name)
            yield option


def _all(given: StrategySpec, cluster: Cluster, facts: ModelFacts, nvme: str | None) -> Iterator[StrategySpec]:
    yield from given.variants()
    space = Space(cluster.nodes, cluster.per_node, facts.layers, nvme)
    for spec in kinds(StrategySpec).values():
        yield from spec.candidates(space)


# What candidates choose; anything else that a user says of a strategy is laid over it.
_CHOSEN = ("tp", "cp", "pp", "replicate", "reshard_after_forward", "offload", "offload_optimizer", "offload_parameters")


def _merge(given: StrategySpec, strategy: StrategySpec) -> StrategySpec | None:
    """The strategy with what the user set for its kind; None where that is something else."""
    if strategy is given or strategy.kind != given.kind:
        return strategy
    fixed = {name: getattr(given, name) for name in given.model_fields_set - {"kind"}}
    if fixed.get("config") or fixed.get("options"):  # a DeepSpeed config of the user's own sets everything
        return None
    pipeline = fixed.pop("pipeline", None)
    if any(fixed[name] != getattr(strategy, name) for name in _CHOSEN if name in fixed):
        return None
    if pipeline is not None and getattr(strategy, "pp", 1) > 1:
        options = {name: getattr(pipeline, name) for name in pipeline.model_fields_set}
        fixed["pipeline"] = getattr(strategy, "pipeline", pipeline).model_copy(update=options)
    return strategy.model_copy(update=fixed)


def describe(strategy: StrategySpec, world: int) -> Option:
    """Its names: `fsdp2 grad-op × pp 4 interleaved × tp 2`, of family `fsdp2 × pp × tp`."""
    family, name, simple = strategy.names(world)
    return Option(family, name, strategy, simple)

"""Every way of spreading a run over a cluster that the planner looks at: families, and the strategies in each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline.core.facts import ModelFacts
from drumline.core.registry import kinds
from drumline.core.strategy import Space, StrategySpec
from drumline.hardware.cluster import Cluster


@dataclass(frozen=True)
class Way:
    """One strategy. `family`: what it is called without its numbers; `name`: with them; `simple`: less is simpler."""

    family: str
    name: str
    strategy: StrategySpec
    simple: int


def ways(asked: StrategySpec, cluster: Cluster, facts: ModelFacts, nvme: str | None = None) -> Iterator[Way]:
    """All that can be written down, names only once. What `asked` says of a strategy is held in all ways of its kind; strategies that
    are only tried by name (dp, local_sgd, diloco, tp, cp, pp, model_parallel) are there where it names them. `nvme`: a folder on a disk
    that ZeRO-3 may offload to."""
    seen = set[str]()
    for strategy in _all(asked, cluster, facts, nvme):
        held = _hold(asked, strategy)
        if held is None:
            continue
        way = describe(held, cluster.world_size)
        if way.name not in seen:
            seen.add(way.name)
            yield way


def _all(asked: StrategySpec, cluster: Cluster, facts: ModelFacts, nvme: str | None) -> Iterator[StrategySpec]:
    yield from asked.variants()
    space = Space(cluster.nodes, cluster.per_node, facts.layers, nvme)
    for spec in kinds(StrategySpec).values():
        yield from spec.candidates(space)


# What candidates choose; anything else that a user says of a strategy is laid over it.
_CHOSEN = ("tp", "cp", "pp", "replicate", "reshard_after_forward", "offload", "offload_optimizer", "offload_parameters")


def _hold(asked: StrategySpec, strategy: StrategySpec) -> StrategySpec | None:
    """The strategy with what the user said of its kind; None where it says otherwise."""
    if strategy is asked or strategy.kind != asked.kind:
        return strategy
    said = {name: getattr(asked, name) for name in asked.model_fields_set - {"kind"}}
    if said.get("config") or said.get("options"):  # a DeepSpeed config of the user's own says everything
        return None
    pipeline = said.pop("pipeline", None)
    if any(said[name] != getattr(strategy, name) for name in _CHOSEN if name in said):
        return None
    if pipeline is not None and getattr(strategy, "pp", 1) > 1:
        options = {name: getattr(pipeline, name) for name in pipeline.model_fields_set}
        said["pipeline"] = getattr(strategy, "pipeline", pipeline).model_copy(update=options)
    return strategy.model_copy(update=said)


def describe(strategy: StrategySpec, world: int) -> Way:
    """Its names: `fsdp2 grad-op × pp 4 interleaved × tp 2`, of family `fsdp2 × pp × tp`."""
    family, name, simple = strategy.names(world)
    return Way(family, name, strategy, simple)

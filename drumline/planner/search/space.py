"""Every way of spreading a run over a cluster that the planner looks at: families, and the strategies in each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from drumline.core import strategies as s
from drumline.core.batch import divisors
from drumline.core.facts import ModelFacts
from drumline.core.rule import offloads
from drumline.hardware.cluster import Cluster

# How much there is to understand, and to go wrong: of equally fast ways the simplest is taken.
SIMPLE = {"single": 0, "dp": 1, "ddp": 2, "fsdp2": 3, "zero1": 4, "zero2": 4, "zero3": 4}
MIXED, OFFLOADED = 10, 5
SCHEDULES = ("1f1b", "interleaved", "gpipe")
MOST_COPIES = 4  # sizes of a hybrid's shard groups that are tried: a host, two, four, eight


@dataclass(frozen=True)
class Way:
    """One strategy. `family`: what it is called without its numbers; `name`: with them; `simple`: less is simpler."""

    family: str
    name: str
    strategy: s.AnyStrategy
    simple: int


def ways(asked: s.AnyStrategy, cluster: Cluster, facts: ModelFacts, nvme: str | None = None) -> Iterator[Way]:
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


def _all(asked: s.AnyStrategy, cluster: Cluster, facts: ModelFacts, nvme: str | None) -> Iterator[s.AnyStrategy]:
    if not isinstance(asked, s.AutoStrategy):
        yield asked
        if isinstance(asked, s.PPStrategy) and "schedule" not in asked.model_fields_set:
            yield from (asked.model_copy(update={"schedule": schedule}) for schedule in SCHEDULES)
    yield s.SingleStrategy()
    if cluster.world_size > 1:
        yield s.DDPStrategy()
        yield s.FSDP2Strategy()
        yield s.FSDP2Strategy(reshard_after_forward=False)
        yield from (s.FSDP2Strategy(replicate=copies) for copies in _copies(cluster, 1))
        yield from (s.Zero1Strategy(), s.Zero2Strategy(), s.Zero3Strategy())
    yield s.FSDP2Strategy(offload="cpu")
    cpu = s.Offload(kind="cpu")
    yield from (s.Zero1Strategy(offload_optimizer=cpu), s.Zero2Strategy(offload_optimizer=cpu), s.Zero3Strategy(offload_optimizer=cpu))
    yield s.Zero3Strategy(offload_optimizer=cpu, offload_parameters=cpu)
    if nvme is not None:
        disk = s.Offload(kind="nvme", path=nvme)
        yield s.Zero3Strategy(offload_optimizer=disk)
        yield s.Zero3Strategy(offload_optimizer=disk, offload_parameters=disk)
    yield from _mixes(cluster, facts)


def _mixes(cluster: Cluster, facts: ModelFacts) -> Iterator[s.AnyStrategy]:
    """Degrees that divide: tensor parallel within a host, at most a stage a layer, no pipeline of parts of sequences."""
    world = cluster.world_size
    for tp, cp, pp in product(divisors(cluster.per_node), divisors(world), divisors(world)):
        if tp == cp == pp == 1 or world % (tp * cp * pp) or pp > max(1, facts.layers) or (cp > 1 and pp > 1):
            continue
        data = world // (tp * cp * pp)
        for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            degrees = {"tp": tp, "cp": cp, "pp": pp, "pipeline": s.PipelineConfig(schedule=schedule)}
            yield s.DDPStrategy(**degrees)
            if data * cp == 1:
                continue
            yield s.FSDP2Strategy(**degrees)
            yield s.FSDP2Strategy(**degrees, reshard_after_forward=False)
            for copies in _copies(cluster, tp * cp * pp):
                yield s.FSDP2Strategy(**degrees, replicate=copies)


def _copies(cluster: Cluster, model: int) -> Iterator[int]:
    """Numbers of copies of a hybrid whose shards stay within a host, two, four or eight; `model`: ranks that share samples."""
    data = cluster.world_size // model
    for hosts in (2**i for i in range(MOST_COPIES)):
        shard, rest = divmod(cluster.per_node * hosts, model)
        if hosts < cluster.nodes and not rest and shard > 1 and shard < data and data % shard == 0:
            yield data // shard


# What `_all` chooses; anything else that a user says of a strategy is laid over it.
_CHOSEN = ("tp", "cp", "pp", "replicate", "reshard_after_forward", "offload", "offload_optimizer", "offload_parameters")


def _hold(asked: s.AnyStrategy, strategy: s.AnyStrategy) -> s.AnyStrategy | None:
    """The strategy with what the user said of its kind; None where it says otherwise."""
    if strategy is asked or strategy.kind != asked.kind:
        return strategy
    said = {name: getattr(asked, name) for name in asked.model_fields_set - {"kind"}}
    if said.get("config") or said.get("options"):  # a DeepSpeed config of the user's own says everything
        return None
    pipeline = said.pop("pipeline", None)
    if any(said[name] != getattr(strategy, name) for name in _CHOSEN if name in said):
        return None
    if pipeline is not None and isinstance(strategy, s.DDPStrategy | s.FSDP2Strategy) and strategy.pp > 1:
        options = {name: getattr(pipeline, name) for name in pipeline.model_fields_set}
        said["pipeline"] = strategy.pipeline.model_copy(update=options)
    return strategy.model_copy(update=said)


def describe(strategy: s.AnyStrategy, world: int) -> Way:
    """Its names: `fsdp2 grad-op × pp 4 interleaved × tp 2`, of family `fsdp2 × pp × tp`."""
    if not isinstance(strategy, s.DDPStrategy | s.FSDP2Strategy):
        return _whole(strategy, world)
    degrees = {name: getattr(strategy, name) for name in ("pp", "cp", "tp") if getattr(strategy, name) > 1}
    data = world // (strategy.pp * strategy.cp * strategy.tp)
    numbered = [f"{name} {degree}" for name, degree in degrees.items()]
    if strategy.pp > 1 and strategy.pipeline.schedule != "1f1b":
        numbered[0] += f" {strategy.pipeline.schedule}"
    kind: str = strategy.kind
    base, words = [kind], [kind]
    if isinstance(strategy, s.FSDP2Strategy):
        hybrid, offload = strategy.replicate > 1, strategy.offload != "none"
        words = [kind + " grad-op" * (not strategy.reshard_after_forward) + " hybrid" * hybrid + " offload" * offload]
        base = words[:] if not degrees else base
        if hybrid:
            words[0] += f" {strategy.replicate}"
    elif degrees and data == 1:
        base, words = [], []
    simple = SIMPLE[strategy.kind] + MIXED * len(degrees) + (OFFLOADED if getattr(strategy, "offload", "none") != "none" else 0)
    simple += getattr(strategy, "replicate", 1) > 1 or (strategy.pp > 1 and strategy.pipeline.schedule != "1f1b")
    return Way(" × ".join([*base, *degrees]), " × ".join([*words, *numbered]), strategy, simple)


def _whole(strategy: s.AnyStrategy, world: int) -> Way:
    """Strategies without degrees of their own beside others."""
    kind: str = strategy.kind
    words, degree = [kind], getattr(strategy, "degree", world) or world
    if isinstance(strategy, s.TPStrategy | s.CPStrategy | s.PPStrategy | s.ModelParallelStrategy):
        copies = ["ddp"] if degree < world else []
        numbered = f"{strategy.kind} {degree}"
        if isinstance(strategy, s.PPStrategy) and strategy.schedule != "1f1b":
            numbered += f" {strategy.schedule}"
        return Way(" × ".join([*copies, strategy.kind]), " × ".join([*copies, numbered]), strategy, MIXED)
    if isinstance(strategy, s.ZeroStrategy):
        kinds = offloads(strategy)[: 2 if strategy.kind == "zero3" else 1]
        if "nvme" in kinds:
            words.append("nvme" if kinds[-1] == "nvme" else "nvme optimizer")
        elif "cpu" in kinds:
            words.append("offload" if kinds[-1] == "cpu" else "offload optimizer")
    name = " ".join(words)
    return Way(name, name, strategy, SIMPLE.get(strategy.kind, MIXED) + (OFFLOADED if len(words) > 1 else 0))

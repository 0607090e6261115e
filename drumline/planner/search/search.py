"""All layouts of a run on a cluster that the rules allow, each with its estimate, the best first. Pure.

search space (families, strategies) ──▶ rules ──▶ micro-batch × checkpointing ──▶ estimate ──▶ best of each strategy ──▶ FEW of each family

The search keeps the best of each strategy alone, so memory does not grow with the cluster; it makes whole plans for those few.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from drumline.core.batch import TOKENS_AT_ONCE, batches
from drumline.core.config import Config
from drumline.core.estimate import Estimate
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.registry import kinds
from drumline.core.resolve import deepspeed_of, device_of, lay_out, precision_of, require, resolve
from drumline.core.rule import Case
from drumline.core.stages import in_flight
from drumline.core.strategy import Space, StrategySpec
from drumline.errors import PlanError
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Device, Machine
from drumline.planner.cost.estimate import estimate
from drumline.planner.search.answer import TIE, Answer, Candidate, Question, Refused, faster, in_order, why_not


@dataclass(frozen=True)
class Option:
    """A strategy of the search space. `family`: its name without numbers; `name`: with them; `simple`: less is simpler."""

    family: str
    name: str
    strategy: StrategySpec
    simple: int


def search_space(given: StrategySpec, cluster: Cluster, facts: ModelFacts, nvme: str | None = None) -> Iterator[Option]:
    """Each strategy once by name. All options of the kind of `given` keep what it sets; strategies that need to be named (dp, local_sgd,
    diloco, tp, cp, pp, model_parallel) are there where it names them. `nvme`: a folder on a disk that ZeRO-3 may offload to."""
    seen, space = set[str](), Space(cluster.nodes, cluster.per_node, facts.layers, nvme)
    for strategy in chain(given.variants(), *(spec.candidates(space) for spec in kinds(StrategySpec).values())):
        if (merged := _merge(given, strategy)) is not None:
            option = describe(merged, cluster.world_size)
            if option.name not in seen:
                seen.add(option.name)
                yield option


# Keys that candidates choose; whatever else a user sets of a strategy goes over them.
_CHOSEN = ("tp", "cp", "pp", "replicate", "reshard_after_forward", "offload", "offload_optimizer", "offload_parameters")


def _merge(given: StrategySpec, strategy: StrategySpec) -> StrategySpec | None:
    """The strategy with what the user set for its kind; None where these contradict."""
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
    """The option of a strategy, with its names: `fsdp2 grad-op × pp 4 interleaved × tp 2`, of family `fsdp2 × pp × tp`."""
    family, name, simple = strategy.names(world)
    return Option(family, name, strategy, simple)


FEW = 3  # strategies of a family that an answer holds
CHECKPOINTING = ("none", "selective", "full")


@dataclass
class _Family:
    """The best few of a family so far; `nearest`: of those that do not fit, the one that needs least; `tight`: of those with little room
    the fastest; `reason`: of the first refusal."""

    best: list[tuple[tuple[bool, float], int, Option, Layout, Estimate]] = field(default_factory=list)
    nearest: tuple[Option, Layout, Estimate] | None = None
    tight: tuple[Option, Layout, Estimate] | None = None
    reason: str = ""
    looked_at: int = 0


def search(question: Question, among: Iterable[Option] | None = None) -> Answer:
    """The best few of each family, or the reason why none fits. `among`: the options to estimate; None: all."""
    question = replace(question, config=question.config.strategy.adopted(question.config))
    look, families = _Look(question), dict[str, _Family]()
    for number, option in enumerate(options_of(question) if among is None else among):
        family = families.setdefault(option.family, _Family())
        try:
            chosen = look.best_of(option, family)
        except PlanError as error:
            family.reason = family.reason or _reason(error)
            continue
        if chosen is not None:
            layout, estimated = chosen
            entry = ((estimated.verdict == "fits", estimated.tokens_per_s), -number, option, layout, estimated)
            (heapq.heappush if len(family.best) < FEW else heapq.heappushpop)(family.best, entry)
    ranked, refused = list[Candidate](), list[Refused]()
    for name, family in families.items():
        try:
            ranked += [_candidate(question, option, layout, estimated) for _, _, option, layout, estimated in family.best]
            if not family.best:
                refused.append(_refused(question, name, family))
        except PlanError as error:  # what only a whole plan looks at, such as a DeepSpeed config of the user's own
            refused.append(Refused(name, _reason(error)))
    first = tuple(in_order(ranked))
    looked_at = sum(family.looked_at for family in families.values())
    return Answer(question, first, tuple(refused), looked_at, tight=_faster(question, first, families.values()))


def options_of(question: Question) -> Iterator[Option]:
    """All options that the question leaves open."""
    strategy = question.config.strategy
    nvme = getattr(strategy, "nvme", None)
    return search_space(strategy, question.cluster, question.facts, question.nvme or nvme)


def look_at(question: Question, strategy: StrategySpec) -> Candidate | Refused:
    """The best candidate of one strategy, or why it is refused."""
    answer = search(question, [describe(strategy, question.cluster.world_size)])
    return answer.ranked[0] if answer.ranked else answer.refused[0]


def fits(question: Question, among: Iterable[Option] | None = None) -> bool:
    """Whether any option fits, first with most checkpointing and the smallest micro-batch; ends with the first that does."""
    question = replace(question, config=question.config.strategy.adopted(question.config))
    look = _Look(question)
    return any(look.fits(option) for option in (options_of(question) if among is None else among))


def evaluate(question: Question, config: Config, name: str) -> Candidate:
    """The candidate of one config with a set strategy on the question's cluster. Raises PlanError where a rule or a number refuses it."""
    plan = resolve(
        config,
        run_dir="",
        machine=_machine(question.cluster),
        world_size=_world(question, config.strategy),
        facts=question.facts,
        model_path=None,
        data=question.data,
        roles=question.roles,
    )
    return Candidate(name, plan, estimate(plan, question.facts, question.cluster))


class _Look:
    """A search's estimates of one strategy at a time; what does not change is worked out once."""

    def __init__(self, question: Question) -> None:
        self.question, self.config = question, question.config
        machine = _machine(question.cluster)
        self.device = device_of(self.config, machine)
        self.precision = precision_of(self.config, machine, self.device, [])
        open_ = "activation_checkpointing" not in self.config.memory.model_fields_set and question.facts.block_parameters
        self.checkpointing = CHECKPOINTING if open_ else (self.config.memory.activation_checkpointing,)

    def best_of(self, option: Option, family: _Family) -> tuple[Layout, Estimate] | None:
        """The best micro-batch and checkpointing of a strategy; None where none fits, which is noted. Raises PlanError where rules or
        numbers refuse all."""
        found, refusal = list[tuple[Layout, Estimate]](), None
        for kind in self.checkpointing:
            try:
                for layout, estimated in self.looks(option, kind):
                    family.looked_at += 1
                    if estimated.verdict != "no":
                        found.append((layout, estimated))
                        if estimated.verdict == "tight" and (family.tight is None or faster(estimated, family.tight[2])):
                            family.tight = option, layout, estimated
                    elif family.nearest is None or estimated.memory.reserved < family.nearest[2].memory.reserved:
                        family.nearest = option, layout, estimated
            except PlanError as error:
                refusal = refusal or error
        if not found and refusal is not None and family.nearest is None:
            raise refusal
        return self._best(found) if found else None

    def fits(self, option: Option) -> bool:
        """Whether any micro-batch fits under some checkpointing."""
        for kind in reversed(self.checkpointing):
            try:
                if any(estimated.verdict == "fits" for _, estimated in self.looks(option, kind)):
                    return True
            except PlanError:
                continue
        return False

    def looks(self, option: Option, checkpointing: str) -> Iterator[tuple[Layout, Estimate]]:
        """Up to the first that does not fit, the smallest micro-batch first: a larger one needs no less. But without accumulation no
        gradients are added up, so that one is looked at too, where their bytes (with DDP's buckets twice) would do."""
        over = False
        for layout in self.layouts(option, checkpointing):
            if over and layout.batch.accumulation > 1:
                continue
            estimated = estimate(layout, self.question.facts, self.question.cluster)
            yield layout, estimated
            if estimated.verdict == "no":
                over = True
                if estimated.memory.peak - 2 * estimated.memory.gradients > estimated.limit:
                    return

    def layouts(self, option: Option, checkpointing: str) -> Iterator[Layout]:
        """A layout for each possible micro-batch, the smallest first. Raises PlanError where rules or numbers refuse all."""
        question, strategy = self.question, option.strategy
        if strategy.package == "deepspeed" and not question.deepspeed:
            raise PlanError("deepspeed is not installed", fix="pip install deepspeed ninja")
        if self.device == "cpu" and "cpu" in strategy.offloads() and strategy != question.config.strategy:
            raise PlanError("the device's memory is the host's: there is nothing to offload to")
        world = _world(question, strategy)
        if question.processes and world != question.cluster.world_size:
            raise PlanError(f"it is one process, and there are {question.cluster.world_size}")
        memory = self.config.memory.model_copy(update={"activation_checkpointing": checkpointing})
        config = self.config.model_copy(update={"strategy": strategy, "memory": memory})
        case = Case(config, strategy.mesh(world), self.device, self.precision, question.facts)
        require(case, question.roles, question.data)
        refusal, is_refused = None, True
        for batch in batches(config, case.mesh.data_ranks, question.cluster.world_size, in_flight(case.mesh, strategy)):
            try:
                layout = lay_out(case, batch, question.roles, question.data, question.cluster.per_node)
            except PlanError as error:
                refusal = refusal or error
                continue
            is_refused = False
            yield layout
        if refusal is not None and is_refused:
            raise refusal

    def _best(self, found: list[tuple[Layout, Estimate]]) -> tuple[Layout, Estimate]:
        """The fastest that fits; of those as fast, the least checkpointing, then the micro-batch nearest to the usual one."""
        fits = [pair for pair in found if pair[1].verdict == "fits"] or found
        fastest = max(estimated.tokens_per_s for _, estimated in fits)
        same = [pair for pair in fits if pair[1].tokens_per_s >= (1 - TIE) * fastest]

        def usual(pair: tuple[Layout, Estimate]) -> tuple[int, float]:
            layout = pair[0]
            off = abs(math.log2(layout.rows * layout.length / TOKENS_AT_ONCE))
            return CHECKPOINTING.index(layout.activation_checkpointing), off

        return min(same, key=usual)


def _candidate(question: Question, option: Option, layout: Layout, estimated: Estimate) -> Candidate:
    """A candidate whose config sets its batch. Raises PlanError where a DeepSpeed config of the user's own contradicts."""
    batch, given = layout.batch, layout.config.batch
    total = {} if given.global_samples or given.global_tokens else {"accumulation": batch.accumulation}
    config = layout.config.model_copy(update={"batch": given.model_copy(update={"micro_batch": batch.micro_batch, **total})})
    made = layout.model_copy(update={"config": config})
    deepspeed_of(made, question.facts, "")
    return Candidate(option.name, made, estimated, option.family, option.simple)


def _faster(question: Question, ranked: tuple[Candidate, ...], families: Iterable[_Family]) -> Candidate | None:
    """The fastest that is tight, where something slower fits."""
    found = max((family.tight for family in families if family.tight), key=lambda tight: tight[2].tokens_per_s, default=None)
    if found is None or not ranked or ranked[0].estimate.verdict != "fits" or not faster(found[2], ranked[0].estimate):
        return None
    try:
        return _candidate(question, *found)
    except PlanError:  # what only a whole plan looks at
        return None


def _refused(question: Question, name: str, family: _Family) -> Refused:
    if family.nearest is None:
        return Refused(name, family.reason)
    return Refused(name, why_not(family.nearest[2]), _candidate(question, *family.nearest))


def _reason(error: PlanError) -> str:
    return error.what + (f" — {error.fix}" if error.fix else "")


def _world(question: Question, strategy: StrategySpec) -> int:
    """Processes of a strategy."""
    return 1 if strategy.one_process else question.cluster.world_size


def _machine(cluster: Cluster) -> Machine:
    """A host of the cluster, as `detect` would describe it."""
    device = cluster.device
    devices = [Device(device.name, device.memory_bytes)] * cluster.per_node if device.kind == "cuda" else []
    return Machine(devices, cores=1, memory_bytes=cluster.host_memory_bytes or 0, device=device.kind, bf16="bf16" in device.flops)

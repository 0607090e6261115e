"""All layouts of a run on a cluster that the rules allow, each with its estimate, the best first. Pure.

search space (families, strategies) ──▶ rules ──▶ micro-batch × checkpointing ──▶ estimate ──▶ best of each strategy ──▶ FEW of each family

The search keeps only the best few candidates of a family, so memory does not grow with the cluster; whole plans are made of those alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from drumline.core.batch import TOKENS_AT_ONCE, batches, resolve_batch
from drumline.core.config import BatchConfig, Config
from drumline.core.estimate import Estimate
from drumline.core.facts import ModelFacts
from drumline.core.mesh import Mesh
from drumline.core.plan import BatchPlan, Layout
from drumline.core.registry import kinds
from drumline.core.resolve import deepspeed_of, device_of, lay_out, precision_of, require, resolve
from drumline.core.rule import Case
from drumline.core.stages import in_flight
from drumline.core.strategy import Space, StrategySpec
from drumline.errors import PlanError
from drumline.hardware import catalog
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Device, Machine
from drumline.planner.cost.times import estimate
from drumline.planner.search.answer import (
    TIE,
    Answer,
    Candidate,
    Question,
    Refused,
    corrected,
    expected_speed,
    faster,
    in_order,
    is_clearly_faster,
    trusted_speed,
    why_not,
)
from drumline.planner.search.budget import CHECKPOINTING, kinds_of, within_budget
from drumline.planner.search.compiling import reason_against, set_compile

FEW = 3  # strategies of a family that an answer holds
# Speeds of micro-batches of one strategy that differ by less are the same: what is wrong of one is wrong of the other, too.
SAME_ERROR = 0.01
MOST_AT_ONCE = 4 * TOKENS_AT_ONCE  # of micro-batches that are tried where nobody has set a batch
# Keys that candidates choose; whatever else a user sets of a strategy goes over them.
_CHOSEN = (
    "tp",
    "cp",
    "pp",
    "ep",
    "replicate",
    "reshard_after_forward",
    "offload",
    "offload_optimizer",
    "offload_parameters",
)


def search_space(question: Question) -> Iterator[StrategySpec]:
    """All strategies that the question leaves open, each once by name. Those of the kind of the config's strategy keep what it sets;
    strategies that need to be named (dp, local_sgd, diloco, tp, cp, pp, model_parallel) are there where it names them."""
    given, cluster, seen = question.config.strategy, question.cluster, set[str]()
    space = Space(
        cluster.nodes,
        cluster.per_node,
        question.facts.layers,
        question.nvme or getattr(given, "nvme", None),
        question.facts.experts,
    )
    for strategy in chain(
        given.variants(), *(spec.candidates(space) for spec in kinds(StrategySpec).values())
    ):
        merged = _merge(given, strategy)
        if merged is not None and (name := merged.names(cluster.world_size).name) not in seen:
            seen.add(name)
            yield merged


def _chosen(strategy: StrategySpec, key: str) -> Any:
    """What a strategy has for a key, or does where the key is null."""
    return getattr(strategy, "reshards" if key == "reshard_after_forward" else key)


def _merge(given: StrategySpec, strategy: StrategySpec) -> StrategySpec | None:
    """The strategy with what the user set for its kind; None where these contradict."""
    if strategy is given or strategy.kind != given.kind:
        return strategy
    fixed = {name: getattr(given, name) for name in given.model_fields_set - {"kind"}}
    if fixed.get("config") or fixed.get(
        "options"
    ):  # a DeepSpeed config of the user's own sets everything
        return None
    pipeline = fixed.pop("pipeline", None)
    if fixed.get("reshard_after_forward", False) is None:  # left to each strategy
        del fixed["reshard_after_forward"]
    if any(fixed[name] != _chosen(strategy, name) for name in _CHOSEN if name in fixed):
        return None
    if pipeline is not None and getattr(strategy, "pp", 1) > 1:
        options = {name: getattr(pipeline, name) for name in pipeline.model_fields_set}
        fixed["pipeline"] = getattr(strategy, "pipeline", pipeline).model_copy(update=options)
    return strategy.model_copy(update=fixed)


@dataclass
class _Family:
    """The best few of a family so far. `nearest`: of those that do not fit, the one that needs least; `tight`: of those with little room
    the fastest; `reason`: of the first refusal; `looked_at`: estimates in all."""

    best: list[Candidate] = field(default_factory=list)
    nearest: Candidate | None = None
    tight: Candidate | None = None
    reason: str = ""
    looked_at: int = 0


def search(
    question: Question, among: Iterable[StrategySpec] | None = None, *, with_room: bool = False
) -> Answer:
    """The best few of each family, or the reason why none fits. `among`: the strategies to estimate; None: all. `with_room`: tight
    candidates do not count."""
    estimates, families = _Estimates(question), dict[str, _Family]()
    question = estimates.question
    for strategy in search_space(question) if among is None else among:
        family = families.setdefault(strategy.names(question.cluster.world_size).family, _Family())
        if (best := estimates.best_of(strategy, family, with_room)) is not None:
            family.best = heapq.nlargest(FEW, [*family.best, best], expected_speed)
    if estimates.may_compile:
        for family in families.values():
            family.best = [
                estimates.with_compile(candidate, family, with_room) for candidate in family.best
            ]
    found, refused = list[Candidate](), list[Refused]()
    for name, family in families.items():
        try:
            found += [_complete(candidate, question.facts) for candidate in family.best]
            if not family.best:
                nearest = family.nearest and _complete(family.nearest, question.facts)
                refused.append(
                    Refused(name, why_not(nearest.estimate) if nearest else family.reason, nearest)
                )
        except (
            PlanError
        ) as error:  # what only a whole plan looks at, such as a DeepSpeed config of the user's own
            refused.append(Refused(name, _reason(error)))
    ranked = list(in_order(found))
    if ranked and not with_room:
        faster_one = _faster_and_tight(ranked, families.values(), question.facts)
        if faster_one is not None:
            ranked = list(in_order([*ranked, faster_one]))
    return Answer(
        question,
        tuple(ranked),
        tuple(refused),
        sum(family.looked_at for family in families.values()),
    )


def _faster_and_tight(
    ranked: Sequence[Candidate], families: Iterable[_Family], facts: ModelFacts
) -> Candidate | None:
    """The fastest tight candidate of all, with a name of its own, where it is faster than the first of `ranked` and than each tight one
    among these. None otherwise: the strategy's best candidate is another one, and fits with more room."""
    tight = [family.tight for family in families if family.tight is not None]
    if not tight:
        return None
    fastest = max(tight, key=trusted_speed)
    rivals = [
        ranked[0],
        *(candidate for candidate in ranked if candidate.estimate.verdict == "tight"),
    ]
    if not all(is_clearly_faster(fastest, rival) for rival in rivals):
        return None
    same_strategy = next(
        (candidate for candidate in ranked if candidate.name == fastest.name), None
    )
    if same_strategy is not None:
        fastest = replace(
            fastest, name=f"{fastest.name}, {_difference(fastest.layout, same_strategy.layout)}"
        )
    with suppress(PlanError):  # what only a whole plan looks at
        return _complete(fastest, facts)
    return None


def _difference(layout: Layout, other: Layout) -> str:
    """What a layout does otherwise than another one of the same strategy, for its name."""
    kind = layout.activation_checkpointing
    if kind == other.activation_checkpointing and layout.batch == other.batch:
        return "compiled" if layout.config.compile.enabled else "eager"
    if kind == other.activation_checkpointing:
        return f"micro-batch {layout.batch.micro_batch}"
    return "no checkpointing" if kind == "none" else f"{kind} checkpointing"


def look_at(question: Question, strategy: StrategySpec) -> Candidate | Refused:
    """The best candidate of one strategy, or why it is refused."""
    answer = search(question, [strategy])
    return answer.ranked[0] if answer.ranked else answer.refused[0]


def fits(question: Question, among: Iterable[StrategySpec] | None = None) -> bool:
    """Whether any strategy fits, with most checkpointing that the rules allow, the smallest micro-batch first; ends with the first that
    does. With less checkpointing none needs less."""
    estimates = _Estimates(question)
    for strategy in search_space(estimates.question) if among is None else among:
        for kind in reversed(estimates.checkpointing):
            with suppress(PlanError):
                if any(
                    candidate.estimate.verdict == "fits"
                    for candidate in estimates.candidates(strategy, kind)
                ):
                    return True
                break
    return False


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
    return Candidate(name, plan, _estimate(question, plan))


class _Estimates:
    """A search's estimates of one strategy at a time; what does not change is computed once."""

    def __init__(self, question: Question) -> None:
        self.config = question.config.strategy.adopted(question.config)
        self.question = replace(question, config=self.config)
        machine = _machine(question.cluster)
        self.device = device_of(self.config, machine)
        self.precision = precision_of(self.config, machine, self.device, [])
        known = catalog.DEVICES.get(question.cluster.device.name)
        if (
            self.config.precision.kind == "fp8"
            and self.device == "cuda"
            and known is not None
            and "fp8" not in known.flops
        ):
            raise PlanError(
                f"precision fp8 but {known.name} has no fp8",
                where="precision",
                fix="use precision=bf16",
            )
        memory = self.config.memory
        is_open = self.config.compile.enabled is None
        self.may_compile = is_open and not reason_against(
            self.config, question.facts, question.cluster
        )
        self.kinds = (
            kinds_of(memory)
            if question.facts.block_parameters
            else (memory.activation_checkpointing,)
        )
        # A budget chooses for each batch by itself.
        self.checkpointing = self.kinds if memory.budget_gb is None else self.kinds[:1]

    def with_compile(self, eager: Candidate, family: _Family, with_room: bool) -> Candidate:
        """Return the best compiled candidate of an eager one's strategy if the run gains from it, else the eager one."""
        compiled = self.best_of(eager.layout.strategy, family, with_room, compiles=True)
        if compiled is None:
            return eager
        is_faster = expected_speed(compiled) * (1 - TIE) > expected_speed(eager)
        return compiled if is_faster else eager

    def best_of(
        self, strategy: StrategySpec, family: _Family, with_room: bool, compiles: bool = False
    ) -> Candidate | None:
        """Return the best micro-batch and checkpointing of a strategy: the largest expected speed.

        Of those as fast (TIE), one that fits goes before a tight one, then the least checkpointing. Of these,
        among the fastest (SAME_ERROR), it is the micro-batch nearest to the usual one. None where none fits or
        rules and numbers refuse all; the family notes it. `with_room`: tight ones do not count. `compiles`:
        compiled, where the config leaves it open.
        """
        found = list[Candidate]()
        for kind in self.checkpointing:
            try:
                for candidate in self.candidates(strategy, kind, compiles):
                    family.looked_at += 1
                    estimated, nearest, tight = candidate.estimate, family.nearest, family.tight
                    if estimated.verdict == "fits" or (
                        estimated.verdict == "tight" and not with_room
                    ):
                        found.append(candidate)
                        if estimated.verdict == "tight" and (
                            tight is None or faster(estimated, tight.estimate)
                        ):
                            family.tight = candidate
                    elif (
                        nearest is None
                        or estimated.memory.reserved < nearest.estimate.memory.reserved
                    ):
                        family.nearest = candidate
            except PlanError as error:
                family.reason = family.reason or _reason(error)
        if not found:
            return None
        fastest = max(expected_speed(candidate) for candidate in found)

        def preference(candidate: Candidate) -> tuple[bool, int]:
            kind = candidate.layout.activation_checkpointing
            return candidate.estimate.verdict != "fits", CHECKPOINTING.index(kind)

        def distance(candidate: Candidate) -> float:
            layout = candidate.layout
            return abs(math.log2(layout.rows * layout.length / TOKENS_AT_ONCE))

        equal = [c for c in found if expected_speed(c) >= (1 - TIE) * fastest]
        first = min(preference(candidate) for candidate in equal)
        alike = [candidate for candidate in equal if preference(candidate) == first]
        fastest_alike = max(expected_speed(candidate) for candidate in alike)
        near = [c for c in alike if expected_speed(c) >= (1 - SAME_ERROR) * fastest_alike]
        return min(near, key=distance)

    def candidates(
        self, strategy: StrategySpec, checkpointing: str, compiles: bool = False
    ) -> Iterator[Candidate]:
        """One for each possible micro-batch, the smallest first, up to the first that does not fit: a larger one needs no less. But without
        accumulation no gradients are added up, so that one is looked at too, where their bytes (with DDP's buckets twice) would do.
        Raises PlanError where rules or numbers refuse all."""
        question, cluster, names = (
            self.question,
            self.question.cluster,
            strategy.names(self.question.cluster.world_size),
        )
        if strategy.package == "deepspeed" and not question.deepspeed:
            raise PlanError("deepspeed is not installed", fix="pip install deepspeed ninja")
        if (
            self.device == "cpu"
            and "cpu" in strategy.offloads()
            and strategy != self.config.strategy
        ):
            raise PlanError("the device's memory is the host's: there is nothing to offload to")
        world = _world(question, strategy)
        if question.processes and world != cluster.world_size:
            raise PlanError(f"it is one process, and there are {cluster.world_size}")
        memory = self.config.memory.model_copy(update={"activation_checkpointing": checkpointing})
        config = self.config.model_copy(update={"strategy": strategy, "memory": memory})
        if compiles:
            config = set_compile(config, True)
        case = Case(config, strategy.mesh(world), self.device, self.precision, question.facts)
        require(case, question.roles, question.data)
        refusal, laid_out, over = None, False, False
        for batch in self._batches(config, case.mesh, in_flight(case.mesh, strategy)):
            if over and batch.accumulation > 1:
                continue
            try:
                layout = lay_out(case, batch, question.roles, question.data, cluster.per_node)
                layout = within_budget(layout, question.facts, cluster, self.kinds)
            except PlanError as error:
                refusal = refusal or error
                continue
            layout, estimated = _with_export_that_fits(question, layout)
            laid_out = True
            yield Candidate(names.name, layout, estimated, names.family, names.simple)
            if estimated.verdict == "no":
                over = True
                if estimated.memory.peak - 2 * estimated.memory.gradients > estimated.limit:
                    return
        if refusal is not None and not laid_out:
            raise refusal

    def _batches(self, config: Config, mesh: Mesh, least: int) -> Iterator[BatchPlan]:
        """Yield the batches to estimate, the smallest micro-batch first (core.batch.batches).

        A single GPU for which nobody has set any batch would take one row at a time. There the global batch is
        open, too: rows are doubled up to MOST_AT_ONCE tokens, as far as there is data.
        """
        world = self.question.cluster.world_size
        yield from batches(config, mesh.data_ranks, world, least)
        is_open = config.batch.model_dump(exclude_defaults=True) == {}
        if world > 1 or self.device == "cpu" or not is_open or config.images_alone:
            return
        tokens = config.data.max_length * config.algorithm.rows_per_sample
        data = self.question.data
        most = MOST_AT_ONCE // tokens
        if data is not None:
            most = min(most, data.train_samples)
        samples = 2
        while samples <= most:
            yield resolve_batch(config, mesh.data_ranks, least, BatchConfig(micro_batch=samples))
            samples *= 2


def _with_export_that_fits(question: Question, layout: Layout) -> tuple[Layout, Estimate]:
    """Return a layout and its estimate, without the merged model's export if the host's memory is too small for it.

    A run with LoRA exports its adapter then, another one nothing; `drumline export` does it later on another machine.
    What the user has set of the export stays.
    """
    estimated = _estimate(question, layout)
    config = layout.config
    is_set = config.checkpoint.model_fields_set & {"export", "export_adapter"}
    if is_set or estimated.host_limit is None or estimated.host.export <= estimated.host_limit:
        return layout, estimated
    update = {"export_adapter": True} if config.adapter.kind == "lora" else {"export": "none"}
    checkpoint = config.checkpoint.model_copy(update=update)
    changed = layout.model_copy(
        update={"config": config.model_copy(update={"checkpoint": checkpoint})}
    )
    return changed, _estimate(question, changed)


def _complete(candidate: Candidate, facts: ModelFacts) -> Candidate:
    """The candidate with a config that sets its batch; of a tight one also what happens when memory runs out, where the user has not set
    it. Raises PlanError where a DeepSpeed config of the user's own contradicts."""
    layout = candidate.layout
    batch, given = layout.batch, layout.config.batch
    total = (
        {} if given.global_samples or given.global_tokens else {"accumulation": batch.accumulation}
    )
    update: dict[str, Any] = {
        "batch": given.model_copy(update={"micro_batch": batch.micro_batch, **total})
    }
    memory = layout.config.memory
    if candidate.estimate.verdict == "tight" and "on_oom" not in memory.model_fields_set:
        update["memory"] = memory.model_copy(update={"on_oom": "replan"})
    made = layout.model_copy(update={"config": layout.config.model_copy(update=update)})
    deepspeed_of(made, facts, "")
    return replace(candidate, layout=made)


def _reason(error: PlanError) -> str:
    return error.what + (f" — {error.fix}" if error.fix else "")


def _estimate(question: Question, layout: Layout) -> Estimate:
    made = estimate(layout, question.facts, question.cluster)
    return made if question.correction is None else corrected(made, question.correction)


def _world(question: Question, strategy: StrategySpec) -> int:
    """Processes of a strategy."""
    return 1 if strategy.one_process else question.cluster.world_size


def _machine(cluster: Cluster) -> Machine:
    """A host of the cluster, as `detect` would describe it."""
    device = cluster.device
    devices = (
        [Device(device.name, device.memory_bytes)] * cluster.per_node
        if device.kind == "cuda"
        else []
    )
    memory, bf16 = cluster.host_memory_bytes or 0, "bf16" in device.flops
    # Whether a Mac's GPU is there is known where the run is set up.
    return Machine(
        devices,
        cores=1,
        memory_bytes=memory,
        device=device.kind,
        bf16=bf16,
        mps=device.kind == "cpu",
    )

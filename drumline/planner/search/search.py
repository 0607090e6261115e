"""Search all layouts of a run on a cluster that the rules allow, each with its estimate. Pure.

strategies of all families ──▶ rules ──▶ each micro-batch × each kind of checkpointing ──▶ estimate
    ──▶ the best layout of each strategy ──▶ the best FEW strategies of each family

A candidate is a layout with its estimate. The search keeps only the best FEW candidates of a family,
so its memory does not grow with the cluster. Complete configs are made for these alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from drumline.config.config import BatchConfig, Config
from drumline.config.mesh import Mesh
from drumline.config.registry import kinds, part_class
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.hardware import catalog
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Device, Machine
from drumline.plan.batch import TOKENS_AT_ONCE, possible_batches, resolve_batch
from drumline.plan.estimate import Estimate
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan, Layout
from drumline.plan.resolve import (
    KnownModel,
    deepspeed_options,
    require_allowed,
    resolve,
    resolve_device,
    resolve_layout,
    resolve_precision,
)
from drumline.plan.rule import Case
from drumline.plan.stages import least_accumulation
from drumline.plan.strategy_engine import engine_spec
from drumline.planner.cost.times import estimate
from drumline.planner.search.answer import (
    TIE,
    Answer,
    Candidate,
    Question,
    Refused,
    best_first,
    discounted_speed,
    is_faster_by_error,
    is_faster_by_tie,
    risk_adjusted_speed,
    select_fastest,
    why_not,
)
from drumline.planner.search.budget import CHECKPOINTING, checkpointing_modes, fit_to_budget
from drumline.planner.search.compiling import (
    reason_against,
    reason_against_layout,
    set_compile,
)
from drumline.planner.search.correction import correct_estimate, scale_estimate
from drumline.planner.strategies.base import Space, StrategyCost, cost_of

# The most strategies of a family that an answer holds.
FEW = 3
# Two micro-batches of one strategy are equally fast if their speeds differ by a smaller share. It is
# below TIE, since predictions for one strategy have the same errors.
SAME_ERROR = 0.01
# Tokens of the largest micro-batch that is tried if no batch is set: a choice.
MOST_AT_ONCE = 4 * TOKENS_AT_ONCE
# Keys of a strategy that candidates choose. All other keys that a user sets hold for each candidate.
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


def search_space(question: Question) -> Iterator[StrategyConfig]:
    """Yield all strategies that the question leaves open, each name once.

    Strategies of the kind of the config's strategy keep what the config sets. Strategies that need
    to be named (dp, local_sgd, diloco, tp, cp, pp, model_parallel) come only if the config names
    them.
    """
    given = question.config.strategy
    cluster = question.cluster
    space = Space(
        nodes=cluster.nodes,
        per_node=cluster.per_node,
        layers=question.facts.layers,
        nvme=question.nvme or getattr(given, "nvme", None),
        experts=question.facts.experts,
    )
    candidates = []
    for kind in kinds(StrategyConfig).values():
        cost_class: type[StrategyCost[Any]] = part_class(kind.cost_class)
        candidates.append(cost_class.candidates(kind, space))
    # The user's own strategy comes first, so its options count if a candidate has the same name.
    seen = set[str]()
    for strategy in chain(cost_of(given).variants(), *candidates):
        merged = _merge_with_given(given, strategy)
        if merged is None:
            continue
        name = merged.names(cluster.world_size).name
        if name not in seen:
            seen.add(name)
            yield merged


def _merge_with_given(given: StrategyConfig, strategy: StrategyConfig) -> StrategyConfig | None:
    """Return a strategy with what the user set for its kind; None if these contradict."""
    if strategy is given or strategy.kind != given.kind:
        return strategy
    fixed = {name: getattr(given, name) for name in given.model_fields_set - {"kind"}}
    if fixed.get("config") or fixed.get("options"):
        # A DeepSpeed config of the user's own sets everything.
        return None
    pipeline = fixed.pop("pipeline", None)
    if "reshard_after_forward" in fixed and fixed["reshard_after_forward"] is None:
        # It is left to each strategy.
        del fixed["reshard_after_forward"]
    for name in _CHOSEN:
        if name in fixed and fixed[name] != _chosen_value(strategy, name):
            # The candidate is of another kind than the user wants.
            return None
    if pipeline is not None and getattr(strategy, "pp", 1) > 1:
        options = {name: getattr(pipeline, name) for name in pipeline.model_fields_set}
        own_pipeline = getattr(strategy, "pipeline", pipeline)
        fixed["pipeline"] = own_pipeline.model_copy(update=options)
    return strategy.model_copy(update=fixed)


def _chosen_value(strategy: StrategyConfig, key: str) -> Any:
    """Return a strategy's value of a key in _CHOSEN, or what it does if the value is null."""
    attribute = key
    if key == "reshard_after_forward":
        attribute = "reshards"
    return getattr(strategy, attribute)


@dataclass
class _Family:
    """What a search has found of a family so far."""

    # The best few candidates, one of each strategy.
    best: list[Candidate] = field(default_factory=list)
    # Of the candidates that do not fit, the one that needs least memory.
    nearest: Candidate | None = None
    # The fastest of the tight candidates.
    tight: Candidate | None = None
    # The reason of the first refusal.
    reason: str = ""
    # The number of estimates.
    looked_at: int = 0

    def record(self, candidate: Candidate, exclude_tight: bool) -> None:
        """Count a candidate, and keep it if it is the nearest or the fastest tight one so far."""
        self.looked_at += 1
        estimated = candidate.estimate
        if not _counts_as_fitting(candidate, exclude_tight):
            nearest = self.nearest
            if nearest is None or estimated.memory.reserved < nearest.estimate.memory.reserved:
                self.nearest = candidate
        elif estimated.verdict == "tight":
            tight = self.tight
            is_fastest = tight is None or is_faster_by_tie(estimated, tight.estimate)
            if is_fastest:
                self.tight = candidate


def search(
    question: Question,
    among: Iterable[StrategyConfig] | None = None,
    *,
    exclude_tight: bool = False,
) -> Answer:
    """Return the best few candidates of each family, or the reason why none fits.

    `among`: the strategies to estimate; None: all.
    `exclude_tight`: candidates with the verdict `tight` do not count as fitting.
    """
    estimator = _Estimator(question)
    question = estimator.question
    if among is None:
        among = search_space(question)
    families = _search_families(estimator, among, exclude_tight)
    completed = _complete_families(families, question.facts)
    ranked = list(best_first(completed.candidates))
    if ranked and not exclude_tight:
        faster_one = _faster_and_tight(ranked, families.values(), question.facts)
        if faster_one is not None:
            ranked = list(best_first([*ranked, faster_one]))
    looked_at = sum(family.looked_at for family in families.values())
    return Answer(question, tuple(ranked), tuple(completed.refused), looked_at)


def _search_families(
    estimator: _Estimator, strategies: Iterable[StrategyConfig], exclude_tight: bool
) -> dict[str, _Family]:
    """Return the families of some strategies, by name, with their best candidates."""
    world_size = estimator.question.cluster.world_size
    families = dict[str, _Family]()
    for strategy in strategies:
        family = families.setdefault(strategy.names(world_size).family, _Family())
        best = estimator.best_of(strategy, family, exclude_tight)
        if best is not None:
            family.best = heapq.nlargest(FEW, [*family.best, best], risk_adjusted_speed)
    if estimator.may_compile:
        # Only the best candidates are estimated compiled, too.
        for family in families.values():
            compiled = []
            for candidate in family.best:
                compiled.append(estimator.compile_if_faster(candidate, family, exclude_tight))
            family.best = compiled
    return families


class _Completed(NamedTuple):
    """The candidates of all families with complete configs, and the families that are refused."""

    candidates: list[Candidate]
    refused: list[Refused]


def _complete_families(families: dict[str, _Family], facts: ModelFacts) -> _Completed:
    """Return the best candidates of all families with complete configs.

    A family is refused if it has none, or if a whole plan of one of them is refused, for example by
    a DeepSpeed config of the user's own.
    """
    candidates: list[Candidate] = []
    refused: list[Refused] = []
    for name, family in families.items():
        try:
            candidates += [_complete_config(candidate, facts) for candidate in family.best]
            if not family.best:
                refused.append(_refuse_family(name, family, facts))
        except PlanError as error:
            refused.append(Refused(name, _reason(error)))
    return _Completed(candidates, refused)


def _refuse_family(name: str, family: _Family, facts: ModelFacts) -> Refused:
    """Return a family of which no candidate fits, with the reason."""
    if family.nearest is None:
        return Refused(name, family.reason)
    nearest = _complete_config(family.nearest, facts)
    return Refused(name, why_not(nearest.estimate), nearest)


def _faster_and_tight(
    ranked: Sequence[Candidate], families: Iterable[_Family], facts: ModelFacts
) -> Candidate | None:
    """Return the fastest tight candidate of all families, if an answer should show it, else None.

    It must be clearly faster than the first of `ranked`, and than each tight candidate in `ranked`.
    If `ranked` has another candidate of the same strategy, the name says how they differ.
    """
    tight = [family.tight for family in families if family.tight is not None]
    if not tight:
        return None
    fastest = max(tight, key=discounted_speed)
    rivals = [ranked[0]]
    rivals += [candidate for candidate in ranked if candidate.estimate.verdict == "tight"]
    if not all(is_faster_by_error(fastest, rival) for rival in rivals):
        return None
    for candidate in ranked:
        if candidate.name == fastest.name:
            difference = _describe_difference(fastest.layout, candidate.layout)
            fastest = replace(fastest, name=f"{fastest.name}, {difference}")
            break
    try:
        return _complete_config(fastest, facts)
    except PlanError:
        # Only a whole plan shows this.
        return None


def _describe_difference(layout: Layout, other: Layout) -> str:
    """Return how a layout differs from another of the same strategy: `no checkpointing`."""
    kind = layout.activation_checkpointing
    if kind == other.activation_checkpointing:
        if layout.batch != other.batch:
            return f"micro-batch {layout.batch.micro_batch}"
        return "compiled" if layout.config.compile.enabled else "eager"
    if kind == "none":
        return "no checkpointing"
    return f"{kind} checkpointing"


def search_strategy(question: Question, strategy: StrategyConfig) -> Candidate | Refused:
    """Search one strategy. Returns its best candidate, or why it is refused."""
    answer = search(question, [strategy])
    if answer.ranked:
        return answer.ranked[0]
    return answer.refused[0]


def fits(question: Question, among: Iterable[StrategyConfig] | None = None) -> bool:
    """Return whether any strategy has a candidate with the verdict `fits`; tight ones do not count.

    The first that fits ends the search. `among`: the strategies to estimate; None: all.
    """
    estimator = _Estimator(question)
    if among is None:
        among = search_space(estimator.question)
    return any(_strategy_fits(estimator, strategy) for strategy in among)


def _strategy_fits(estimator: _Estimator, strategy: StrategyConfig) -> bool:
    """Return whether a strategy fits with the most checkpointing that the rules allow.

    Less checkpointing needs as much memory or more. Tight candidates do not count as fitting.
    """
    for checkpointing in reversed(estimator.checkpointing):
        with suppress(PlanError):
            candidates = estimator.candidates(strategy, checkpointing)
            return any(candidate.estimate.verdict == "fits" for candidate in candidates)
    return False


def evaluate(question: Question, config: Config, name: str) -> Candidate:
    """Return one config as a candidate: its plan on the question's cluster, and the estimate.

    The strategy of the config must not be auto. `name`: of the candidate. Raises PlanError if a rule or a number refuses the config.
    """
    plan = resolve(
        config,
        run_dir="",
        machine=_machine(question.cluster),
        world_size=_number_of_processes(question, config.strategy),
        model=KnownModel(facts=question.facts, roles=question.roles),
        data=question.data,
    )
    return Candidate(name, plan, _estimate(question, plan))


class _Estimator:
    """Estimates the layouts of one strategy after the other.

    It holds what is the same for all strategies of a search: device, precision, and the modes of
    activation checkpointing to try.
    """

    def __init__(self, question: Question) -> None:
        self.config = engine_spec(question.config.strategy).adopted(question.config)
        self.question = replace(question, config=self.config)
        cluster = question.cluster
        machine = _machine(cluster)
        self.device = resolve_device(self.config, machine)
        self.precision = resolve_precision(self.config, machine, self.device, [])
        self._require_fp8()
        memory = self.config.memory
        self.may_compile = False
        if self.config.compile.enabled is None:
            self.may_compile = not reason_against(self.config, question.facts, cluster)
        # Blocks that a pipeline cannot cut, as of vision-language models, are recomputed nevertheless.
        if question.facts.recomputes and question.facts.block_weights:
            self.checkpointing_modes = checkpointing_modes(memory)
        else:
            self.checkpointing_modes = (memory.activation_checkpointing,)
        self.checkpointing = self.checkpointing_modes
        if memory.budget_gb is not None:
            # `fit_to_budget` chooses among all modes for each batch, so one pass is enough.
            self.checkpointing = self.checkpointing_modes[:1]

    def _require_fp8(self) -> None:
        """Raise PlanError if the precision is fp8, and the GPUs are known to have no fp8."""
        if self.config.precision.kind != "fp8" or self.device != "cuda":
            return
        known = catalog.DEVICES.get(self.question.cluster.device.name)
        if known is not None and "fp8" not in known.flops:
            raise PlanError(
                f"precision fp8 but {known.name} has no fp8",
                where="precision",
                fix="use precision=bf16",
            )

    def compile_if_faster(
        self, eager: Candidate, family: _Family, exclude_tight: bool
    ) -> Candidate:
        """Return the best compiled candidate of the same strategy if the run gains from compiling.

        Otherwise return the eager candidate.
        """
        if reason_against_layout(eager.layout, self.question.facts):
            return eager
        compiled = self.best_of(eager.layout.strategy, family, exclude_tight, is_compiled=True)
        if compiled is None:
            return eager
        is_faster = risk_adjusted_speed(compiled) * (1 - TIE) > risk_adjusted_speed(eager)
        return compiled if is_faster else eager

    def best_of(
        self,
        strategy: StrategyConfig,
        family: _Family,
        exclude_tight: bool,
        is_compiled: bool = False,
    ) -> Candidate | None:
        """Return the candidate of a strategy with the best micro-batch and checkpointing.

        It is chosen in three steps:

        1. Candidates whose risk-adjusted speed is within TIE of the highest are equally fast.
        2. Of these, those that fit are preferred to tight ones, then those with the least
           checkpointing.
        3. Of those left and within SAME_ERROR of their fastest, the micro-batch nearest to the
           usual number of tokens wins.

        None if nothing fits, or if rules and numbers refuse all. `family` then holds the nearest
        candidate and the reason.

        `exclude_tight`: candidates with the verdict `tight` do not count as fitting. `is_compiled`:
        candidates are compiled, which the config must leave open.
        """
        found: list[Candidate] = []
        for checkpointing in self.checkpointing:
            try:
                for candidate in self.candidates(strategy, checkpointing, is_compiled):
                    family.record(candidate, exclude_tight)
                    if _counts_as_fitting(candidate, exclude_tight):
                        found.append(candidate)
            except PlanError as error:
                family.reason = family.reason or _reason(error)
        if not found:
            return None
        equal = select_fastest(found, TIE)
        first = min(_rank_of_equal(candidate) for candidate in equal)
        alike = [candidate for candidate in equal if _rank_of_equal(candidate) == first]
        near = select_fastest(alike, SAME_ERROR)
        return min(near, key=_distance_from_usual)

    def candidates(
        self, strategy: StrategyConfig, checkpointing: str, is_compiled: bool = False
    ) -> Iterator[Candidate]:
        """Yield a candidate for each possible micro-batch, the smallest first.

        After the first micro-batch that does not fit, only the one without accumulation is tried,
        since all others need as much memory or more. It may need less, because no gradients are
        added up. It is tried only if the layout would fit without the bytes of its gradients,
        counted twice because of DDP's buckets.

        Raises PlanError if rules or numbers refuse all micro-batches.
        """
        question = self.question
        cluster = question.cluster
        names = strategy.names(cluster.world_size)
        self._require_strategy(strategy)
        memory = self.config.memory.model_copy(update={"activation_checkpointing": checkpointing})
        config = self.config.model_copy(update={"strategy": strategy, "memory": memory})
        if is_compiled:
            config = set_compile(config, True)
        mesh = strategy.mesh(_number_of_processes(question, strategy))
        case = Case(config, mesh, self.device, self.precision, question.facts)
        require_allowed(case, question.roles, question.data)
        refusal = None
        is_laid_out = False
        only_without_accumulation = False
        for batch in self._batches(config, mesh, least_accumulation(mesh, strategy)):
            if only_without_accumulation and batch.accumulation > 1:
                continue
            try:
                layout = resolve_layout(
                    case, batch, question.roles, question.data, cluster.per_node
                )
                layout = fit_to_budget(layout, question.facts, cluster, self.checkpointing_modes)
            except PlanError as error:
                refusal = refusal or error
                continue
            layout, estimated = _fit_export(question, layout)
            is_laid_out = True
            yield Candidate(names.name, layout, estimated, names.family, names.simple)
            if estimated.verdict == "no":
                only_without_accumulation = True
                without_gradients = estimated.memory.peak - 2 * estimated.memory.gradients
                if without_gradients > estimated.limit:
                    return
        if refusal is not None and not is_laid_out:
            raise refusal

    def _require_strategy(self, strategy: StrategyConfig) -> None:
        """Raise PlanError if a strategy cannot run here, or would do nothing."""
        question = self.question
        if strategy.package == "deepspeed" and not question.has_deepspeed:
            raise PlanError("deepspeed is not installed", fix="pip install deepspeed ninja")
        is_set = strategy == self.config.strategy
        if self.device == "cpu" and "cpu" in strategy.offloads() and not is_set:
            raise PlanError("the device's memory is the host's: there is nothing to offload to")
        world_size = question.cluster.world_size
        if question.needs_all_processes and _number_of_processes(question, strategy) != world_size:
            raise PlanError(f"it is one process, and there are {world_size}")

    def _batches(self, config: Config, mesh: Mesh, least: int) -> Iterator[BatchPlan]:
        """Yield the batches to estimate, the smallest micro-batch first (plan.batch.possible_batches).

        A single GPU without any batch setting would take one row at a time. There the global batch
        is open, too: rows are doubled up to MOST_AT_ONCE tokens, as far as there is data.
        """
        world = self.question.cluster.world_size
        yield from possible_batches(config, mesh.data_ranks, world, least)
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


def _counts_as_fitting(candidate: Candidate, exclude_tight: bool) -> bool:
    """Return whether a candidate `fits`, or is `tight` and these are not excluded."""
    verdict = candidate.estimate.verdict
    if verdict == "tight":
        return not exclude_tight
    return verdict == "fits"


def _rank_of_equal(candidate: Candidate) -> tuple[bool, int]:
    """Return the key that sorts equally fast candidates of one strategy, the best first."""
    kind = candidate.layout.activation_checkpointing
    return candidate.estimate.verdict != "fits", CHECKPOINTING.index(kind)


def _distance_from_usual(candidate: Candidate) -> float:
    """Return how many doublings lie between a micro-batch and the usual number of tokens."""
    layout = candidate.layout
    return abs(math.log2(layout.rows * layout.max_length / TOKENS_AT_ONCE))


def _fit_export(question: Question, layout: Layout) -> tuple[Layout, Estimate]:
    """Return a layout and its estimate. The layout exports less if the host has too little memory.

    If the export of the merged model at the end does not fit, a run with LoRA exports its adapter
    alone, and another run exports nothing. `drumline export` can do it later on another machine.
    An export that the user has set is not changed.
    """
    estimated = _estimate(question, layout)
    config = layout.config
    is_set = config.checkpoint.model_fields_set & {"export", "export_adapter"}
    if is_set or estimated.host_limit is None or estimated.host.export <= estimated.host_limit:
        return layout, estimated
    update: dict[str, Any] = {"export": "none"}
    if config.adapter.kind == "lora":
        update = {"export_adapter": True}
    checkpoint = config.checkpoint.model_copy(update=update)
    changed_config = config.model_copy(update={"checkpoint": checkpoint})
    changed = layout.model_copy(update={"config": changed_config})
    return changed, _estimate(question, changed)


def _complete_config(candidate: Candidate, facts: ModelFacts) -> Candidate:
    """Return a candidate whose config sets its batch.

    The config of a tight candidate also sets what happens if memory runs out, unless the user has
    set it. Raises PlanError if a DeepSpeed config of the user's own contradicts.
    """
    layout = candidate.layout
    given = layout.config.batch
    of_batch = {"micro_batch": layout.batch.micro_batch}
    if not (given.global_samples or given.global_tokens):
        of_batch["accumulation"] = layout.batch.accumulation
    update: dict[str, Any] = {"batch": given.model_copy(update=of_batch)}
    memory = layout.config.memory
    if candidate.estimate.verdict == "tight" and "on_oom" not in memory.model_fields_set:
        update["memory"] = memory.model_copy(update={"on_oom": "replan"})
    completed = layout.model_copy(update={"config": layout.config.model_copy(update=update)})
    deepspeed_options(completed, facts, "")
    return replace(candidate, layout=completed)


def _reason(error: PlanError) -> str:
    """Return what an error says, with its fix."""
    if error.fix:
        return f"{error.what} — {error.fix}"
    return error.what


def _estimate(question: Question, layout: Layout) -> Estimate:
    """Return the estimate of a layout, corrected by real steps of probes, or else of earlier runs."""
    predicted = estimate(layout, question.facts, question.cluster)
    if question.correction is not None:
        return correct_estimate(predicted, question.correction)
    if question.learned is not None:
        return scale_estimate(predicted, question.learned)
    return predicted


def _number_of_processes(question: Question, strategy: StrategyConfig) -> int:
    """Return the number of processes of a strategy."""
    if strategy.one_process:
        return 1
    return question.cluster.world_size


def _machine(cluster: Cluster) -> Machine:
    """Return a host of the cluster as `detect` would describe it."""
    device = cluster.device
    devices = []
    if device.kind == "cuda":
        devices = [Device(device.name, device.memory_bytes)] * cluster.per_node
    return Machine(
        devices,
        cores=1,
        memory_bytes=cluster.host_memory_bytes or 0,
        device=device.kind,
        bf16="bf16" in device.flops,
        # Whether a Mac has its GPU is known when the run is set up.
        mps=device.kind == "cpu",
    )

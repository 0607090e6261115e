"""Estimate the layouts of one strategy, and choose the best of them. Pure.

What the YAML leaves open is chosen together: micro-batch, compiled blocks, the kind of activation
checkpointing, and how many blocks have it. Where nothing fits with room, chunks of the feed-forward
part and offloaded activations are tried, too. The speed of a layout is predicted first. Memory takes
longer to predict, and is only predicted of layouts that are fast enough to be chosen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from drumline.config.config import BatchConfig
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.hardware import catalog
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Device, Machine
from drumline.plan.batch import TOKENS_AT_ONCE, possible_batches, resolve_batch
from drumline.plan.estimate import Estimate
from drumline.plan.plan import BatchPlan, Layout
from drumline.plan.resolve import (
    require_allowed,
    resolve_device,
    resolve_layout,
    resolve_precision,
)
from drumline.plan.rule import Case
from drumline.plan.stages import least_accumulation
from drumline.plan.strategy_engine import engine_spec
from drumline.planner.cost.memory import host_memory
from drumline.planner.cost.times import Pace, estimate, predict_pace
from drumline.planner.search.answer import (
    TIE,
    Candidate,
    Question,
    discount,
    risk_adjusted_speed,
    select_fastest,
    speed_of_run,
)
from drumline.planner.search.budget import CHECKPOINTING, checkpointing_modes, fit_to_budget
from drumline.planner.search.compiling import reason_against, reason_against_mesh, set_compile
from drumline.planner.search.correction import correct_estimate, scale_estimate, slowdown
from drumline.planner.search.family import Bar, Family, counts_as_fitting
from drumline.planner.search.savings import savings_to_try
from drumline.planner.strategies.base import cost_of

# Two micro-batches of one strategy are equally fast if their speeds differ by a smaller share. It is
# below TIE, since predictions for one strategy have the same errors.
SAME_ERROR = 0.01
# Tokens of the largest micro-batch that is tried if no batch is set: a choice.
MOST_AT_ONCE = 4 * TOKENS_AT_ONCE


class Choice(NamedTuple):
    """What is chosen of a layout besides its strategy and its batch.

    `checkpointing`: none, selective or full. `blocks`: how many blocks have it; None: what the config
    says. `is_compiled`: blocks are compiled, which the config must leave open; else they are as the
    config says. `savings`: further keys of the section `memory` (`savings_to_try`); None: none.
    """

    checkpointing: str
    is_compiled: bool = False
    blocks: int | None = None
    savings: Mapping[str, Any] | None = None


class Series(NamedTuple):
    """The layouts of a strategy and a choice, which differ in their batch alone."""

    case: Case
    batches: list[BatchPlan]


class Bound(NamedTuple):
    """A discounted speed, in tokens/s, that no layout of a strategy exceeds.

    `looked_at`: the number of layouts whose speed was predicted for it.
    """

    speed: float
    looked_at: int


class Estimator:
    """Estimates the layouts of one strategy after the other.

    It holds what is the same for all strategies of a search: device, precision, and the choices to try.
    """

    def __init__(self, question: Question) -> None:
        self.config = engine_spec(question.config.strategy).adopted(question.config)
        self.question = replace(question, config=self.config)
        cluster = question.cluster
        machine = machine_of(cluster)
        self.device = resolve_device(self.config, machine)
        self.precision = resolve_precision(self.config, machine, self.device, [])
        self._require_fp8()
        memory = self.config.memory
        # Compiled layouts are faster, so that fewer of the eager ones are looked at after them.
        self.compile_choices = [False]
        is_open = self.config.compile.enabled is None
        if is_open and not reason_against(self.config, question.facts, cluster):
            self.compile_choices = [True, False]
        # Blocks that a pipeline cannot cut, as of vision-language models, are recomputed nevertheless.
        if question.facts.recomputes and question.facts.block_weights:
            self.checkpointing_modes = checkpointing_modes(memory)
        else:
            self.checkpointing_modes = (memory.activation_checkpointing,)
        self.checkpointing = self.checkpointing_modes
        if memory.budget_gb is not None:
            # `fit_to_budget` chooses among all modes for each batch, so one pass is enough.
            self.checkpointing = self.checkpointing_modes[:1]
        # A budget chooses the number of blocks, too.
        is_chosen = memory.checkpointed_blocks is not None or memory.budget_gb is not None
        self.may_choose_blocks = len(self.checkpointing_modes) > 1 and not is_chosen
        self.savings = []
        if self.checkpointing_modes[-1] == "full":
            self.savings = savings_to_try(memory, self.device)

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

    def bound(self, strategy: StrategyConfig) -> Bound:
        """Return a speed that no layout of a strategy exceeds: that without recomputation.

        Raises PlanError, with the first refusal, if rules or numbers refuse all layouts.
        """
        if self.config.memory.activation_offload:
            # With less recomputation more is copied to the host, so no kind is the fastest.
            return Bound(math.inf, 0)
        refusal = None
        for checkpointing in self.checkpointing:
            for is_compiled in self.compile_choices:
                try:
                    series = self._series(strategy, Choice(checkpointing, is_compiled))
                    found = self._fastest(series)
                except PlanError as error:
                    if not is_compiled:
                        refusal = refusal or error
                else:
                    return found
        assert refusal is not None
        raise refusal

    def _fastest(self, series: Series) -> Bound:
        """Return the speed of the fastest layout of a series, without the seconds of compiling.

        Raises PlanError if numbers refuse all.
        """
        refusal = None
        speeds = []
        for batch in series.batches:
            try:
                layout = self._resolve(series.case, batch)
            except PlanError as error:
                refusal = refusal or error
                continue
            pace = self._pace(layout)
            speeds.append(discount(layout, pace.tokens_per_s / self._slowdown(pace)))
        if not speeds:
            assert refusal is not None
            raise refusal
        return Bound(max(speeds), len(speeds))

    def best_of(
        self,
        strategy: StrategyConfig,
        family: Family,
        exclude_tight: bool,
        fastest: float = 0.0,
    ) -> Candidate | None:
        """Return the best candidate of a strategy.

        It is chosen in three steps:

        1. Candidates whose risk-adjusted speed is within TIE of the highest are equally fast.
        2. Of these, those without savings are preferred, then those that fit to tight ones, then
           those with one saving to those with two, then eager to compiled ones, then those with the
           same checkpointing in all blocks, then those with the least checkpointing.
        3. Of those left and within SAME_ERROR of their fastest, the micro-batch nearest to the
           usual number of tokens wins.

        None if nothing fits, if rules and numbers refuse all, or if all are slower than `fastest`.
        `family` then holds the nearest candidate and the reason.

        `exclude_tight`: candidates with the verdict `tight` do not count as fitting. `fastest`: a
        risk-adjusted speed; candidates that are slower by more than TIE may be left out.
        """
        bar = Bar(fastest)
        found: list[Candidate] = []
        if self.may_fit(strategy, family, exclude_tight):
            found = self._find_without_savings(strategy, family, exclude_tight, bar)
        if all(candidate.estimate.verdict != "fits" for candidate in found):
            found += self._find_with_savings(strategy, family, exclude_tight, bar)
        if not found:
            pageable = self.with_pageable_memory(strategy)
            if pageable is None:
                return None
            return self.best_of(pageable, family, exclude_tight, fastest)
        equal = select_fastest(found, TIE)
        first = min(_rank_of_equal(candidate) for candidate in equal)
        alike = [candidate for candidate in equal if _rank_of_equal(candidate) == first]
        near = select_fastest(alike, SAME_ERROR)
        return min(near, key=_distance_from_usual)

    def with_pageable_memory(self, strategy: StrategyConfig) -> StrategyConfig | None:
        """Return a strategy whose page-locked memory on the host is pageable; None if the user set it."""
        given = self.config.strategy
        is_set = given.kind == strategy.kind and any(
            name.startswith("offload_") for name in given.model_fields_set
        )
        if is_set:
            return None
        return cost_of(strategy).with_pageable_memory()

    def _find_without_savings(
        self, strategy: StrategyConfig, family: Family, exclude_tight: bool, bar: Bar
    ) -> list[Candidate]:
        """Return the candidates of a strategy that fit without savings."""
        found: list[Candidate] = []
        for is_compiled in self.compile_choices:
            for checkpointing in self.checkpointing:
                choice = Choice(checkpointing, is_compiled)
                try:
                    found += self._fitting_candidates(strategy, choice, family, exclude_tight, bar)
                except PlanError as error:
                    # What refuses to compile a layout does not refuse the layout.
                    if not is_compiled:
                        family.refuse(error)
        for candidate in self._try_fewer_blocks(strategy, family, bar):
            family.record(candidate, exclude_tight)
            found.append(candidate)
        return found

    def _find_with_savings(
        self, strategy: StrategyConfig, family: Family, exclude_tight: bool, bar: Bar
    ) -> list[Candidate]:
        """Return the candidates of a strategy that fit with savings; none if all savings are too few."""
        found: list[Candidate] = []
        for savings in self.savings:
            choice = Choice("full", savings=savings)
            # Layouts that are too slow to be chosen are not estimated.
            estimated_before = family.estimated
            fitting: list[Candidate] = []
            # The rules refuse some savings, and savings for some strategies.
            with suppress(PlanError):
                fitting = self._fitting_candidates(strategy, choice, family, exclude_tight, bar)
            has_most = savings == self.savings[0]
            if has_most and family.estimated > estimated_before and not fitting:
                break
            found += fitting
        return found

    def _fitting_candidates(
        self,
        strategy: StrategyConfig,
        choice: Choice,
        family: Family,
        exclude_tight: bool,
        bar: Bar,
    ) -> list[Candidate]:
        """Return the candidates of a strategy and a choice that fit, which raise the bar.

        Raises PlanError if rules or numbers refuse all micro-batches.
        """
        fitting = []
        for candidate in self.candidates(strategy, choice, family, bar):
            family.record(candidate, exclude_tight)
            if counts_as_fitting(candidate, exclude_tight):
                fitting.append(candidate)
                bar.raise_to(candidate)
        return fitting

    def fits_with_savings(self, strategy: StrategyConfig) -> bool:
        """Return whether a strategy fits with the most savings that the rules allow."""
        for savings in self.savings:
            choice = Choice("full", savings=savings)
            with suppress(PlanError):
                candidates = self.candidates(strategy, choice, Family(), Bar())
                return any(candidate.estimate.verdict == "fits" for candidate in candidates)
        return False

    def may_fit(self, strategy: StrategyConfig, family: Family, exclude_tight: bool) -> bool:
        """Return whether the leanest layouts of a strategy without savings fit, or are not known.

        They recompute all blocks, compiled if they can be: a compiled block keeps less. If none of
        them fits, `family` holds the one that needs least. All others need as much memory or more,
        but for selective checkpointing of some mixtures, which needs less by a thousandth.
        """
        if len(self.checkpointing) == 1:
            # There is no other kind, so it is looked at anyway.
            return True
        for is_compiled in self.compile_choices:
            choice = Choice(self.checkpointing[-1], is_compiled)
            leanest = Family()
            # Rules may refuse the kind, or to compile it.
            with suppress(PlanError):
                for candidate in self.candidates(strategy, choice, leanest, Bar()):
                    leanest.record(candidate, exclude_tight)
                    if counts_as_fitting(candidate, exclude_tight):
                        return True
                family.add(leanest)
                return False
        return True

    def candidates(
        self, strategy: StrategyConfig, choice: Choice, family: Family, bar: Bar
    ) -> Iterator[Candidate]:
        """Yield a candidate for each possible micro-batch that reaches the bar, the smallest first.

        After the first micro-batch that does not fit, only the one without accumulation is tried,
        since all others need as much memory or more. It may need less, because no gradients are
        added up. It is tried only if the layout would fit without the bytes of its gradients,
        counted twice because of DDP's buckets.

        `family`: counts the layouts. Raises PlanError if rules or numbers refuse all micro-batches.
        """
        series = self._series(strategy, choice)
        refusal = None
        is_laid_out = False
        only_without_accumulation = False
        for batch in series.batches:
            if only_without_accumulation and batch.accumulation > 1:
                continue
            try:
                layout = self._resolve(series.case, batch)
                layout = fit_to_budget(
                    layout, self.question.facts, self.question.cluster, self.checkpointing_modes
                )
            except PlanError as error:
                refusal = refusal or error
                continue
            is_laid_out = True
            family.looked_at += 1
            pace = self._pace(layout)
            if not bar.is_reached(self._speed(layout, pace)):
                family.is_cut = True
                continue
            candidate = self._make_candidate(layout, pace)
            yield candidate
            estimated = candidate.estimate
            if estimated.verdict == "no":
                only_without_accumulation = True
                without_gradients = estimated.memory.peak - 2 * estimated.memory.gradients
                if without_gradients > estimated.limit:
                    return
        if refusal is not None and not is_laid_out:
            raise refusal

    def _try_fewer_blocks(
        self, strategy: StrategyConfig, family: Family, bar: Bar
    ) -> Iterator[Candidate]:
        """Yield candidates that checkpoint as few blocks as fit, each faster than all before by TIE."""
        if not self.may_choose_blocks or not bar.fastest:
            # If nothing fits so far, checkpointing of all blocks does not either.
            return
        for is_compiled in self.compile_choices:
            for checkpointing in self.checkpointing_modes:
                if checkpointing == "none":
                    continue
                # The rules refuse some kinds, and some strategies.
                with suppress(PlanError):
                    series = self._series(strategy, Choice(checkpointing, is_compiled, blocks=1))
                    yield from self._find_fewest_blocks(series, family, bar)

    def _find_fewest_blocks(self, series: Series, family: Family, bar: Bar) -> Iterator[Candidate]:
        """Yield a candidate for each batch with which fewer blocks than all are enough to fit.

        `series`: with one checkpointed block.
        """
        for batch in series.batches:
            try:
                layout = self._resolve(series.case, batch)
            except PlanError:
                # The rules allow the series, so only this batch is refused.
                continue
            family.looked_at += 1
            # No number of blocks is faster than one.
            if not bar.is_passed(self._speed(layout, self._pace(layout))):
                continue
            if not self._fits_with(layout, None):
                # Larger micro-batches need as much memory or more.
                return
            numbers = range(1, self.question.facts.layers)

            def fits_over(blocks: int, layout: Layout = layout) -> bool:
                return self._fits_with(layout, blocks)

            # How many of these numbers of blocks are too few.
            too_few = bisect_left(numbers, True, key=fits_over)
            if too_few == len(numbers):
                continue
            chosen = _with_blocks(layout, numbers[too_few])
            candidate = self._make_candidate(chosen, self._pace(chosen))
            if bar.is_passed(risk_adjusted_speed(candidate)):
                bar.raise_to(candidate)
                yield candidate

    def _fits_with(self, layout: Layout, blocks: int | None) -> bool:
        """Return whether a layout fits with room if so many blocks are checkpointed; None: all."""
        changed = _with_blocks(layout, blocks)
        return self._make_candidate(changed, self._pace(changed)).estimate.verdict == "fits"

    def _series(self, strategy: StrategyConfig, choice: Choice) -> Series:
        """Return the layouts of a strategy with a choice. Raises PlanError if rules refuse it."""
        question = self.question
        self._require_strategy(strategy)
        mesh = strategy.mesh(number_of_processes(question, strategy))
        needs_whole_blocks = choice.blocks is not None or choice.savings is not None
        if needs_whole_blocks and mesh.tp * mesh.pp * mesh.ep > 1:
            # A rule says so, too; most strategies of a large cluster are sooner passed over here.
            raise PlanError("it needs strategies in which each rank runs whole blocks alone")
        if choice.is_compiled:
            reason = reason_against_mesh(mesh, question.facts)
            if reason:
                raise PlanError(reason, where="compile")
        changed: dict[str, Any] = {"activation_checkpointing": choice.checkpointing}
        if choice.blocks is not None:
            changed["checkpointed_blocks"] = choice.blocks
        if choice.savings is not None:
            changed |= choice.savings
        memory = self.config.memory.model_copy(update=changed)
        config = self.config.model_copy(update={"strategy": strategy, "memory": memory})
        if choice.is_compiled:
            config = set_compile(config, True)
        case = Case(config, mesh, self.device, self.precision, question.facts)
        require_allowed(case, question.roles, question.data)
        batches = list(self._batches(case, least_accumulation(mesh, strategy)))
        return Series(case, batches)

    def _resolve(self, case: Case, batch: BatchPlan) -> Layout:
        """Return the layout of a case with a batch. Raises PlanError if numbers refuse it."""
        question = self.question
        return resolve_layout(case, batch, question.roles, question.data, question.cluster.per_node)

    def _pace(self, layout: Layout) -> Pace:
        """Return the pace of a layout, before any correction."""
        return predict_pace(layout, self.question.facts, self.question.cluster)

    def _slowdown(self, pace: Pace) -> float:
        """Return how many times as long a step takes by what was measured here."""
        factors = self.question.correction or self.question.learned
        if factors is None:
            return 1.0
        return slowdown(pace.seconds, factors)

    def _speed(self, layout: Layout, pace: Pace) -> float:
        """Return the discounted speed of a layout."""
        slower = self._slowdown(pace)
        step_seconds = pace.seconds.total * slower
        speed = speed_of_run(layout, pace.tokens_per_s / slower, step_seconds, pace.startup)
        return discount(layout, speed)

    def _make_candidate(self, layout: Layout, pace: Pace) -> Candidate:
        """Return a layout with its estimate, and with an export that the host has the memory for."""
        names = layout.strategy.names(self.question.cluster.world_size)
        fitted, estimated = _fit_export(self.question, layout, pace)
        return Candidate(names.name, fitted, estimated, names.family, names.simple)

    def _require_strategy(self, strategy: StrategyConfig) -> None:
        """Raise PlanError if a strategy cannot run here, or would do nothing."""
        question = self.question
        if strategy.package == "deepspeed" and not question.has_deepspeed:
            raise PlanError("deepspeed is not installed", fix="pip install deepspeed ninja")
        is_set = strategy == self.config.strategy
        if self.device == "cpu" and "cpu" in strategy.offloads() and not is_set:
            raise PlanError("the device's memory is the host's: there is nothing to offload to")
        world_size = question.cluster.world_size
        if question.needs_all_processes and number_of_processes(question, strategy) != world_size:
            raise PlanError(f"it is one process, and there are {world_size}")

    def _batches(self, case: Case, least: int) -> Iterator[BatchPlan]:
        """Yield the batches to estimate, the smallest micro-batch first (plan.batch.possible_batches).

        A single GPU without any batch setting would take one row at a time. There the global batch
        is open, too: rows are doubled up to MOST_AT_ONCE tokens, as far as there is data.
        """
        config = case.config
        mesh = case.mesh
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


def _with_blocks(layout: Layout, blocks: int | None) -> Layout:
    """Return a layout with so many checkpointed blocks; None: all."""
    memory = layout.config.memory.model_copy(update={"checkpointed_blocks": blocks})
    config = layout.config.model_copy(update={"memory": memory})
    return layout.model_copy(update={"config": config})


def _rank_of_equal(candidate: Candidate) -> tuple[bool, bool, int, bool, bool, int]:
    """Return the key that sorts equally fast candidates of one strategy, the best first."""
    layout = candidate.layout
    memory = layout.config.memory
    savings = int(memory.activation_offload) + int(memory.mlp_chunk is not None)
    does_not_fit = candidate.estimate.verdict != "fits"
    is_compiled = bool(layout.config.compile.enabled)
    has_unequal_blocks = memory.checkpointed_blocks is not None
    kind = CHECKPOINTING.index(layout.activation_checkpointing)
    return savings > 0, does_not_fit, savings, is_compiled, has_unequal_blocks, kind


def _distance_from_usual(candidate: Candidate) -> float:
    """Return how many doublings lie between a micro-batch and the usual number of tokens."""
    layout = candidate.layout
    return abs(math.log2(layout.rows * layout.max_length / TOKENS_AT_ONCE))


def _fit_export(question: Question, layout: Layout, pace: Pace) -> tuple[Layout, Estimate]:
    """Return a layout and its estimate. The layout exports less if the host has too little memory.

    If the export of the merged model at the end does not fit, a run with LoRA exports its adapter
    alone, and another run exports nothing. `drumline export` can do it later on another machine.
    An export that the user has set is not changed.
    """
    estimated = estimate_layout(question, layout, pace)
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
    # Nothing else depends on what is exported.
    of_changed = host_memory(changed, question.facts, question.cluster, estimated.memory.peak)
    host = estimated.host.model_copy(update={"export": of_changed.export})
    return changed, estimated.model_copy(update={"host": host})


def estimate_layout(question: Question, layout: Layout, pace: Pace | None = None) -> Estimate:
    """Return the estimate of a layout, corrected by real steps of probes, or else of earlier runs.

    `pace`: that of the layout before any correction, if it is known already.
    """
    predicted = estimate(layout, question.facts, question.cluster, pace=pace)
    if question.correction is not None:
        return correct_estimate(predicted, question.correction)
    if question.learned is not None:
        return scale_estimate(predicted, question.learned)
    return predicted


def number_of_processes(question: Question, strategy: StrategyConfig) -> int:
    """Return the number of processes of a strategy."""
    if strategy.one_process:
        return 1
    return question.cluster.world_size


def machine_of(cluster: Cluster) -> Machine:
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

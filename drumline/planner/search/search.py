"""Search all layouts of a run on a cluster that the rules allow, each with its estimate. Pure.

strategies of all families ──▶ rules ──▶ a bound on the speed of each strategy, the fastest first
    ──▶ micro-batch × compiled blocks × checkpointing ──▶ speed ──▶ memory, if the speed may count
    ──▶ the best layout of each strategy ──▶ the best FEW strategies of each family

A candidate is a layout with its estimate. The search keeps only the best FEW candidates of a family,
so its memory does not grow with the cluster, and a strategy that cannot be among them is not looked at.
Complete configs are made for these alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from drumline.config.config import Config
from drumline.config.registry import kinds, part_class
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.plan.explain import describe_checkpointing
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.plan.resolve import KnownModel, deepspeed_options, resolve
from drumline.planner.cost.fitted import SPEED_ERROR
from drumline.planner.search.answer import (
    Answer,
    Candidate,
    Question,
    Refused,
    best_first,
    discounted_speed,
    is_faster_by_error,
    risk_adjusted_speed,
    why_not,
)
from drumline.planner.search.family import FEW, Bar, Family, describe_refusal
from drumline.planner.search.layouts import (
    Choice,
    Estimator,
    estimate_layout,
    machine_of,
    number_of_processes,
)
from drumline.planner.strategies.base import Space, StrategyCost, cost_of

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
        if name in fixed and _chosen_value(given, name) != _chosen_value(strategy, name):
            # The candidate is of another kind than the user wants.
            return None
    if pipeline is not None and getattr(strategy, "pp", 1) > 1:
        options = {name: getattr(pipeline, name) for name in pipeline.model_fields_set}
        own_pipeline = getattr(strategy, "pipeline", pipeline)
        fixed["pipeline"] = own_pipeline.model_copy(update=options)
    return strategy.model_copy(update=fixed)


def _chosen_value(strategy: StrategyConfig, key: str) -> Any:
    """Return a strategy's value of a key in _CHOSEN, or what it does if the value is null.

    Of a section for offloading it is the place alone.
    """
    attribute = key
    if key == "reshard_after_forward":
        attribute = "reshards"
    value = getattr(strategy, attribute)
    return getattr(value, "kind", value)


def search(
    question: Question,
    among: Iterable[StrategyConfig] | None = None,
    *,
    exclude_tight: bool = False,
    first_only: bool = False,
) -> Answer:
    """Return the best few candidates of each family, or the reason why none fits.

    `among`: the strategies to estimate; None: all.
    `exclude_tight`: candidates with the verdict `tight` do not count as fitting.
    `first_only`: only the first candidates count. Strategies that are slower than another by more
    than the error of a prediction are left out, and families that have no others.
    """
    estimator = Estimator(question)
    question = estimator.question
    if among is None:
        among = search_space(question)
    families = _search_families(estimator, among, exclude_tight, first_only)
    completed = _complete_families(families, question.facts)
    ranked = list(best_first(completed.candidates))
    if ranked and not exclude_tight:
        faster_one = _faster_and_tight(ranked, families.values(), question.facts)
        if faster_one is not None:
            ranked = list(best_first([*ranked, faster_one]))
    return Answer(
        question,
        tuple(ranked),
        tuple(completed.refused),
        looked_at=sum(family.looked_at for family in families.values()),
        estimated=sum(family.estimated for family in families.values()),
    )


class _Bounded(NamedTuple):
    """A strategy with a discounted speed that none of its layouts exceeds.

    `looked_at`: the number of layouts whose speed was predicted for it.
    """

    strategy: StrategyConfig
    family: Family
    speed: float
    looked_at: int


def _search_families(
    estimator: Estimator,
    strategies: Iterable[StrategyConfig],
    exclude_tight: bool,
    first_only: bool,
) -> dict[str, Family]:
    """Return the families of some strategies, by name, with their best candidates.

    The strategy with the highest bound comes first, so that those that cannot be among the best few
    of their family are passed over.
    """
    families, bounded = _bound_strategies(estimator, strategies, first_only)
    bounded.sort(key=lambda each: -each.speed)
    fastest = 0.0
    for strategy, family, speed, looked_at in bounded:
        needed = family.slowest_kept
        if first_only:
            needed = max(needed, (1 - SPEED_ERROR) * fastest)
        if not Bar(needed).is_reached(speed):
            family.looked_at += looked_at
            family.is_cut = True
            continue
        best = estimator.best_of(strategy, family, exclude_tight, needed)
        if best is not None:
            family.keep(best)
            fastest = max(fastest, risk_adjusted_speed(best))
    return families


def _bound_strategies(
    estimator: Estimator, strategies: Iterable[StrategyConfig], first_only: bool
) -> tuple[dict[str, Family], list[_Bounded]]:
    """Return the families by name, and their strategies with bounds of speed.

    Strategies that rules refuse are left out. Small families need no bounds: all of their strategies
    are looked at.
    """
    world_size = estimator.question.cluster.world_size
    members = dict[str, list[StrategyConfig]]()
    for strategy in strategies:
        members.setdefault(strategy.names(world_size).family, []).append(strategy)
    families = dict[str, Family]()
    bounded = []
    for name, alike in members.items():
        family = Family()
        families[name] = family
        for strategy in alike:
            if len(alike) <= FEW and not first_only:
                bounded.append(_Bounded(strategy, family, math.inf, 0))
                continue
            try:
                bound = estimator.bound(strategy)
            except PlanError as error:
                family.refuse(error)
            else:
                bounded.append(_Bounded(strategy, family, bound.speed, bound.looked_at))
    return families, bounded


class _Completed(NamedTuple):
    """The candidates of all families with complete configs, and the families that are refused."""

    candidates: list[Candidate]
    refused: list[Refused]


def _complete_families(families: dict[str, Family], facts: ModelFacts) -> _Completed:
    """Return the best candidates of all families with complete configs.

    A family is refused if it has none, or if a whole plan of one of them is refused, for example by
    a DeepSpeed config of the user's own. It is left out if it has none of those that were looked at.
    """
    candidates: list[Candidate] = []
    refused: list[Refused] = []
    for name, family in families.items():
        if family.is_cut and not family.best:
            continue
        try:
            candidates += [_complete_config(candidate, facts) for candidate in family.best]
            if not family.best:
                refused.append(_refuse_family(name, family, facts))
        except PlanError as error:
            refused.append(Refused(name, describe_refusal(error)))
    return _Completed(candidates, refused)


def _refuse_family(name: str, family: Family, facts: ModelFacts) -> Refused:
    """Return a family of which no candidate fits, with the reason."""
    if family.nearest is None:
        return Refused(name, family.reason)
    nearest = _complete_config(family.nearest, facts)
    return Refused(name, why_not(nearest.estimate), nearest)


def _faster_and_tight(
    ranked: Sequence[Candidate], families: Iterable[Family], facts: ModelFacts
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
    kind = describe_checkpointing(layout)
    if kind == describe_checkpointing(other):
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
    estimator = Estimator(question)
    if among is None:
        among = search_space(estimator.question)
    return any(_strategy_fits(estimator, strategy) for strategy in among)


def _strategy_fits(estimator: Estimator, strategy: StrategyConfig) -> bool:
    """Return whether a strategy fits with the most checkpointing and savings that the rules allow.

    Less of these needs as much memory or more. Tight candidates do not count as fitting.
    """
    for checkpointing in reversed(estimator.checkpointing):
        with suppress(PlanError):
            choice = Choice(checkpointing)
            candidates = estimator.candidates(strategy, choice, Family(), Bar())
            if any(candidate.estimate.verdict == "fits" for candidate in candidates):
                return True
            break
    if estimator.fits_with_savings(strategy):
        return True
    pageable = estimator.with_pageable_memory(strategy)
    return pageable is not None and _strategy_fits(estimator, pageable)


def evaluate(question: Question, config: Config, name: str) -> Candidate:
    """Return one config as a candidate: its plan on the question's cluster, and the estimate.

    The strategy of the config must not be auto. `name`: of the candidate. Raises PlanError if a rule or a number refuses the config.
    """
    plan = resolve(
        config,
        run_dir="",
        machine=machine_of(question.cluster),
        world_size=number_of_processes(question, config.strategy),
        model=KnownModel(facts=question.facts, roles=question.roles),
        data=question.data,
    )
    return Candidate(name, plan, estimate_layout(question, plan))


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

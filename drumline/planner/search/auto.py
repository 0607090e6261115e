"""`strategy: auto`: what the planner chooses and why. Pure.

`train.setup` calls `choose` and `choose_compile` before a run.

It also holds the heuristics that the planner's choice is compared with. The key `by: rules` of
`strategy: auto` means these heuristics, not the rules of `plan.rules`, which refuse layouts.
`parameters` and `devices` go by counts alone. `tree` is the ladder DP → DDP → FSDP → FSDP +
offload, of which a run takes the first rung that fits. DP, which is nn.DataParallel, is left out:
elsewhere it needs fewer changes to the code than DDP, but here neither needs any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from drumline.config.config import Config
from drumline.config.strategies.auto import AutoStrategy
from drumline.config.strategies.ddp import DDPStrategy
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.config.strategies.single import SingleStrategy
from drumline.config.strategies.zero import Zero2Strategy, Zero3Strategy
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.plan.batch import resolve_batch
from drumline.plan.estimate import Estimate
from drumline.plan.explain import count
from drumline.plan.stages import least_accumulation
from drumline.planner.cost.fitted import SPEED_ERROR
from drumline.planner.search.advice import nothing_fits_error, smallest_changes
from drumline.planner.search.answer import (
    TIE,
    UNMEASURED,
    Answer,
    Candidate,
    Question,
    Refused,
    gb,
    is_faster_by_tie,
    is_speed_confirmed,
    risk_adjusted_speed,
)
from drumline.planner.search.compiling import (
    describe_compile,
    reason_against,
    reason_against_layout,
    set_compile,
)
from drumline.planner.search.search import evaluate, search, search_strategy

BILLION = 1_000_000_000
DDP = DDPStrategy()
FSDP = FSDP2Strategy()
OFFLOADED = FSDP2Strategy(offload="cpu")


# The conditions of the heuristics.
def _always(question: Question) -> bool:
    """Return True: the last rung takes whatever is left."""
    return True


def _has_less_than_1b(question: Question) -> bool:
    """Return whether the model has fewer than a billion parameters."""
    return question.facts.parameters < BILLION


def _has_up_to_7b(question: Question) -> bool:
    """Return whether the model has at most 7 billion parameters."""
    return question.facts.parameters <= 7 * BILLION


def _has_few_devices_and_parameters(question: Question) -> bool:
    """Return whether there are at most 4 devices and 8 billion parameters."""
    return question.cluster.world_size <= 4 and question.facts.parameters <= 8 * BILLION


def _fits_on_a_device(question: Question) -> bool:
    """Return whether a copy of the model fits on each device, by an estimate."""
    return isinstance(search_strategy(question, DDP), Candidate)


def _fits_in_shards(question: Question) -> bool:
    """Return whether the model fits if it is sharded over all devices, by an estimate."""
    return isinstance(search_strategy(question, FSDP), Candidate)


class Rung(NamedTuple):
    """A rung of a heuristic: the strategy to take if the condition holds.

    `condition`: as text for the user. `holds`: whether it holds for a question.
    """

    condition: str
    holds: Callable[[Question], bool]
    strategy: StrategyConfig


# The first rung that holds counts.
HEURISTICS: dict[str, tuple[Rung, ...]] = {
    "parameters": (
        Rung("fewer than 1B parameters", _has_less_than_1b, DDP),
        Rung("1-7B parameters", _has_up_to_7b, Zero2Strategy()),
        Rung("more than 7B parameters", _always, Zero3Strategy()),
    ),
    "devices": (
        Rung("up to 4 devices and 8B parameters", _has_few_devices_and_parameters, DDP),
        Rung("more than 4 devices, or than 8B parameters", _always, FSDP),
    ),
    "tree": (
        Rung("the whole model fits on a device", _fits_on_a_device, DDP),
        Rung("its shards do", _fits_in_shards, FSDP),
        Rung("its shards do not", _always, OFFLOADED),
    ),
}


@dataclass(frozen=True)
class Disagreement:
    """A heuristic whose strategy is slower, or does not fit.

    `says`: the strategy and its condition. `reason`: why the planner disagrees, with numbers.
    """

    heuristic: str
    says: str
    reason: str


def chosen_by(question: Question, heuristic: str) -> tuple[StrategyConfig, str]:
    """Return the strategy of a heuristic, and the condition that holds.

    `heuristic`: a key of HEURISTICS. On one device DDP becomes `single`.
    """
    rung = next(rung for rung in HEURISTICS[heuristic] if rung.holds(question))
    strategy = rung.strategy
    if question.cluster.world_size == 1 and strategy is DDP:
        strategy = SingleStrategy()
    return strategy, rung.condition


def heuristic_first(answer: Answer) -> tuple[Answer, str]:
    """Return the answer with the strategy of a heuristic first, and a line that says so.

    The config chooses a heuristic by `strategy: {kind: auto, by: rules}`. A run then takes its
    strategy, however fast others are. If that strategy is refused, the order stays and the line says
    why. Without a heuristic the order stays and the line is empty.
    """
    auto = answer.question.config.strategy
    if not isinstance(auto, AutoStrategy) or auto.by != "rules":
        return answer, ""
    proposed = _find_proposal(answer, auto.guide)
    line = f"{proposed.name} by the heuristic `{auto.guide}` ({proposed.condition}), as set"
    if isinstance(proposed.result, Refused):
        return answer, f"{line}: {proposed.result.reason}"
    rest = [candidate for candidate in answer.ranked if candidate.name != proposed.name]
    return replace(answer, ranked=(proposed.result, *rest)), f"First: {line}"


class _Proposed(NamedTuple):
    """What a heuristic proposes: the name of its strategy, its condition, and the search's result."""

    name: str
    condition: str
    result: Candidate | Refused


def _find_proposal(answer: Answer, heuristic: str) -> _Proposed:
    """Return what a heuristic proposes.

    The result is that of the answer, which a probe may have corrected, or else of a new search.
    """
    strategy, condition = chosen_by(answer.question, heuristic)
    name = strategy.names(answer.question.cluster.world_size).name
    for candidate in answer.ranked:
        if candidate.name == name:
            return _Proposed(name, condition, candidate)
    return _Proposed(name, condition, search_strategy(answer.question, strategy))


def disagreements(answer: Answer) -> tuple[Disagreement, ...]:
    """Return the heuristics whose strategy does not fit, or is slower than the first plan.

    Slower means by more than the error of a prediction.
    """
    question = answer.question
    size = f"{count(question.facts.parameters)} on {question.cluster.world_size}"
    found = []
    for heuristic in HEURISTICS:
        proposed = _find_proposal(answer, heuristic)
        reason = _why_not_proposed(answer, proposed.result)
        if reason is not None:
            says = f"{proposed.name} ({proposed.condition}: {size})"
            found.append(Disagreement(heuristic, says, reason))
    return tuple(found)


def _why_not_proposed(answer: Answer, result: Candidate | Refused) -> str | None:
    """Return why the first plan is better than a result; None if it is not."""
    if isinstance(result, Refused):
        return result.reason
    if not answer.ranked:
        return None
    first = answer.ranked[0]
    if first.estimate.verdict != "fits" or not is_faster_by_tie(first.estimate, result.estimate):
        return None
    proposed_speed = result.estimate.tokens_per_s
    speed = first.estimate.tokens_per_s
    times = f"{speed / proposed_speed:.2f} ×"
    return f"{proposed_speed:,.0f} tokens/s, {first.name} {speed:,.0f} ({times})"


def choose(question: Question) -> tuple[Config, str | None]:
    """Return the config with strategy, micro-batch and checkpointing filled in, and why.

    If the rules of `plan.rules` refuse everything, the config is the same: resolving it reports the
    rule. Raises PlanError if nothing fits, with the smallest changes after which something would.
    """
    config = question.config
    auto = config.strategy
    assert isinstance(auto, AutoStrategy)
    if auto.by == "rules":
        return _choose_by_heuristic(question, auto.guide)
    answer = search(question)
    if not answer.ranked:
        if any(refused.best for refused in answer.refused):
            raise nothing_fits_error(answer, smallest_changes(answer))
        return config, None
    first = answer.ranked[0]
    layout = first.layout
    update: dict[str, Any] = {"strategy": layout.strategy}
    # A section that resolves to the same value anyway stays as the user set it.
    least = least_accumulation(layout.mesh, layout.strategy)
    if resolve_batch(config, layout.mesh.data_ranks, least) != layout.batch:
        update["batch"] = first.config.batch
    if layout.config.memory != config.memory:
        update["memory"] = layout.config.memory
    if layout.config.checkpoint != config.checkpoint:
        update["checkpoint"] = layout.config.checkpoint
    if layout.config.compile.enabled:
        update["compile"] = layout.config.compile
    elif layout.device == "cuda":
        # It is set, so that it is not chosen again.
        update["compile"] = set_compile(config, bool(config.compile.enabled)).compile
    return config.model_copy(update=update), _why(answer)


def _choose_by_heuristic(question: Question, heuristic: str) -> tuple[Config, str]:
    """Return the config with the strategy of a heuristic, and what the planner says of it."""
    strategy, condition = chosen_by(question, heuristic)
    result = search_strategy(question, strategy)
    name = strategy.names(question.cluster.world_size).name
    why = f"strategy auto: {name} by the heuristic `{heuristic}` ({condition})"
    if isinstance(result, Refused):
        why += f"; the planner would not: {result.reason}"
    return question.config.model_copy(update={"strategy": strategy}), why


def choose_compile(question: Question) -> tuple[Config, str]:
    """Return the config of a named strategy with `compile: auto` decided, and why.

    The config is the same, and the text empty, if the user has decided, on a CPU, and if the config
    cannot be planned: resolving it reports the reason.
    """
    config = question.config
    facts = question.facts
    cluster = question.cluster
    if config.compile.enabled is not None or cluster.device.kind == "cpu":
        return config, ""
    try:
        chosen = evaluate(question, set_compile(config, False), "eager")
        reason = reason_against(config, facts, cluster)
        if not reason and not reason_against_layout(chosen.layout, facts):
            compiled = evaluate(question, set_compile(config, True), "compiled")
            if risk_adjusted_speed(compiled) * (1 - TIE) > risk_adjusted_speed(chosen):
                chosen = compiled
    except PlanError:
        return config, ""
    line = describe_compile(chosen.layout, facts, cluster, chosen.layout.steps)
    return set_compile(config, bool(chosen.config.compile.enabled)), line


def describe_faster_tight_plan(answer: Answer) -> str:
    """Return a line on a tight candidate that is clearly faster than the first; empty without one."""
    found = answer.tight
    if found is None:
        return ""
    times = found.estimate.tokens_per_s / answer.ranked[0].estimate.tokens_per_s
    speed = f"{found.estimate.tokens_per_s:,.0f} tokens/s ({times:.1f} ×)"
    return f"faster, with little room: {found.name}, {speed}; {risk(found)}"


def export_left_out(config: Config, candidate: Candidate) -> str:
    """Return a line on the export that a candidate leaves out for want of host memory.

    It is empty if the candidate exports what the user has set in `config`.
    """
    checkpoint = candidate.layout.config.checkpoint
    if checkpoint == config.checkpoint:
        return ""
    exported = "nothing is exported at the end"
    if checkpoint.export_adapter:
        exported = "the adapter alone is exported"
    reason = "the whole model in fp32 does not fit into the host's memory"
    return f"{exported}, since {reason}: `drumline export` writes it on a larger machine"


def risk(candidate: Candidate) -> str:
    """Return the risk of a tight candidate, and what the run does if memory runs out."""
    estimate = candidate.estimate
    needs = f"{gb(estimate.memory.reserved)} of {gb(estimate.limit)}"
    chance = f"it runs out of memory with a chance of {estimate.risk:.0%} ({needs})"
    if candidate.config.memory.on_oom == "replan":
        return f"{chance}, and then goes on with a plan that needs less (memory.on_oom=replan)"
    return f"{chance}, and then ends and names a plan that needs less (memory.on_oom=stop)"


def _why(answer: Answer) -> str:
    """Return why the planner chooses the first candidate, with the numbers, in one line."""
    first, *rest = answer.ranked
    question = answer.question
    estimated = first.estimate
    batch = first.layout.batch
    batches = f"micro-batch {batch.micro_batch} × accumulation {batch.accumulation}"
    choice = f"strategy auto: {first.name}, {batches}"
    kind = first.layout.activation_checkpointing
    if kind != "none":
        choice += f", {kind} checkpointing"
    speed = f"{_speed_and_memory(estimated)} of {gb(estimated.limit)}"
    parts = [choice, f"of {answer.looked_at} layouts {_reason(answer)}: {speed}"]
    second = next((other for other in rest if other.family != first.family), None)
    if second is not None:
        parts.append(f"second {second.name}, {_speed_and_memory(second.estimate)}")
    if estimated.verdict == "tight":
        parts.append(f"tight: {risk(first)}")
    parts.append(describe_faster_tight_plan(answer))
    parts.append(export_left_out(question.config, first))
    if question.config.compile.enabled is None:
        steps = first.layout.steps
        parts.append(describe_compile(first.layout, question.facts, question.cluster, steps))
    return "; ".join(part for part in parts if part)


def _speed_and_memory(estimate: Estimate) -> str:
    """Return the speed and the memory of an estimate as text."""
    return f"{estimate.tokens_per_s:,.0f} tokens/s at {gb(estimate.memory.reserved)}"


def _reason(answer: Answer) -> str:
    """Return why the first candidate is the first."""
    first, *rest = answer.ranked
    if first.estimate.verdict == "tight":
        if answer.best_that_fits is None:
            return "the best, and none fits with room"
        other = answer.best_that_fits
        times = first.estimate.tokens_per_s / other.estimate.tokens_per_s
        return f"the best, {times:.1f} × as fast as the best that fits with room ({other.name})"
    faster_ones = []
    for candidate in rest:
        estimate = candidate.estimate
        if estimate.verdict == "fits" and estimate.tokens_per_s > first.estimate.tokens_per_s:
            faster_ones.append(candidate)
    if not faster_ones:
        return "the fastest predicted to fit"
    if not any(is_faster_by_tie(other.estimate, first.estimate) for other in faster_ones):
        return f"as fast as any that fits (within {TIE:.0%}), and simpler or smaller"
    if all(is_speed_confirmed(other.layout) for other in faster_ones):
        return f"within {SPEED_ERROR:.0%} of the fastest that fits, and clearly smaller"
    return f"nearly as fast as any that fits (within {UNMEASURED:.0%}), and simpler"

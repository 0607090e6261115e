"""`strategy: auto`: what the planner takes and why, in one line; the heuristics as small tables, and where the planner disagrees. Pure.

`parameters` and `devices` go by counts alone. `tree` is the ladder DP → DDP → FSDP → FSDP + offload; a run takes the first rung that
fits. The table leaves out nn.DataParallel, the first rung (many GPUs with little change to the code), since DDP needs no more here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from drumline.core.batch import resolve_batch
from drumline.core.config import Config
from drumline.core.explain import count
from drumline.core.stages import in_flight
from drumline.core.strategy import StrategySpec
from drumline.errors import PlanError
from drumline.planner.cost.fitted import SPEED_ERROR
from drumline.planner.search.advice import nothing_fits, refusal
from drumline.planner.search.answer import (
    TIE,
    UNMEASURED,
    Answer,
    Candidate,
    Question,
    Refused,
    expected_speed,
    faster,
    gb,
    is_trusted,
)
from drumline.planner.search.compiling import describe_compile, reason_against, set_compile
from drumline.planner.search.search import evaluate, look_at, search
from drumline.strategies.auto.spec import AutoStrategy
from drumline.strategies.ddp.spec import DDPStrategy
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.single.spec import SingleStrategy
from drumline.strategies.zero.spec import Zero2Strategy, Zero3Strategy

BILLION = 1_000_000_000
DDP, FSDP, OFFLOADED = DDPStrategy(), FSDP2Strategy(), FSDP2Strategy(offload="cpu")
# Of each heuristic its rungs: (when, whether that holds, strategy). The first one that holds counts.
HEURISTICS: dict[str, tuple[tuple[str, Callable[[Question], bool], StrategySpec], ...]] = {
    "parameters": (
        ("fewer than 1B parameters", lambda question: question.facts.parameters < BILLION, DDP),
        (
            "1-7B parameters",
            lambda question: question.facts.parameters <= 7 * BILLION,
            Zero2Strategy(),
        ),
        ("more than 7B parameters", lambda _: True, Zero3Strategy()),
    ),
    "devices": (
        (
            "up to 4 devices and 8B parameters",
            lambda q: q.cluster.world_size <= 4 and q.facts.parameters <= 8 * BILLION,
            DDP,
        ),
        ("more than 4 devices, or than 8B parameters", lambda _: True, FSDP),
    ),
    "tree": (
        (
            "the whole model fits on a device",
            lambda question: isinstance(look_at(question, DDP), Candidate),
            DDP,
        ),
        ("its shards do", lambda question: isinstance(look_at(question, FSDP), Candidate), FSDP),
        ("its shards do not", lambda _: True, OFFLOADED),
    ),
}


@dataclass(frozen=True)
class Disagreement:
    """A heuristic whose strategy is slower or does not fit: `says`: that strategy; `reason`: why not, with numbers."""

    heuristic: str
    says: str
    reason: str


def chosen_by(question: Question, heuristic: str) -> tuple[StrategySpec, str]:
    """The strategy of a heuristic (DDP on one device is single), and the condition that holds."""
    when, strategy = next(
        (when, strategy) for when, holds, strategy in HEURISTICS[heuristic] if holds(question)
    )
    return (
        SingleStrategy() if question.cluster.world_size == 1 and strategy is DDP else strategy
    ), when


def heuristic_first(answer: Answer) -> tuple[Answer, str]:
    """The answer with the strategy of the heuristic first, where `strategy: {kind: auto, by: rules}` sets one, and a line on it: a run
    takes it, however fast the rest. Otherwise the same answer."""
    auto = answer.question.config.strategy
    if not isinstance(auto, AutoStrategy) or auto.by != "rules":
        return answer, ""
    name, when, theirs = _proposed(answer, auto.guide)
    line = f"{name} by the heuristic `{auto.guide}` ({when}), as set"
    if isinstance(theirs, Refused):
        return answer, f"{line}: {theirs.reason}"
    rest = (candidate for candidate in answer.ranked if candidate.name != name)
    return replace(answer, ranked=(theirs, *rest)), f"First: {line}"


def _proposed(answer: Answer, heuristic: str) -> tuple[str, str, Candidate | Refused]:
    """(name, condition, result) of the strategy of a heuristic: as ranked, where a probe may have corrected it, else the search's."""
    strategy, when = chosen_by(answer.question, heuristic)
    name = strategy.names(answer.question.cluster.world_size).name
    ranked = next((candidate for candidate in answer.ranked if candidate.name == name), None)
    return name, when, ranked or look_at(answer.question, strategy)


def disagreements(answer: Answer) -> tuple[Disagreement, ...]:
    """The heuristics whose strategy does not fit, or is slower than the first plan by more than the error of a prediction."""
    found, question = list[Disagreement](), answer.question
    for heuristic in HEURISTICS:
        name, when, theirs = _proposed(answer, heuristic)
        says = (
            f"{name} ({when}: {count(question.facts.parameters)} on {question.cluster.world_size})"
        )
        if isinstance(theirs, Refused):
            found.append(Disagreement(heuristic, says, theirs.reason))
        elif (
            answer.ranked
            and faster(answer.ranked[0].estimate, theirs.estimate)
            and answer.ranked[0].estimate.verdict == "fits"
        ):
            first, speed, ours = (
                answer.ranked[0].name,
                answer.ranked[0].estimate.tokens_per_s,
                theirs.estimate.tokens_per_s,
            )
            found.append(
                Disagreement(
                    heuristic,
                    says,
                    f"{ours:,.0f} tokens/s, {first} {speed:,.0f} ({speed / ours:.2f} ×)",
                )
            )
    return tuple(found)


def choose(question: Question) -> tuple[Config, str | None]:
    """The config with strategy, micro-batch and checkpointing filled in, and why. Where the rules refuse everything, the same config:
    resolving it reports the rule. Raises PlanError where nothing fits, with the smallest changes that would."""
    config, auto = question.config, question.config.strategy
    assert isinstance(auto, AutoStrategy)
    if auto.by == "rules":
        strategy, when = chosen_by(question, auto.guide)
        found = look_at(question, strategy)
        why = f"strategy auto: {strategy.names(question.cluster.world_size).name} by the heuristic `{auto.guide}` ({when})"
        refused = f"; the planner would not: {found.reason}" if isinstance(found, Refused) else ""
        return config.model_copy(update={"strategy": strategy}), why + refused
    answer = search(question)
    if not answer.ranked:
        if any(refused.best for refused in answer.refused):
            raise refusal(answer, nothing_fits(answer))
        return config, None
    first, layout = answer.ranked[0], answer.ranked[0].layout
    update: dict[str, Any] = {"strategy": layout.strategy}
    # A key that resolves to the same value anyway stays as the user set it.
    if (
        resolve_batch(config, layout.mesh.data_ranks, in_flight(layout.mesh, layout.strategy))
        != layout.batch
    ):
        update["batch"] = first.config.batch
    if layout.config.memory != config.memory:
        update["memory"] = layout.config.memory
    if layout.config.checkpoint != config.checkpoint:
        update["checkpoint"] = layout.config.checkpoint
    if layout.config.compile.enabled:
        update["compile"] = layout.config.compile
    elif layout.device == "cuda":  # decided, so that nobody asks again
        update["compile"] = set_compile(config, bool(config.compile.enabled)).compile
    return config.model_copy(update=update), _why(answer)


def choose_compile(question: Question) -> tuple[Config, str]:
    """Return the config of a named strategy with `compile: auto` decided, and why.

    The same config with an empty text where the user has decided, on a CPU, and where the config cannot be
    planned: resolving it reports the reason.
    """
    config, facts, cluster = question.config, question.facts, question.cluster
    if config.compile.enabled is not None or cluster.device.kind == "cpu":
        return config, ""
    try:
        chosen = evaluate(question, set_compile(config, False), "eager")
        if not reason_against(config, facts, cluster):
            compiled = evaluate(question, set_compile(config, True), "compiled")
            if expected_speed(compiled) * (1 - TIE) > expected_speed(chosen):
                chosen = compiled
    except PlanError:
        return config, ""
    line = describe_compile(chosen.layout, facts, cluster, chosen.layout.steps)
    return set_compile(config, bool(chosen.config.compile.enabled)), line


def with_little_room(answer: Answer) -> str:
    """A line on the tight candidate that is faster than the first one, and on its risk; empty where there is none."""
    found = answer.tight
    if found is None:
        return ""
    times = found.estimate.tokens_per_s / answer.ranked[0].estimate.tokens_per_s
    speed = f"{found.estimate.tokens_per_s:,.0f} tokens/s ({times:.1f} ×)"
    return f"faster, with little room: {found.name}, {speed}; {risk(found)}"


def export_left_out(config: Config, candidate: Candidate) -> str:
    """Return a line on a candidate that leaves the merged model's export out for want of host memory; empty without one.

    `config`: what the user has set.
    """
    checkpoint = candidate.layout.config.checkpoint
    if checkpoint == config.checkpoint:
        return ""
    exported = (
        "the adapter alone is exported"
        if checkpoint.export_adapter
        else "nothing is exported at the end"
    )
    reason = "the whole model in fp32 does not fit into the host's memory"
    return f"{exported}, since {reason}: `drumline export` writes it on a larger machine"


def risk(candidate: Candidate) -> str:
    """The risk of a tight candidate as text, and what the run does when memory runs out."""
    estimate = candidate.estimate
    chance = f"it runs out of memory with a chance of {estimate.risk:.0%} ({gb(estimate.memory.reserved)} of {gb(estimate.limit)})"
    if candidate.config.memory.on_oom == "replan":
        return f"{chance}, and then goes on with a plan that needs less (memory.on_oom=replan)"
    return f"{chance}, and then ends and names a plan that needs less (memory.on_oom=stop)"


def _why(answer: Answer) -> str:
    first, *rest = answer.ranked
    second = next((other for other in rest if other.family != first.family), None)
    batch, estimated = first.layout.batch, first.estimate
    kind = first.layout.activation_checkpointing
    checkpointing = "" if kind == "none" else f", {kind} checkpointing"
    speed = f"{estimated.tokens_per_s:,.0f} tokens/s at {gb(estimated.memory.reserved)} of {gb(estimated.limit)}"
    parts = [
        f"strategy auto: {first.name}, micro-batch {batch.micro_batch} × accumulation {batch.accumulation}{checkpointing}",
        f"of {answer.looked_at} layouts {_reason(answer)}: {speed}",
    ]
    if second is not None:
        parts.append(
            f"second {second.name}, {second.estimate.tokens_per_s:,.0f} tokens/s at {gb(second.estimate.memory.reserved)}"
        )
    if estimated.verdict == "tight":
        parts.append(f"tight: {risk(first)}")
    line = with_little_room(answer)
    if line:
        parts.append(line)
    question = answer.question
    without = export_left_out(question.config, first)
    if without:
        parts.append(without)
    if question.config.compile.enabled is None:
        compiling = describe_compile(
            first.layout, question.facts, question.cluster, first.layout.steps
        )
        if compiling:
            parts.append(compiling)
    return "; ".join(parts)


def _reason(answer: Answer) -> str:
    """Why the first candidate is the first."""
    first, *rest = answer.ranked
    if first.estimate.verdict == "tight":
        if answer.with_room is None:
            return "the best, and none fits with room"
        times = first.estimate.tokens_per_s / answer.with_room.estimate.tokens_per_s
        return f"the best, {times:.1f} × as fast as the best that fits with room ({answer.with_room.name})"
    fitting = [candidate for candidate in rest if candidate.estimate.verdict == "fits"]
    faster_ones = [
        candidate
        for candidate in fitting
        if candidate.estimate.tokens_per_s > first.estimate.tokens_per_s
    ]
    if not faster_ones:
        return "the fastest predicted to fit"
    if not any(faster(other.estimate, first.estimate) for other in faster_ones):
        return f"as fast as any that fits (within {TIE:.0%}), and simpler or smaller"
    if all(is_trusted(other.layout) for other in faster_ones):
        return f"within {SPEED_ERROR:.0%} of the fastest that fits, and clearly smaller"
    return f"nearly as fast as any that fits (within {UNMEASURED:.0%}), and simpler"

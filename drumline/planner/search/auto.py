"""`strategy: auto`: what the planner takes and why, in one line; the heuristics as small tables, and where the planner disagrees. Pure.

`parameters` and `devices` go by counts alone. `tree` is the ladder DP → DDP → FSDP → FSDP + offload; a run takes the first rung that
fits. The table leaves out nn.DataParallel, the first rung (many GPUs with little change to the code), since DDP needs no more here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from drumline.core.batch import resolve_batch
from drumline.core.config import Config
from drumline.core.explain import count
from drumline.core.stages import in_flight
from drumline.core.strategy import StrategySpec
from drumline.planner.search.advice import nothing_fits, refusal
from drumline.planner.search.answer import TIE, Answer, Candidate, Question, Refused, faster, gb
from drumline.planner.search.search import describe, look_at, search
from drumline.strategies.auto.spec import AutoStrategy
from drumline.strategies.ddp.spec import DDPStrategy
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.single.spec import SingleStrategy
from drumline.strategies.zero.spec import Zero2Strategy, Zero3Strategy

BILLION = 1_000_000_000
Condition = Callable[[Question], bool]


@dataclass(frozen=True)
class Rung:
    """A line of a heuristic: the first one whose condition holds counts."""

    when: str
    holds: Condition
    strategy: StrategySpec


@dataclass(frozen=True)
class Disagreement:
    """A heuristic whose strategy is slower or does not fit: `says`: that strategy; `reason`: why not, with numbers."""

    heuristic: str
    says: str
    reason: str


def _fits(strategy: StrategySpec) -> Condition:
    def fits(question: Question) -> bool:
        found = look_at(question, strategy)
        return isinstance(found, Candidate) and found.estimate.verdict != "no"

    return fits


DDP, FSDP, OFFLOADED = DDPStrategy(), FSDP2Strategy(), FSDP2Strategy(offload="cpu")
HEURISTICS: dict[str, tuple[Rung, ...]] = {
    "parameters": (
        Rung("fewer than 1B parameters", lambda question: question.facts.parameters < BILLION, DDP),
        Rung("1-7B parameters", lambda question: question.facts.parameters <= 7 * BILLION, Zero2Strategy()),
        Rung("more than 7B parameters", lambda _: True, Zero3Strategy()),
    ),
    "devices": (
        Rung("up to 4 devices and 8B parameters", lambda q: q.cluster.world_size <= 4 and q.facts.parameters <= 8 * BILLION, DDP),
        Rung("more than 4 devices, or than 8B parameters", lambda _: True, FSDP),
    ),
    "tree": (
        Rung("the whole model fits on a device", _fits(DDP), DDP),
        Rung("its shards do", _fits(FSDP), FSDP),
        Rung("its shards do not", lambda _: True, OFFLOADED),
    ),
}


def chosen_by(question: Question, heuristic: str) -> tuple[StrategySpec, str]:
    """The strategy of a heuristic (DDP on one device is single), and the condition that holds."""
    row = next(row for row in HEURISTICS[heuristic] if row.holds(question))
    alone = question.cluster.world_size == 1 and row.strategy is DDP
    return (SingleStrategy() if alone else row.strategy), row.when


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
    others = (candidate for candidate in answer.ranked if candidate.name != name)
    return replace(answer, ranked=(theirs, *others)), f"First: {line}"


def _proposed(answer: Answer, heuristic: str) -> tuple[str, str, Candidate | Refused]:
    """(name, condition, result) of the strategy of a heuristic: as ranked, where a probe may have corrected it, else the search's."""
    strategy, when = chosen_by(answer.question, heuristic)
    name = describe(strategy, answer.question.cluster.world_size).name
    ranked = next((candidate for candidate in answer.ranked if candidate.name == name), None)
    return name, when, ranked or look_at(answer.question, strategy)


def disagreements(answer: Answer) -> tuple[Disagreement, ...]:
    """The heuristics whose strategy does not fit, or is slower than the first plan by more than the error of a prediction."""
    found, question = list[Disagreement](), answer.question
    for heuristic in HEURISTICS:
        name, when, theirs = _proposed(answer, heuristic)
        says = f"{name} ({when}: {count(question.facts.parameters)} on {question.cluster.world_size})"
        if isinstance(theirs, Refused):
            found.append(Disagreement(heuristic, says, theirs.reason))
        elif answer.ranked:
            first, ours = answer.ranked[0], theirs.estimate.tokens_per_s
            if faster(first.estimate, theirs.estimate) and first.estimate.verdict == "fits":
                ratio = first.estimate.tokens_per_s / ours
                reason = f"{ours:,.0f} tokens/s, {first.name} {first.estimate.tokens_per_s:,.0f} ({ratio:.2f} ×)"
                found.append(Disagreement(heuristic, says, reason))
    return tuple(found)


def choose(question: Question) -> tuple[Config, str | None]:
    """The config with strategy, micro-batch and checkpointing filled in, and why. Where the rules refuse everything, the same config:
    resolving it reports the rule. Raises PlanError where nothing fits, with the smallest changes that would."""
    auto = question.config.strategy
    assert isinstance(auto, AutoStrategy)
    if auto.by == "rules":
        return _by_rules(question, auto)
    answer = search(question)
    if answer.ranked:
        return _written(question.config, answer.ranked[0]), _why(answer)
    if any(refused.best for refused in answer.refused):
        raise refusal(answer, nothing_fits(answer))
    return question.config, None


def with_little_room(answer: Answer) -> str:
    """A line on the tight candidate that is faster than all that fit, and on its risk; empty where there is none."""
    found = answer.tight
    if found is None or answer.probes:  # these have corrected the others
        return ""
    needs, limit, speed = found.estimate.memory.reserved, found.estimate.limit, found.estimate.tokens_per_s
    times = speed / answer.ranked[0].estimate.tokens_per_s
    return (
        f"faster, with little room: {found.name}, {speed:,.0f} tokens/s ({times:.1f} ×) at {gb(needs)} of {gb(limit)}"
        f" ({needs / limit:.0%}); where that is predicted too low it runs out of memory (memory.on_oom=replan goes on with less)"
    )


def _by_rules(question: Question, auto: AutoStrategy) -> tuple[Config, str]:
    strategy, when = chosen_by(question, auto.guide)
    found = look_at(question, strategy)
    why = f"strategy auto: {describe(strategy, question.cluster.world_size).name} by the heuristic `{auto.guide}` ({when})"
    if isinstance(found, Refused):
        why += f"; the planner would not: {found.reason}"
    return question.config.model_copy(update={"strategy": strategy}), why


def _written(config: Config, first: Candidate) -> Config:
    """The config with the first candidate's choices. A key that resolves to the same value anyway stays as the user set it."""
    layout, batch = first.layout, config.batch
    least = in_flight(layout.mesh, layout.strategy)
    if resolve_batch(config, layout.mesh.data_ranks, least) != layout.batch:
        batch = first.config.batch
    same = layout.activation_checkpointing == config.memory.activation_checkpointing
    memory = config.memory if same else layout.config.memory
    return config.model_copy(update={"strategy": layout.strategy, "memory": memory, "batch": batch})


def _why(answer: Answer) -> str:
    first, *others = answer.ranked
    second = next((other for other in others if other.family != first.family), None)
    batch, estimated = first.layout.batch, first.estimate
    kind = first.layout.activation_checkpointing
    if estimated.verdict != "fits":
        reason = f"tight, and none of {answer.looked_at} layouts fits with room"
    elif any(c.estimate.tokens_per_s > estimated.tokens_per_s and c.estimate.verdict == "fits" for c in others):
        reason = f"of {answer.looked_at} layouts as fast as any that fits (within {TIE:.0%}), and simpler"
    else:
        reason = f"of {answer.looked_at} layouts the fastest predicted to fit"
    parts = [
        f"strategy auto: {first.name}, micro-batch {batch.micro_batch} × accumulation {batch.accumulation}"
        + (f", {kind} checkpointing" if kind != "none" else ""),
        f"{reason}: {estimated.tokens_per_s:,.0f} tokens/s at {gb(estimated.memory.reserved)} of {gb(estimated.limit)}",
    ]
    if second is not None:
        parts.append(f"second {second.name}, {second.estimate.tokens_per_s:,.0f} tokens/s at {gb(second.estimate.memory.reserved)}")
    return "; ".join([*parts, *filter(None, [with_little_room(answer)])])

"""The usual heuristics for strategies, as small tables, and where the planner disagrees with them. Pure.

`parameters` and `devices` go by counts alone. `tree` is the ladder DP → DDP → FSDP → FSDP + offload, each rung taken when the one before
does not fit; its first rung (nn.DataParallel: many GPUs with little change to the code) is passed by, since DDP asks for no more here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from drumline.core.explain import count
from drumline.core.strategy import StrategySpec
from drumline.planner.search.answer import Answer, Candidate, Question, Refused, faster
from drumline.planner.search.search import look_at
from drumline.planner.search.space import describe
from drumline.strategies.auto.spec import AutoStrategy
from drumline.strategies.ddp.spec import DDPStrategy
from drumline.strategies.fsdp2.spec import FSDP2Strategy
from drumline.strategies.single.spec import SingleStrategy
from drumline.strategies.zero.spec import Zero2Strategy, Zero3Strategy

BILLION = 1_000_000_000
Asks = Callable[[Question], bool]


@dataclass(frozen=True)
class Row:
    """A line of a heuristic: the first whose condition holds counts."""

    when: str
    holds: Asks
    strategy: StrategySpec


@dataclass(frozen=True)
class Disagreement:
    """A heuristic that would make a run do worse, or not run: `says` what it would take, `reason` why not, with numbers."""

    heuristic: str
    says: str
    reason: str


def _fits(strategy: StrategySpec) -> Asks:
    def fits(question: Question) -> bool:
        found = look_at(question, strategy)
        return isinstance(found, Candidate) and found.estimate.verdict != "no"

    return fits


DDP, FSDP, OFFLOADED = DDPStrategy(), FSDP2Strategy(), FSDP2Strategy(offload="cpu")
HEURISTICS: dict[str, tuple[Row, ...]] = {
    "parameters": (
        Row("fewer than 1B parameters", lambda question: question.facts.parameters < BILLION, DDP),
        Row("1-7B parameters", lambda question: question.facts.parameters <= 7 * BILLION, Zero2Strategy()),
        Row("more than 7B parameters", lambda _: True, Zero3Strategy()),
    ),
    "devices": (
        Row("up to 4 devices and 8B parameters", lambda q: q.cluster.world_size <= 4 and q.facts.parameters <= 8 * BILLION, DDP),
        Row("more than 4 devices, or than 8B parameters", lambda _: True, FSDP),
    ),
    "tree": (
        Row("the whole model fits on a device", _fits(DDP), DDP),
        Row("its shards do", _fits(FSDP), FSDP),
        Row("its shards do not", lambda _: True, OFFLOADED),
    ),
}


def chosen_by(question: Question, heuristic: str) -> tuple[StrategySpec, str]:
    """Its strategy (on one device plain data parallel is single), and the line of it that holds."""
    row = next(row for row in HEURISTICS[heuristic] if row.holds(question))
    alone = question.cluster.world_size == 1 and row.strategy is DDP
    return (SingleStrategy() if alone else row.strategy), row.when


def heuristic_first(answer: Answer) -> tuple[Answer, str]:
    """The answer with the strategy of the heuristic first, where `strategy: {kind: auto, by: rules}` sets one, and a line on it: a run
    takes it whatever the others promise. Otherwise as it is."""
    question, auto = answer.question, answer.question.config.strategy
    if not isinstance(auto, AutoStrategy) or auto.by != "rules":
        return answer, ""
    strategy, when = chosen_by(question, auto.guide)
    name = describe(strategy, question.cluster.world_size).name
    line = f"{name} by the heuristic `{auto.guide}` ({when}), as set"
    theirs = next((c for c in answer.ranked if c.name == name), None) or look_at(question, strategy)
    if isinstance(theirs, Refused):
        return answer, f"{line}: {theirs.reason}"
    others = (candidate for candidate in answer.ranked if candidate.name != name)
    return replace(answer, ranked=(theirs, *others)), f"First: {line}"


def disagreements(answer: Answer) -> tuple[Disagreement, ...]:
    """For each heuristic whose strategy does not fit, or is slower than the first plan by more than the error of a prediction."""
    found, question = list[Disagreement](), answer.question
    known = {candidate.name: candidate for candidate in answer.ranked}  # as a probe has corrected it
    for heuristic in HEURISTICS:
        strategy, when = chosen_by(question, heuristic)
        name = describe(strategy, question.cluster.world_size).name
        theirs = known.get(name) or look_at(question, strategy)
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

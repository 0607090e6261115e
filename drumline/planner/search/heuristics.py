"""What the usual guides say of strategies, as small tables, and where the planner disagrees with them. Pure.

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
    """A line of a guide: the first whose condition holds counts."""

    when: str
    holds: Asks
    strategy: StrategySpec


@dataclass(frozen=True)
class Disagreement:
    """A guide that would have a run do worse, or not run: `says` what it would take, `reason` why not, with numbers."""

    guide: str
    says: str
    reason: str


def _fits(strategy: StrategySpec) -> Asks:
    def fits(question: Question) -> bool:
        found = look_at(question, strategy)
        return isinstance(found, Candidate) and found.estimate.verdict != "no"

    return fits


DDP, FSDP, OFFLOADED = DDPStrategy(), FSDP2Strategy(), FSDP2Strategy(offload="cpu")
GUIDES: dict[str, tuple[Row, ...]] = {
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


def chosen_by(question: Question, guide: str) -> tuple[StrategySpec, str]:
    """The guide's strategy (on one device plain data parallel is single), and the line of it that holds."""
    row = next(row for row in GUIDES[guide] if row.holds(question))
    alone = question.cluster.world_size == 1 and row.strategy is DDP
    return (SingleStrategy() if alone else row.strategy), row.when


def asked_first(answer: Answer) -> tuple[Answer, str]:
    """The answer with the guide's strategy first, where `strategy: {kind: auto, by: rules}` asked for it, and that in words: a run takes
    it whatever the others promise. Otherwise as it is."""
    question, asked = answer.question, answer.question.config.strategy
    if not isinstance(asked, AutoStrategy) or asked.by != "rules":
        return answer, ""
    strategy, when = chosen_by(question, asked.guide)
    name = describe(strategy, question.cluster.world_size).name
    words = f"{name} by the guide `{asked.guide}` ({when}), as asked"
    theirs = next((c for c in answer.ranked if c.name == name), None) or look_at(question, strategy)
    if isinstance(theirs, Refused):
        return answer, f"{words}: {theirs.reason}"
    others = (candidate for candidate in answer.ranked if candidate.name != name)
    return replace(answer, ranked=(theirs, *others)), f"First: {words}"


def disagreements(answer: Answer) -> tuple[Disagreement, ...]:
    """For each guide whose strategy does not fit, or is slower than the first plan by more than can be told apart."""
    found, question = list[Disagreement](), answer.question
    known = {candidate.name: candidate for candidate in answer.ranked}  # as what was tried for a few steps has corrected it
    for guide in GUIDES:
        strategy, when = chosen_by(question, guide)
        name = describe(strategy, question.cluster.world_size).name
        theirs = known.get(name) or look_at(question, strategy)
        says = f"{name} ({when}: {count(question.facts.parameters)} on {question.cluster.world_size})"
        if isinstance(theirs, Refused):
            found.append(Disagreement(guide, says, theirs.reason))
        elif answer.ranked:
            first, ours = answer.ranked[0], theirs.estimate.tokens_per_s
            if faster(first.estimate, theirs.estimate) and first.estimate.verdict == "fits":
                ratio = first.estimate.tokens_per_s / ours
                reason = f"{ours:,.0f} tokens/s, {first.name} {first.estimate.tokens_per_s:,.0f} ({ratio:.2f} ×)"
                found.append(Disagreement(guide, says, reason))
    return tuple(found)

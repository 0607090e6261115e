"""`strategy: auto`: what the planner takes, and in one line why. Pure."""

from __future__ import annotations

from drumline.core.batch import resolve_batch
from drumline.core.config import Config
from drumline.core.stages import in_flight
from drumline.planner.search.advice import nothing_fits, refusal
from drumline.planner.search.answer import TIE, Answer, Candidate, Question, Refused, gb
from drumline.planner.search.heuristics import chosen_by
from drumline.planner.search.search import look_at, search
from drumline.planner.search.space import describe
from drumline.strategies.auto.spec import AutoStrategy


def choose(question: Question) -> tuple[Config, str | None]:
    """The config with strategy, micro-batch and checkpointing written in, and why. Where rules and numbers refuse everything, the config
    as it is: resolving it says which. Raises PlanError where nothing fits, with the smallest changes that would."""
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
    """What is faster than all that fits and what is risked with it; nothing where there is none."""
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
    """What was chosen; what would come out so anyway is left as the user has it."""
    layout, batch = first.layout, config.batch
    least = in_flight(layout.mesh, layout.strategy)
    if resolve_batch(config, layout.mesh.data_ranks, least)[0] != layout.batch:
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

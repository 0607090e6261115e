"""Find out whether a plan is slow for want of memory, and what an expert would do instead. Pure.

That is a larger global batch, an adapter, weights and moments in bf16, more devices, or fewer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.config.strategy import StrategyConfig
from drumline.plan.explain import count
from drumline.planner.search.advice import ModeResult, without_offload
from drumline.planner.search.answer import (
    Answer,
    Candidate,
    Question,
    gb,
    is_offloaded,
    number,
    risk_adjusted_speed,
)
from drumline.planner.search.pure_bf16 import OVERRIDE, PureBF16
from drumline.planner.search.search import search, search_strategy
from drumline.system.output import plural

# An adapter skips at most a third of the arithmetic (the gradients of frozen weights), which makes it
# at most 1.5 × as fast. If it is more than twice as fast as that, the other plan waits for memory.
SLOW = 3.0
# A doubled global batch is advised if it gains at least a quarter. Then fixed costs take 40% of a step
# or more.
WORTH_DOUBLING = 1.25
# Tokens of a step up to which a larger batch is advised. Few fine-tune with more.
MOST_TOKENS_A_STEP = 1 << 20
# Seconds of a day.
DAY = 86_400
# Training mode → the flag that plans for it.
FLAG_OF_MODE = {
    "full": "--adapter none",
    "LoRA": "--adapter lora",
    "QLoRA": "--adapter qlora",
}


def choose_mode(modes: Sequence[ModeResult]) -> ModeResult | None:
    """Return the first of full, LoRA and QLoRA that no later mode outruns by a factor of SLOW.

    None if none of them fits.
    """
    fitting = [each for each in modes if each.answer.ranked]
    for place, each in enumerate(fitting):
        limit = SLOW * _speed(each)
        if all(_speed(other) <= limit for other in fitting[place + 1 :]):
            return each
    return None


@dataclass(frozen=True)
class LargerBatch:
    """The first plan (row 1 of the answer) with a larger global batch.

    `samples`: of a step. `times`: the adapter's speed over that of `candidate`, at this batch.
    """

    samples: int
    candidate: Candidate
    times: float


def explain_mode(modes: Sequence[ModeResult], choice: ModeResult) -> str:
    """Return sentences on why an adapter is chosen instead of training all weights."""
    full = next((each for each in modes if each.name == "full"), None)
    if full is None or not full.answer.ranked:
        return (
            f"Training all weights fits on no layout of these devices: {choice.name} is the choice."
        )
    larger = _larger_batch(full.answer, choice)
    times = _times(full.answer, choice, larger)
    sentence = f"Training all weights is slow: {choice.name} is {times}. It is the choice."
    return " ".join([sentence, *_reasons(full.answer)])


def slow_lines(
    answer: Answer,
    modes: Sequence[ModeResult],
    tokens: float | None = None,
    pure_bf16: PureBF16 | None = None,
) -> list[str]:
    """Return why row 1 is slow, and what to do instead, in a line each.

    The list is empty unless an adapter is more than SLOW times as fast.

    `tokens`: of the whole run; None: the tokens of row 1's steps, if their number is known.
    `pure_bf16`: the best plan with weights and moments in bf16, if it differs much.
    """
    first = answer.ranked[0]
    if tokens is None and first.layout.steps is not None:
        tokens = first.layout.steps * first.layout.tokens_per_step
    limit = SLOW * _undiscounted_speed(first)
    ahead = [each for each in modes if each.answer.ranked and _speed(each) > limit]
    if not ahead:
        return []
    best = max(ahead, key=_speed)
    larger = _larger_batch(answer, best)
    times = _times(answer, best, larger)
    sentences = [f"Row 1 is slow: {best.name} is {times}.", *_reasons(answer), "Instead:"]
    lines = [" ".join(sentences)]
    if larger is not None:
        lines.append(f"  --batch {larger.samples}: {_pace(larger.candidate, tokens)}")
    for each in ahead:
        lines.append(f"  {FLAG_OF_MODE[each.name]}: {_pace(each.answer.ranked[0], tokens)}")
    if pure_bf16 is not None:
        verdict = pure_bf16.candidate.estimate.verdict
        pace = _pace(pure_bf16.candidate, tokens)
        lines.append(f"  {OVERRIDE}: {pace}; {verdict}, changes the numbers")
    more_devices = None
    if is_offloaded(first.layout.strategy):
        more_devices = without_offload(answer.question)
    if more_devices is not None:
        # The text names the devices that there are, too: "16 devices in place of 8".
        devices = more_devices.what.partition(" in place of ")[0]
        lines.append(f"  {devices}: {_pace(more_devices.candidate, tokens)}")
    speed = first.estimate.tokens_per_s
    lines.append(f"  fewer tokens: row 1 trains {count(round(DAY * speed))} tokens a day")
    lines.append("")
    return lines


def _larger_batch(answer: Answer, other: ModeResult) -> LargerBatch | None:
    """Return the first plan at a larger global batch; None if none is worth it.

    `other`: the adapter with which it is compared, at the same batch.
    """
    best = _double_batch(answer, [answer.ranked[0].layout.strategy])
    if best is None:
        return None
    samples = best.layout.batch.global_samples
    # The adapter may gain from the larger batch, too. It keeps the faster of its two plans.
    at_larger = _set_batch(other.answer.question, samples)
    rival = search_strategy(at_larger, other.answer.ranked[0].layout.strategy)
    fastest = _speed(other)
    if isinstance(rival, Candidate):
        fastest = max(fastest, _undiscounted_speed(rival))
    return LargerBatch(samples, best, fastest / _undiscounted_speed(best))


def larger_batch_line(answer: Answer, tokens: float | None) -> str:
    """Return a line that proposes a larger global batch; empty if the user has set one, or if none is worth it.

    `tokens`: of the whole run.
    """
    question = answer.question
    is_open = question.config.batch.model_dump(exclude_defaults=True) == {}
    if not is_open or question.config.images_alone or question.cluster.device.kind != "cuda":
        return ""
    # Another family may be the best for larger steps.
    families = {
        candidate.family: candidate.layout.strategy for candidate in reversed(answer.ranked)
    }
    best = _double_batch(answer, list(families.values()))
    if best is None:
        return ""
    samples = best.layout.batch.global_samples
    first = answer.ranked[0]
    times = number(_undiscounted_speed(best) / _undiscounted_speed(first))
    step = plural(first.layout.batch.global_samples, "sample")
    return (
        f"No batch is set, so a step has {step}. With more it is {times} × as fast:"
        f" --batch {samples}: {_pace(best, tokens)}"
    )


def _double_batch(answer: Answer, among: Sequence[StrategyConfig]) -> Candidate | None:
    """Return the first plan of some strategies at a larger global batch.

    The batch is doubled while each doubling gains a quarter, up to MOST_TOKENS_A_STEP. None if the
    first doubling gains less, or if the user has set micro-batch or accumulation.
    """
    first = answer.ranked[0]
    batch = answer.question.config.batch
    if batch.micro_batch is not None or batch.accumulation is not None:
        return None
    # A sample may have several rows, such as both answers of a pair.
    rows = first.layout.batch.rows_per_sample
    tokens = first.layout.max_length * rows
    samples = first.layout.batch.global_samples
    best = first
    while 2 * samples * tokens <= MOST_TOKENS_A_STEP:
        question = _set_batch(answer.question, 2 * samples)
        ranked = search(question, among, first_only=True).ranked
        if not ranked:
            break
        doubled = ranked[0]
        if risk_adjusted_speed(doubled) < WORTH_DOUBLING * risk_adjusted_speed(best):
            break
        best = doubled
        samples *= 2
    if best is first:
        return None
    return best


def _set_batch(question: Question, samples: int) -> Question:
    """Return the question with another global batch, which may have been set in tokens."""
    return question.with_values("batch", global_tokens=None, global_samples=samples)


def _times(answer: Answer, other: ModeResult, larger: LargerBatch | None) -> str:
    """Return how much faster an adapter is than the first plan: `3.4 times as fast`.

    If there is a larger batch, the text says it for both batches.
    """
    first = answer.ranked[0]
    times = f"{number(_speed(other) / _undiscounted_speed(first))} times as fast"
    if larger is None:
        return times
    samples = first.layout.batch.global_samples
    noun = "samples" if samples > 1 else "sample"
    larger_times = f"{number(larger.times)} times with {larger.samples}"
    return f"{times} with {samples} {noun} a step, and {larger_times}"


def _speed(each: ModeResult) -> float:
    """Return the speed of the first plan of an adapter."""
    return _undiscounted_speed(each.answer.ranked[0])


def _undiscounted_speed(candidate: Candidate) -> float:
    """Return the tokens/s of the whole run times the chance that it fits.

    Unlike `answer.risk_adjusted_speed` it has no discount for unconfirmed speeds.
    """
    return candidate.run_tokens_per_s * (1 - candidate.estimate.risk)


def _pace(candidate: Candidate, tokens: float | None) -> str:
    """Return a candidate's name, its speed, and the hours of the run.

    The hours are those of a billion tokens if the length of the run is not known.
    """
    hours = candidate.hours(tokens)
    if hours is None:
        length = f"{number(candidate.hours(1e9))} hours / 1B tokens"
    else:
        length = f"{number(hours)} hours"
    return f"{candidate.name}, {candidate.estimate.tokens_per_s:,.0f} tokens/s, {length}"


def _reasons(answer: Answer) -> list[str]:
    """Return a list with a sentence on why the first plan offloads; empty if it does not."""
    first = answer.ranked[0]
    if not is_offloaded(first.layout.strategy):
        return []
    fits_on_devices = any(not is_offloaded(each.layout.strategy) for each in answer.ranked)
    too_large = []
    for refused in answer.refused:
        if refused.best is not None and _is_too_large(refused.best):
            too_large.append(refused.best)
    if fits_on_devices or not too_large:
        return [
            f"{first.name} waits for copies to and from the devices, and for the optimizer"
            " outside of them."
        ]
    nearest = min(too_large, key=lambda best: best.estimate.memory.reserved)
    needs = gb(nearest.estimate.memory.reserved)
    limit = gb(nearest.estimate.limit)
    return [
        "Optimizer states lie outside of the devices, since nothing fits on the devices alone"
        f" ({nearest.name}, the smallest, needs {needs} of {limit})."
    ]


def _is_too_large(candidate: Candidate) -> bool:
    """Return whether a candidate needs more than a device's memory without offloading."""
    if is_offloaded(candidate.layout.strategy):
        return False
    return candidate.estimate.memory.reserved > candidate.estimate.limit

"""Whether a plan is slow for want of memory, and what an expert would do instead: adapters, more devices, fewer tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.explain import count
from drumline.planner.search.advice import Adapted, is_offloaded, without_offload
from drumline.planner.search.answer import Answer, Candidate, Refused, expected_speed, gb, number

# An adapter saves at most a third of the arithmetic (no gradients of the weights that it leaves alone), which is 1.5 × the speed. Where it
# is more than twice that ahead, the other plan waits for memory.
SLOW = 3.0
DAY = 86_400  # seconds
FLAGS = {"full": "--adapter none", "LoRA": "--adapter lora", "QLoRA": "--adapter qlora"}


def choose_adapter(adapted: Sequence[Adapted]) -> Adapted | None:
    """The first of full, LoRA and QLoRA that no later one is more than SLOW times as fast as; None where none of them fits."""
    fitting = [each for each in adapted if each.answer.ranked]
    for place, each in enumerate(fitting):
        limit = SLOW * _speed(each)
        if all(_speed(other) <= limit for other in fitting[place + 1 :]):
            return each
    return None


def why_adapter(adapted: Sequence[Adapted], choice: Adapted) -> str:
    """Why an adapter is chosen in place of training all weights, as a sentence."""
    full = next((each for each in adapted if each.name == "full"), None)
    if full is None or not full.answer.ranked:
        return f"Training all weights fits on no layout of these devices: {choice.name} is the choice."
    times = number(_speed(choice) / _speed(full))
    sentence = f"Training all weights is slow: {choice.name} is {times} times as fast, and the choice."
    return " ".join([sentence, *_reasons(full.answer)])


def slow_lines(answer: Answer, adapted: Sequence[Adapted], tokens: float | None = None) -> list[str]:
    """Why the first plan is slow, and what to do instead, one line each; empty where no other adapter is more than SLOW times as fast.
    `tokens`: of the whole run."""
    first = answer.ranked[0]
    ahead = [each for each in adapted if each.answer.ranked and _speed(each) > SLOW * expected_speed(first)]
    if not ahead:
        return []
    best = max(ahead, key=_speed)
    times = number(_speed(best) / expected_speed(first))
    sentences = [f"Row 1 is slow: {best.name} is {times} times as fast.", *_reasons(answer), "Instead:"]
    lines = [" ".join(sentences)]
    for each in ahead:
        lines.append(f"  {FLAGS[each.name]}: {_pace(each.answer.ranked[0], tokens)}")
    more_devices = without_offload(answer.question) if is_offloaded(first.layout.strategy) else None
    if more_devices is not None:
        devices = more_devices.what.partition(" in place of ")[0]
        lines.append(f"  {devices}: {_pace(more_devices.found, tokens)}")
    speed = first.estimate.tokens_per_s
    lines.append(f"  fewer tokens: row 1 trains {count(round(DAY * speed))} tokens a day")
    lines.append("")
    return lines


def _speed(each: Adapted) -> float:
    return expected_speed(each.answer.ranked[0])


def _pace(candidate: Candidate, tokens: float | None) -> str:
    """A candidate's name, its speed, and the hours of the run (of a billion tokens where its length is not known)."""
    hours = candidate.hours(tokens)
    if hours is None:
        length = f"{number(candidate.hours(1e9))} hours / 1B tokens"
    else:
        length = f"{number(hours)} hours"
    return f"{candidate.name}, {candidate.estimate.tokens_per_s:,.0f} tokens/s, {length}"


def _reasons(answer: Answer) -> list[str]:
    """Return why the first plan offloads, as a sentence in a list; an empty one if it does not."""
    first = answer.ranked[0]
    if not is_offloaded(first.layout.strategy):
        return []
    fits_on_devices = any(not is_offloaded(each.layout.strategy) for each in answer.ranked)
    too_large = [refused for refused in answer.refused if _is_too_large(refused)]
    bests = [refused.best for refused in too_large if refused.best is not None]
    if fits_on_devices or not bests:
        return [f"{first.name} waits for copies from the devices, and for updates outside of them."]
    nearest = min(bests, key=lambda best: best.estimate.memory.reserved)
    needs, limit = gb(nearest.estimate.memory.reserved), gb(nearest.estimate.limit)
    return [
        "Optimizer states lie outside of the devices, since nothing fits on the devices alone"
        f" ({nearest.name}, the smallest, needs {needs} of {limit})."
    ]


def _is_too_large(refused: Refused) -> bool:
    """Whether a family is out by a device's memory, though it keeps everything there."""
    best = refused.best
    if best is None or is_offloaded(best.layout.strategy):
        return False
    return best.estimate.memory.reserved > best.estimate.limit

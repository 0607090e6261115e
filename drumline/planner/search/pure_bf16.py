"""What weights, gradients and moments in bf16 would gain a run (`precision.master: bf16`). Pure.

They change the numbers of the run, so the planner never chooses them: the user does.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.planner.search.answer import (
    Answer,
    Candidate,
    Question,
    gb,
    is_faster_by_error,
    is_faster_by_tie,
)
from drumline.planner.search.search import search

# What makes a run keep all of it in bf16.
OVERRIDE = "precision.master=bf16"


@dataclass(frozen=True)
class PureBF16:
    """The best plan in bf16 alone, where it differs much from the first plan of an answer.

    `first`: the first plan of the answer.
    """

    candidate: Candidate
    first: Candidate

    @property
    def line(self) -> str:
        """What it gains and how to write it, in one line."""
        estimate = self.candidate.estimate
        gain = estimate.tokens_per_s / self.first.estimate.tokens_per_s - 1
        needs = f"{gb(estimate.memory.reserved)} of {gb(estimate.limit)}"
        verdict: str = estimate.verdict
        if verdict == "fits" and self.first.estimate.verdict == "tight":
            verdict = "fits with room"
        return (
            f"bf16 weights and moments: {verdict}, {gain:+.0%} tokens/s"
            f" ({self.candidate.name}, {needs}). They change the numbers, so the choice is yours:"
            f" {OVERRIDE}"
        )


def find_pure_bf16(answer: Answer) -> PureBF16 | None:
    """Return the best plan with weights, gradients and moments in bf16, if it should be shown.

    It is shown if it fits with room where the first plan is tight and is not slower, or else if it is
    faster than the first plan by more than the error of a prediction. It is not searched for if the
    user has set `precision.master`, on a CPU, and if nothing fits: then `smallest_changes` tries it.
    """
    question = answer.question
    is_set = "master" in question.config.precision.model_fields_set
    if not answer.ranked or is_set or question.cluster.device.kind != "cuda":
        return None
    first = answer.ranked[0]
    changed = with_pure_bf16(question)
    if first.estimate.verdict == "tight":
        # The room that bf16 leaves is worth more than its speed.
        for candidate in search(changed, exclude_tight=True, first_only=True).ranked:
            if not is_faster_by_tie(first.estimate, candidate.estimate):
                return PureBF16(candidate, first)
    for candidate in search(changed, first_only=True).ranked:
        if is_faster_by_error(candidate, first):
            return PureBF16(candidate, first)
    return None


def with_pure_bf16(question: Question) -> Question:
    """Return the question with weights, gradients and moments in bf16."""
    return question.with_values("precision", master="bf16")

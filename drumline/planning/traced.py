"""The best few of an answer once more, with activations traced from our own engine on fake tensors in the place of the formula's."""

from __future__ import annotations

from dataclasses import replace

from drumline.config.model import ModelConfig
from drumline.plan.choice.search import Answer, Candidate, Refused, in_order, why_not
from drumline.plan.forecast.estimate import estimate
from drumline.report.bars import OnProgress

FEW = 3


def traced(answer: Answer, model: ModelConfig, model_path: str | None, on_progress: OnProgress) -> Answer:
    """The answer with the first FEW estimated anew; one that then does not fit is refused. `model`: whose config can be had at
    `model_path`, or is written out. What cannot be traced keeps its estimate."""
    from drumline.tracing.trace import trace

    question, made, refused = answer.question, list[Candidate](), list(answer.refused)
    for number, candidate in enumerate(answer.ranked[:FEW]):
        on_progress("tracing activations of the best", number, min(FEW, len(answer.ranked)))
        config = candidate.layout.config.model_copy(update={"model": model})
        found = trace(config, model_path, candidate.layout, question.facts)
        if found is not None:
            candidate = replace(candidate, estimate=estimate(candidate.layout, question.facts, question.cluster, found))
        if candidate.estimate.verdict == "no":
            refused.append(Refused(candidate.name, why_not(candidate.estimate), candidate))
        else:
            made.append(candidate)
        on_progress("tracing activations of the best", number + 1, min(FEW, len(answer.ranked)))
    return replace(answer, ranked=tuple(in_order([*made, *answer.ranked[FEW:]])), refused=tuple(refused))

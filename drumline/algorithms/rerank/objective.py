"""Cross-encoders: the score of a query and a text that are read together.

P samples of a micro-batch, C candidates of each: the positive, and then the negatives. B = C · P rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.rerank.spec import RerankConfig

# A positive behind this rank counts as not found.
CUTOFF = 10


class Rerank(Algorithm):
    """Binary cross-entropy of each candidate, or cross-entropy over the candidates of a query.

    The former is the mean over a sample's candidates, the latter that of ListNet's top one (Cao et
    al. 2007). The metrics rank a row's candidates by their scores.
    """

    def __init__(self, spec: RerankConfig) -> None:
        self.spec = spec
        self.candidates = spec.rows_per_sample

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss summed over the samples, and sums over their ranks."""
        logits_B = outputs.class_logits()[:, 0].float()
        logits_PC = logits_B.view(self.candidates, -1).T
        present_PC = batch.present_B.view(self.candidates, -1).T
        if self.spec.loss == "pointwise":
            loss_P = pointwise_loss(logits_PC, present_PC)
        else:
            loss_P = listwise_loss(logits_PC, present_PC)
        loss_sum = (loss_P * batch.real_P).sum()
        sums = _rank_sums(logits_PC.detach(), present_PC, batch.real_P)
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss of a held-out sample, and the means of `step_metrics`."""
        return {"loss": sums["loss"] / max(1.0, sums["samples"]), **self.step_metrics(sums)}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over the samples of how their positives rank among their candidates."""
        samples = max(1.0, sums["samples"])
        return {
            "accuracy": sums["first"] / samples,
            f"mrr@{CUTOFF}": sums["reciprocal"] / samples,
            f"ndcg@{CUTOFF}": sums["discounted"] / samples,
        }


def pointwise_loss(logits_PC: torch.Tensor, present_PC: torch.Tensor) -> torch.Tensor:
    """Return the mean binary cross-entropy over each sample's candidates, fp32[P].

    `present_PC`: bool, whether a candidate is there; a filler has none, and a loss of 0.
    """
    targets_PC = torch.zeros_like(logits_PC)
    targets_PC[:, 0] = 1
    losses_PC = functional.binary_cross_entropy_with_logits(logits_PC, targets_PC, reduction="none")
    counts_P = present_PC.sum(1).clamp(min=1)
    return (losses_PC * present_PC).sum(1) / counts_P


def listwise_loss(logits_PC: torch.Tensor, present_PC: torch.Tensor) -> torch.Tensor:
    """Return −log of the positive's share in Σ exp(logit) over a sample's candidates, fp32[P].

    `present_PC`: bool, whether a candidate is there.
    """
    # The positive of a filler stays: with nothing to choose from the loss is 0.
    absent_PC = ~present_PC
    absent_PC[:, 0] = False
    scores_PC = logits_PC.masked_fill(absent_PC, -torch.inf)
    return -functional.log_softmax(scores_PC, 1)[:, 0]


def _rank_sums(
    logits_PC: torch.Tensor, present_PC: torch.Tensor, real_P: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the sums that `Rerank.step_metrics` reads.

    A negative with the score of the positive counts as before it, so that a model which scores all
    alike ranks nothing first.
    """
    is_before_PC = (logits_PC[:, 1:] >= logits_PC[:, :1]) & present_PC[:, 1:]
    rank_P = 1 + is_before_PC.sum(1).double()
    found_P = (rank_P <= CUTOFF) * real_P
    return {
        "samples": real_P.sum(),
        "first": ((rank_P == 1) * real_P).sum(),
        "reciprocal": (found_P / rank_P).sum(),
        "discounted": (found_P / torch.log2(rank_P + 1)).sum(),
    }

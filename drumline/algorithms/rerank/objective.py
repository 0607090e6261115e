"""Cross-encoders: a model reads a query and a text together, and scores how well the text answers.

P samples of a micro-batch, C candidates of each: the positive, and then the negatives. B = C · P rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.rerank.spec import RerankConfig

# A positive at a later rank counts as not found.
CUTOFF = 10


class Rerank(Algorithm):
    """Binary cross-entropy of each candidate, or cross-entropy over the candidates of a query.

    The first is a mean over a sample's candidates. The second is ListNet's loss with top-one
    probabilities (Cao et al. 2007). The metrics rank the candidates of a sample by their scores.
    """

    def __init__(self, spec: RerankConfig) -> None:
        self.spec = spec
        self.candidates = spec.rows_per_sample

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss summed over the samples, and sums over their ranks."""
        logits_BC = outputs.class_logits()
        logits_B = logits_BC.squeeze(1).float()
        logits_PC = self._group_by_sample(logits_B)
        present_PC = self._group_by_sample(batch.present_B)
        if self.spec.loss == "pointwise":
            loss_P = pointwise_loss(logits_PC, present_PC)
        else:
            loss_P = listwise_loss(logits_PC, present_PC)
        loss_of_real_P = loss_P * batch.real_P
        sums = rank_sums(logits_PC.detach(), present_PC)
        sums["samples"] = batch.real_P.sum()
        return LossOut(loss_of_real_P.sum(), sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss of a held-out sample, and the means of `step_metrics`."""
        samples = max(1.0, sums["samples"])
        return {"loss": sums["loss"] / samples, **self.step_metrics(sums)}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means of what the positives' ranks give, over the samples that have a negative."""
        ranked = max(1.0, sums["ranked"])
        return {
            "accuracy": sums["first"] / ranked,
            f"mrr@{CUTOFF}": sums["reciprocal"] / ranked,
            f"ndcg@{CUTOFF}": sums["discounted"] / ranked,
        }

    def _group_by_sample(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return values of rows [B] by sample, [P, C]."""
        values_CP = values_B.view(self.candidates, -1)
        return values_CP.T


def pointwise_loss(logits_PC: torch.Tensor, present_PC: torch.Tensor) -> torch.Tensor:
    """Return the mean binary cross-entropy over each sample's candidates, fp32[P].

    Fillers, which pad a batch to its number of samples, have no candidates and a loss of 0.

    `present_PC`: bool, whether a candidate is there.
    """
    targets_PC = torch.zeros_like(logits_PC)
    targets_PC[:, 0] = 1
    losses_PC = functional.binary_cross_entropy_with_logits(logits_PC, targets_PC, reduction="none")
    losses_of_present_PC = losses_PC * present_PC
    counts_P = present_PC.sum(1).clamp(min=1)
    return losses_of_present_PC.sum(1) / counts_P


def listwise_loss(logits_PC: torch.Tensor, present_PC: torch.Tensor) -> torch.Tensor:
    """Return −log of the positive's share in Σ exp(logit) over a sample's candidates, fp32[P].

    `present_PC`: bool, whether a candidate is there.
    """
    # The positive of a filler counts as present. As the only candidate it has a loss of 0, while a
    # softmax over no candidates would be NaN.
    absent_PC = ~present_PC
    absent_PC[:, 0] = False
    scores_PC = logits_PC.masked_fill(absent_PC, -torch.inf)
    log_shares_PC = functional.log_softmax(scores_PC, 1)
    return -log_shares_PC[:, 0]


def rank_sums(logits_PC: torch.Tensor, present_PC: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the sums over ranks that `Rerank.step_metrics` reads.

    A negative with the same score as the positive is ranked before it, so a model that scores all
    texts alike ranks no positive first. A sample without a negative does not count, because its
    positive would be first whatever its score is.

    `present_PC`: bool, whether a candidate is there.
    """
    negatives_PC = logits_PC[:, 1:]
    has_negative_PC = present_PC[:, 1:]
    is_before_PC = (negatives_PC >= logits_PC[:, :1]) & has_negative_PC
    rank_P = 1 + is_before_PC.sum(1).double()
    is_ranked_P = has_negative_PC.any(1)
    is_first_P = (rank_P == 1) & is_ranked_P
    is_found_P = (rank_P <= CUTOFF) & is_ranked_P
    reciprocal_P = is_found_P / rank_P
    discounted_P = is_found_P / torch.log2(rank_P + 1)
    return {
        "ranked": is_ranked_P.sum(),
        "first": is_first_P.sum(),
        "reciprocal": reciprocal_P.sum(),
        "discounted": discounted_P.sum(),
    }

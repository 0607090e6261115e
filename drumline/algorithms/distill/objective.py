"""Distillation (Hinton et al. 2015): a divergence from a teacher's distributions, token by token.

`models.divergence` has the formulas. They are not multiplied by the square of the temperature, as
Hinton et al. do. The losses are those of TRL 1.16's GKD (`generalized_jsd_loss`), which has the same β,
with β = 0 for `forward_kl` and β = 1 for `reverse_kl`, and divides by the number of tokens, too.
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.distill.spec import DistillConfig
from drumline.config.algorithm import TeachingSpec
from drumline.data.batches import IGNORE


def teacher_divergence(
    spec: TeachingSpec, outputs: Any, batch: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the divergence from the teacher summed over all targets, and the sums of KL and of tokens.

    Args:
        spec: The algorithm's settings of the teacher.
        outputs: The model's outputs.
        batch: A micro-batch with the teacher's distributions.
    """
    assert batch.teacher is not None, "the stream adds the teacher's numbers"
    loss_sum, kl_sum = outputs.divergence(
        batch.teacher,
        batch.targets_BT,
        spec.loss_chunk,
        spec.divergence,
        spec.beta,
        spec.temperature,
    )
    tokens = (batch.targets_BT != IGNORE).sum()
    return loss_sum, {"tokens": tokens, "kl": kl_sum.detach()}


class Distillation(Algorithm):
    """The divergence from the teacher plus the weighted cross-entropy, summed over learned tokens.

    The metric `kl` is KL(teacher ‖ model) at the temperature of the loss, in nats, whatever
    divergence is learned; with `top_k` it is over the likeliest tokens and all others as one.
    """

    def __init__(self, spec: DistillConfig) -> None:
        self.spec = spec

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the summed loss, and the sums of KL and, if it is learned, of cross-entropy."""
        loss_sum, sums = teacher_divergence(self.spec, outputs, batch)
        weight = self.spec.cross_entropy_weight
        if weight:
            cross_entropy = outputs.summed_loss(batch.targets_BT, self.spec.loss_chunk)
            loss_sum = loss_sum + weight * cross_entropy
            sums["cross_entropy"] = cross_entropy.detach()
        return LossOut(loss_sum, sums)

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the same loss; the sums also have the cross-entropy and the right first choices."""
        loss_sum, sums = teacher_divergence(self.spec, outputs, batch)
        cross_entropy, correct_BT = outputs.cross_entropy(batch.targets_BT, self.spec.loss_chunk)
        loss_sum = loss_sum + self.spec.cross_entropy_weight * cross_entropy
        sums["cross_entropy"] = cross_entropy
        sums["correct"] = correct_BT.sum()
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over the learned tokens of the held-out set."""
        tokens = max(1.0, sums["tokens"])
        return {
            "loss": sums["loss"] / tokens,
            "kl": sums["kl"] / tokens,
            "cross_entropy": sums["cross_entropy"] / tokens,
            "token_accuracy": sums["correct"] / tokens,
        }

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the means over learned tokens of KL and, if it is learned, of cross-entropy."""
        tokens = max(1.0, sums["tokens"])
        metrics = {"kl": sums["kl"] / tokens}
        if self.spec.cross_entropy_weight:
            metrics["cross_entropy"] = sums["cross_entropy"] / tokens
        return metrics

"""On-policy distillation (GKD, Agarwal et al. 2024, "On-Policy Distillation of Language Models").

The loss is the divergence between model and teacher (`models.divergence`) at each token of a completion.
Completions are treated as data: no gradient goes through their sampling.
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.distill.objective import teacher_divergence
from drumline.algorithms.gkd.spec import GKDConfig
from drumline.algorithms.policy import KLController, compare_with_sampler, sampler_metrics


class OnPolicyDistillation(Algorithm):
    """The divergence between model and teacher, summed over the tokens of completions.

    The metric `kl` is KL(teacher ‖ model) in nats, at the temperature of the loss. It is the same
    quantity for every value of the key `divergence`, so runs can be compared by it.
    """

    def __init__(self, spec: GKDConfig) -> None:
        self.spec = spec
        # Rollouts read this from every algorithm. 0: there is no penalty and no reference model.
        self.kl = KLController(0.0)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the divergence summed over tokens, the sum of KL and the number of tokens.

        If the spec says so, there are also sums of how far the model is from what sampled the completions.
        """
        loss_sum, sums = teacher_divergence(self.spec, outputs, batch)
        if self.spec.compares_with_sampler:
            temperature = self.spec.generator.temperature
            with torch.no_grad():
                log_probs_BT, _ = outputs.log_probs(
                    batch.targets_BT, self.spec.loss_chunk, temperature
                )
            sums |= compare_with_sampler(log_probs_BT, batch)
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss and KL of a token of held-out completions."""
        tokens = max(1.0, sums["tokens"])
        return {"loss": sums["loss"] / tokens, "kl": sums["kl"] / tokens}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean KL of a token of the step, and how far the model is from the sampler."""
        return {"kl": sums["kl"] / max(1.0, sums["tokens"]), **sampler_metrics(sums)}

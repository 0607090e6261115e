"""Online direct preference optimisation (Guo et al. 2024, "Direct Language Model Alignment from Online AI
Feedback").

The loss is that of DPO, SLiC or IPO (`pair_losses`) for pairs of completions that the policy has sampled.
Completions are treated as data: no gradient goes through their sampling. For IPO a score is the log-ratio
of the whole completion, as in the papers of IPO and online DPO and in TRL's online DPO; `dpo` divides it by
the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.online_dpo.spec import OnlineDPOConfig
from drumline.algorithms.pair_losses import cross_entropy, hinge, squared_distance
from drumline.algorithms.pairs import AnswerPairs, sides
from drumline.algorithms.policy import (
    KLController,
    compare_with_sampler,
    divergence,
    sampler_metrics,
    sum_where,
)


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(AnswerPairs):
    """The losses of pairs of episodes, summed over pairs.

    A batch is an `EpisodeBatch`, first the chosen episodes of all pairs and then the rejected ones.
    """

    spec: OnlineDPOConfig
    # `Rollouts` reads it from every algorithm. 0: no KL penalty is taken off the rewards.
    kl: KLController = field(default_factory=lambda: KLController(0.0), init=False)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss summed over pairs, and the sums of its metrics."""
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, self.chunk)
        # Scores are small differences of sums, hence fp64.
        log_probs_B = log_probs_BT.double().sum(1)
        reference_B = batch.reference_log_probs_BT.double().sum(1)
        score_B = log_probs_B - reference_B
        chosen_P, rejected_P = sides(score_B)
        loss_P = pair_loss(chosen_P - rejected_P, self.spec.loss, self.spec.beta)
        # A pair has weights at its tokens, and a filler has none.
        weight_P, _ = sides(batch.weights_BT.sum(1))
        is_pair_P = weight_P > 0
        out = self.sum_pairs(loss_P, log_probs_B, self.spec.beta * score_B, is_pair_P.float())
        is_learned_BT = batch.weights_BT > 0
        kl_BT = divergence(log_probs_BT.detach(), batch.reference_log_probs_BT, "k3")
        sums = {
            **out.sums,
            "kl": sum_where(is_learned_BT, kl_BT),
            "tokens": is_learned_BT.sum(),
        }
        if self.spec.compares_with_sampler:
            sums |= self._compare_with_sampler(log_probs_BT.detach(), outputs, batch)
        return LossOut(out.loss_sum, sums)

    def _compare_with_sampler(
        self, log_probs_BT: torch.Tensor, outputs: Any, batch: Any
    ) -> dict[str, torch.Tensor]:
        """Return sums of how far the policy is from what sampled the completions.

        `log_probs_BT`: the policy's, at temperature 1.
        """
        temperature = self.spec.generator.temperature
        if temperature != self.spec.loss_temperature:
            with torch.no_grad():
                log_probs_BT, _ = outputs.log_probs(batch.targets_BT, self.chunk, temperature)
        return compare_with_sampler(log_probs_BT, batch)

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the number of pairs that the step learned from, and means over them.

        The means are those of `AnswerPairs`, and `kl`, the divergence from the reference in nats per
        token of the pairs. There may also be those of `sampler_metrics`. Groups whose rewards are all
        equal, or not known, are no pairs.
        """
        kl = sums["kl"] / max(1.0, sums["tokens"])
        metrics = {"pairs": sums["pairs"], **super().step_metrics(sums), "kl": kl}
        return {**metrics, **sampler_metrics(sums)}


def pair_loss(difference_P: torch.Tensor, loss: str, beta: float) -> torch.Tensor:
    """Return the loss of each pair, fp64[P].

    With the difference d of the scores of the chosen and the rejected completion it is −log σ(βd)
    (sigmoid), max(0, 1 − βd) (hinge) or (d − 1 / 2β)² (ipo).

    Args:
        difference_P: fp64, d.
        loss: sigmoid, hinge or ipo.
        beta: β.
    """
    if loss == "ipo":
        return squared_distance(difference_P, beta)
    if loss == "hinge":
        return hinge(beta * difference_P)
    return cross_entropy(beta * difference_P, 0.0)


def build(spec: OnlineDPOConfig) -> OnlineDPO:
    """Return the objective of a spec."""
    return OnlineDPO(spec=spec, chunk=spec.loss_chunk)

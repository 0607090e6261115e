"""Direct preference optimisation (Rafailov et al. 2023) and its variants.

The loss is a weighted sum of `pair_losses.LOSSES`, where the formulas are. The SFT term is each
pair's own mean over the chosen answer's tokens. TRL's `sft` loss is one mean over all tokens of a
batch, which depends on how the batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.dpo.spec import DPOConfig
from drumline.algorithms.pair_losses import LOSSES, Pairs, match, transform
from drumline.algorithms.pairs import AnswerPairs, answer_tokens, sides


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerPairs):
    """The losses of DPO, summed over pairs.

    `batch.reference_B` holds the reference's log-probabilities: what `score` returns for it.
    """

    spec: DPOConfig

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the weighted losses, and the SFT term, of a batch of pairs."""
        assert batch.reference_B is not None, "the stream adds the reference's log-probabilities"
        spec = self.spec
        log_probs_B = self.score(outputs, batch)
        tokens_B = answer_tokens(batch)
        score_B = log_probs_B - batch.reference_B
        pairs = self._pairs(score_B, tokens_B, batch)
        weighted_losses = []
        for kind, weight in spec.weights.items():
            loss = LOSSES[kind]
            weighted_losses.append(weight * loss(pairs))
        loss_P = torch.stack(weighted_losses).sum(0)
        if spec.sft_weight:
            mean_chosen_P, _ = sides(log_probs_B / tokens_B)
            loss_P = loss_P - spec.sft_weight * mean_chosen_P
        return self.out(loss_P, log_probs_B, spec.beta * score_B, batch)

    def _pairs(self, score_B: torch.Tensor, tokens_B: torch.Tensor, batch: Any) -> Pairs:
        """Return what the losses read.

        `score_B`: log π − log π_ref of each answer. `tokens_B`: the number of tokens of each
        answer.
        """
        transformed_B = transform(score_B, self.spec.f_divergence, self.spec.f_alpha)
        chosen_P, rejected_P = sides(score_B)
        won_P, lost_P = sides(transformed_B)
        mean_won_P, mean_lost_P = sides(transformed_B / tokens_B)
        matched_P3 = None
        if batch.first is not None:
            # Ranks are those of the whole global batch, of which this batch has some places.
            matched_N3 = match(batch.first.numbers_NK)
            matched_P3 = matched_N3[batch.places_P]
        return Pairs(
            chosen_P=chosen_P,
            rejected_P=rejected_P,
            delta_P=won_P - lost_P,
            mean_delta_P=mean_won_P - mean_lost_P,
            beta=self.spec.beta,
            smoothing=self.spec.label_smoothing,
            tau=self.spec.discopop_tau,
            matched_P3=matched_P3,
        )


class SortingDPO(DPO):
    """DPO with losses that sort the pairs of the global batch.

    Ranks are those of a pass without gradients, and without dropout.
    """

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the numbers that `match` takes, fp64[P, 4]."""
        policy_B = self.score(outputs, batch)
        # In this order: chosen, rejected, the reference's chosen, the reference's rejected.
        log_probs_2B = torch.cat((policy_B, batch.reference_B))
        return log_probs_2B.view(4, -1).T


def build(spec: DPOConfig) -> DPO:
    """Return the objective of a spec."""
    if spec.extra_forwards:
        return SortingDPO(spec=spec, chunk=spec.loss_chunk)
    return DPO(spec=spec, chunk=spec.loss_chunk)

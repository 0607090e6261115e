"""Direct preference optimisation (Rafailov et al. 2023) and its variants.

The loss is a weighted sum of losses of `pair_losses`, which has the formulas. The SFT term is the mean
over the tokens of each chosen answer. TRL's `sft` loss is one mean over all tokens of a batch, which
depends on how the batch is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.dpo.spec import DPOConfig
from drumline.algorithms.pair_losses import LOSSES, PairScores, match, transform
from drumline.algorithms.pairs import AnswerPairs, answer_tokens, sides


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerPairs):
    """The losses of DPO, summed over pairs."""

    spec: DPOConfig

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the weighted sum of the losses and the SFT term of a batch of pairs."""
        assert batch.reference_B is not None, "the stream adds the reference's log-probabilities"
        spec = self.spec
        log_probs_B = self.score(outputs, batch)
        tokens_B = answer_tokens(batch)
        score_B = log_probs_B - batch.reference_B
        pairs = self._pair_scores(score_B, tokens_B, batch)
        weighted_losses = []
        for kind, weight in spec.weights.items():
            loss = LOSSES[kind]
            weighted_losses.append(weight * loss(pairs))
        loss_P = torch.stack(weighted_losses).sum(0)
        if spec.sft_weight:
            mean_chosen_P, _ = sides(log_probs_B / tokens_B)
            loss_P = loss_P - spec.sft_weight * mean_chosen_P
        return self.sum_pairs(loss_P, log_probs_B, spec.beta * score_B, batch.real_P)

    def _pair_scores(self, score_B: torch.Tensor, tokens_B: torch.Tensor, batch: Any) -> PairScores:
        """Return what the losses read.

        Args:
            score_B: fp64, log π − log π_ref of each answer.
            tokens_B: int64, the number of tokens of each answer.
            batch: The batch of pairs.
        """
        transformed_B = transform(score_B, self.spec.f_divergence, self.spec.f_alpha)
        chosen_P, rejected_P = sides(score_B)
        won_P, lost_P = sides(transformed_B)
        mean_won_P, mean_lost_P = sides(transformed_B / tokens_B)
        matched_P3 = None
        if batch.first is not None:
            # Pairs are ranked within the global batch; this micro-batch has some of its rows.
            matched_N3 = match(batch.first.numbers_NK)
            matched_P3 = matched_N3[batch.places_P]
        return PairScores(
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

    They sort by the numbers of the first pass, which has no gradients and no dropout.
    """

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the numbers that `match` takes, fp64[P, 4]."""
        policy_B = self.score(outputs, batch)
        # Columns: chosen, rejected, the reference's chosen, the reference's rejected.
        log_probs_2B = torch.cat((policy_B, batch.reference_B))
        return log_probs_2B.view(4, -1).T


def build(spec: DPOConfig) -> DPO:
    """Return the objective of a spec."""
    if spec.extra_forwards:
        return SortingDPO(spec=spec, chunk=spec.loss_chunk)
    return DPO(spec=spec, chunk=spec.loss_chunk)

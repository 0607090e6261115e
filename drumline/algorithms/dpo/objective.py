"""Direct preference optimisation (Rafailov et al. 2023) and its variants: weighted sums of `pair_losses.LOSSES`, where the formulas are.

The SFT term is each pair's own mean over the chosen answer's tokens; TRL's `sft` loss is one mean over all tokens of a batch, which depends
on how the batch is cut.
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
    """Losses are summed over pairs. `batch.reference_B` holds the reference's log-probabilities: what `score` gives for it."""

    spec: DPOConfig

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        assert batch.reference_B is not None, "the stream adds the reference's log-probabilities"
        log_probs_B, tokens_B = self.score(outputs, batch), answer_tokens(batch)
        score_B = log_probs_B - batch.reference_B
        moved_B = transform(score_B, self.spec.f_divergence, self.spec.f_alpha)
        (chosen_P, rejected_P), (won_P, lost_P), (mean_won_P, mean_lost_P) = map(
            sides, (score_B, moved_B, moved_B / tokens_B)
        )
        pairs = Pairs(
            chosen_P=chosen_P,
            rejected_P=rejected_P,
            delta_P=won_P - lost_P,
            mean_delta_P=mean_won_P - mean_lost_P,
            beta=self.spec.beta,
            smoothing=self.spec.label_smoothing,
            tau=self.spec.discopop_tau,
            matched_P3=None
            if batch.first is None
            else match(batch.first.numbers_NK)[batch.places_P],
        )
        loss_P = torch.stack(
            [weight * LOSSES[kind](pairs) for kind, weight in self.spec.weights.items()]
        ).sum(0)
        if self.spec.sft_weight:
            loss_P = loss_P - self.spec.sft_weight * sides(log_probs_B / tokens_B)[0]
        return self.out(loss_P, log_probs_B, self.spec.beta * score_B, batch)


class SortingDPO(DPO):
    """With losses that sort the pairs of the global batch. Ranks are those of a pass without gradients, and without dropout."""

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        """fp64[P, 4], see `match`."""
        return torch.cat((self.score(outputs, batch), batch.reference_B)).view(4, -1).T


def made(spec: DPOConfig) -> DPO:
    return (SortingDPO if spec.extra_forwards else DPO)(spec=spec, chunk=spec.loss_chunk)

"""Direct preference optimisation (Rafailov et al. 2023) and its kin: weighted sums of `losses.LOSSES`, where the formulas are.

The SFT term is each pair's own mean over the chosen answer's tokens; TRL's `sft` loss is one mean over all tokens of a batch, which hangs
on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.pair_losses import LOSSES, Pairs, match, transform
from drumline.algorithms.pairs import AnswerPairs, answer_tokens, sides


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerPairs):
    """Losses are summed over pairs. `loss`: kind → its weight. `batch.reference_B` holds the reference's log-probabilities: what `score`
    gives for it."""

    beta: float
    loss: Mapping[str, float]
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    discopop_tau: float = 0.05

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        assert batch.reference_B is not None, "the stream adds what the reference says"
        log_probs_B, tokens_B = self.score(outputs, batch), answer_tokens(batch)
        score_B = log_probs_B - batch.reference_B
        pairs = self._pairs(score_B, tokens_B, None if batch.first is None else match(batch.first.numbers_NK)[batch.places_P])
        loss_P = torch.stack([weight * LOSSES[kind](pairs) for kind, weight in self.loss.items()]).sum(0)
        if self.sft_weight:
            loss_P = loss_P - self.sft_weight * sides(log_probs_B / tokens_B)[0]
        return self.out(loss_P, log_probs_B, self.beta * score_B, batch)

    def _pairs(self, score_B: torch.Tensor, tokens_B: torch.Tensor, matched_P3: torch.Tensor | None) -> Pairs:
        moved_B = transform(score_B, self.f_divergence, self.f_alpha)
        (chosen_P, rejected_P), (won_P, lost_P), (mean_won_P, mean_lost_P) = map(sides, (score_B, moved_B, moved_B / tokens_B))
        return Pairs(
            chosen_P=chosen_P,
            rejected_P=rejected_P,
            delta_P=won_P - lost_P,
            mean_delta_P=mean_won_P - mean_lost_P,
            beta=self.beta,
            smoothing=self.label_smoothing,
            tau=self.discopop_tau,
            matched_P3=matched_P3,
        )


class SortingDPO(DPO):
    """With losses that sort the pairs of the global batch. Ranks are those of a pass without gradients, and without dropout."""

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        """fp64[P, 4], see `match`."""
        return torch.cat((self.score(outputs, batch), batch.reference_B)).view(4, -1).T

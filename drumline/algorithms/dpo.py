"""Direct preference optimisation (Rafailov et al. 2023), IPO (Azar et al. 2023) and SLiC's hinge (Zhao et al. 2023).

An answer's score s is log π(answer | prompt) − log π_ref(answer | prompt), summed over its tokens; Δ = s(chosen) − s(rejected).

    sigmoid  −(1 − ε) log σ(βΔ) − ε log σ(−βΔ)        ε: label_smoothing (conservative DPO, Mitchell 2023)
    hinge    max(0, 1 − βΔ)
    ipo      (Δ̄ − 1 / 2β)², Δ̄ of scores divided by their answers' tokens, as TRL has it and IPO's authors confirmed

The SFT term is each pair's own mean over the chosen answer's tokens; TRL's `sft` loss is one mean over all tokens of a batch, which hangs
on how the batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.pairs import means, pair_sums, sides
from drumline.data.batches import IGNORE


@dataclass(frozen=True)
class DPO(Algorithm):
    """Losses are summed over pairs. `batch.reference_B` holds the reference's log-probabilities: what `score` gives for it."""

    beta: float
    loss: Literal["sigmoid", "ipo", "hinge"]
    label_smoothing: float
    sft_weight: float
    chunk: int

    def score(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Log-probability of each row's answer, fp64[B]: a score is the small difference of two of these."""
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, self.chunk)
        return log_probs_BT.double().sum(1)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        assert batch.reference_B is not None, "the stream adds what the reference says"
        log_probs_B = self.score(outputs, batch)
        score_B = log_probs_B - batch.reference_B
        tokens_B = (batch.targets_BT != IGNORE).sum(1).clamp(min=1)
        loss_P = self._loss(score_B, tokens_B)
        chosen_P, rejected_P = sides(log_probs_B)
        if self.sft_weight:
            loss_P = loss_P - self.sft_weight * chosen_P / sides(tokens_B)[0]
        won_P, lost_P = sides(self.beta * score_B.detach())
        sums = pair_sums(
            batch.real_P,
            accuracy=(won_P > lost_P).float(),
            margin=won_P - lost_P,
            reward_chosen=won_P,
            reward_rejected=lost_P,
            log_prob_chosen=chosen_P,
            log_prob_rejected=rejected_P,
        )
        return LossOut((loss_P * batch.real_P).sum().float(), sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / max(1.0, sums["pairs"]), **self.figures(sums)}

    def figures(self, sums: dict[str, float]) -> dict[str, float]:
        """Means over pairs. Rewards are β × score, the margin their difference, as TRL has them."""
        return means(sums, "accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected")

    def _loss(self, score_B: torch.Tensor, tokens_B: torch.Tensor) -> torch.Tensor:
        beta, smoothing = self.beta, self.label_smoothing
        if self.loss == "ipo":
            chosen_P, rejected_P = sides(score_B / tokens_B)
            return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2
        chosen_P, rejected_P = sides(score_B)
        logit_P = beta * (chosen_P - rejected_P)
        if self.loss == "hinge":
            return functional.relu(1 - logit_P)
        return -(1 - smoothing) * functional.logsigmoid(logit_P) - smoothing * functional.logsigmoid(-logit_P)

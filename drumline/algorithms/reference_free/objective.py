"""Learning from pairs without a reference model.

ORPO is by Hong et al. 2024, SimPO by Meng et al. 2024.

p is the mean log-probability of an answer's tokens; w the chosen answer, l the rejected one.

    ORPO   −p_w − β log σ(log odds_w − log odds_l), log odds = p − log(1 − e^p)   equations 4 to 7;
                                                                                  β is the paper's λ
    SimPO  −log σ(β(p_w − p_l) − γ), with label smoothing ε as DPO has it         equation 6

The likelihood of the chosen answer is the mean over the tokens of each answer. TRL takes one mean over
all tokens of a batch, which depends on how the batch is divided. TRL's mean for ORPO also includes the
tokens of the prompt, as the authors' code does; ours does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from drumline.algorithms.base import LossOut
from drumline.algorithms.pair_losses import cross_entropy
from drumline.algorithms.pairs import AnswerPairs, answer_tokens, sides
from drumline.algorithms.reference_free.spec import ORPOConfig, SimPOConfig

# An answer that is certain has no finite odds.
LARGEST_LOG_PROB = -1e-12


def odds_ratio(chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> torch.Tensor:
    """Return −β log σ(log odds_w − log odds_l) of mean log-probabilities, fp64[P]."""
    difference_P = _log_odds(chosen_P) - _log_odds(rejected_P)
    return -beta * logsigmoid(difference_P)


def _log_odds(log_prob_P: torch.Tensor) -> torch.Tensor:
    """Return the log odds log(q / (1 − q)) of a probability q whose log is `log_prob_P`, fp64[P]."""
    bounded_P = log_prob_P.clamp(max=LARGEST_LOG_PROB)
    # 1 − e^x as −expm1(x), which keeps its digits for a probability near 1.
    remaining_P = -torch.expm1(bounded_P)
    return log_prob_P - torch.log(remaining_P)


@dataclass(frozen=True, kw_only=True)
class ReferenceFree(AnswerPairs):
    """Σ over pairs of loss(p_w, p_l) − sft_weight · p_w.

    In the metrics, the reward of an answer is `beta` · p and its log-probability is p, as in TRL.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    beta: float
    sft_weight: float

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss of a batch of pairs."""
        log_probs_B = self.score(outputs, batch)
        mean_B = log_probs_B / answer_tokens(batch)
        chosen_P, rejected_P = sides(mean_B)
        pair_loss_P = self.loss(chosen_P, rejected_P)
        loss_P = pair_loss_P - self.sft_weight * chosen_P
        return self.sum_pairs(loss_P, mean_B, self.beta * mean_B, batch.real_P)


def orpo(spec: ORPOConfig) -> ReferenceFree:
    """Return the objective of ORPO."""
    return ReferenceFree(
        loss=partial(odds_ratio, beta=spec.beta),
        beta=spec.beta,
        sft_weight=1.0,
        chunk=spec.loss_chunk,
    )


def simpo(spec: SimPOConfig) -> ReferenceFree:
    """Return the objective of SimPO."""

    def loss(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        logit_P = spec.beta * (chosen_P - rejected_P) - spec.gamma
        return cross_entropy(logit_P, spec.label_smoothing)

    return ReferenceFree(
        loss=loss, beta=spec.beta, sft_weight=spec.sft_weight, chunk=spec.loss_chunk
    )

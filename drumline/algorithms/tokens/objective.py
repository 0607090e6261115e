"""Next-token learning: `pretrain` (every token) and `sft` (the tokens that the data marks)."""

from __future__ import annotations

from typing import Any

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.specs import TextSpec
from drumline.data.batches import IGNORE


class NextToken(Algorithm):
    """Cross-entropy summed over the targets that carry loss.

    Divided by the number of these targets it is the mean negative log-likelihood.

    The metric `exact_match` is the share of sequences (documents inside packs) whose every learned token
    is the model's first choice, so that greedy decoding from the prompt would give exactly this answer.
    """

    def __init__(self, chunk: int, has_answers: bool) -> None:
        """Store the settings.

        Args:
            chunk: Number of tokens whose logits exist at the same time; 0: all.
            has_answers: Whether `exact_match` is measured, which pretraining has no answers for.
        """
        self.chunk = chunk
        self.has_answers = has_answers

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the summed loss. First choices are left out, since they would cost time."""
        loss_sum = outputs.summed_loss(batch.targets_BT, self.chunk)
        return LossOut(loss_sum)

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the summed loss and the numbers of tokens and of correct first choices.

        With `has_answers` also the numbers of sequences and of exact ones.
        """
        loss_sum, correct_BT = outputs.cross_entropy(batch.targets_BT, self.chunk)
        targets_N = batch.targets_BT.reshape(-1)
        learned_N = targets_N != IGNORE
        correct_N = correct_BT.reshape(-1)
        sums = {"tokens": learned_N.sum(), "correct": correct_N.sum()}
        if self.has_answers:
            sums |= _sequence_sums(batch.position_ids_BT, learned_N, correct_N)
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over learned tokens, and with `has_answers` the share of exact sequences."""
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "loss": sums["loss"] / tokens,
            "token_accuracy": sums["correct"] / tokens,
        }
        if self.has_answers:
            sequences = max(1.0, sums["sequences"])
            metrics["exact_match"] = sums["exact"] / sequences
        return metrics


def _sequence_sums(
    position_ids_BT: torch.Tensor, learned_N: torch.Tensor, correct_N: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the number of sequences with learned tokens, and of exact ones, with all of these correct.

    A sequence starts at each token whose position is 0.

    Args:
        position_ids_BT: int64, the position of each token in its sequence.
        learned_N: bool, whether each token carries loss.
        correct_N: bool, whether each token is the model's first choice.
    """
    starts_sequence_N = (position_ids_BT == 0).reshape(-1)
    # The index of each token's sequence, from 0 on.
    sequence_N = starts_sequence_N.cumsum(0) - 1
    sequences = int(sequence_N[-1]) + 1
    wrong_N = learned_N & ~correct_N
    learned_S = torch.zeros(sequences, dtype=torch.long, device=learned_N.device)
    learned_S.index_add_(0, sequence_N, learned_N.long())
    wrong_S = torch.zeros_like(learned_S)
    wrong_S.index_add_(0, sequence_N, wrong_N.long())
    # A sequence of padding, or one of which nothing is learned, does not count.
    has_learned_S = learned_S > 0
    is_exact_S = has_learned_S & (wrong_S == 0)
    return {"sequences": has_learned_S.sum(), "exact": is_exact_S.sum()}


def build(spec: TextSpec) -> NextToken:
    """Return the objective of a spec."""
    return NextToken(spec.loss_chunk, spec.has_answers)

"""Next-token learning: `pretrain` (every token) and `sft` (the tokens that the data marks)."""

from __future__ import annotations

from typing import Any

import torch

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.specs import TextSpec
from drumline.data.batches import IGNORE


class NextToken(Algorithm):
    """Cross-entropy summed over the targets that carry loss; divided by their count it is the mean negative log-likelihood.

    `exact` counts the sequences (documents inside packs) whose every learned token is the model's first choice: greedy decoding
    from the prompt would give just this answer. Pretraining has no answers and leaves it out.
    """

    def __init__(self, chunk: int, answers: bool) -> None:
        self.chunk = chunk
        self.answers = answers

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        return LossOut(outputs.summed_loss(batch.targets_BT, self.chunk))

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        loss_sum, correct_BT = outputs.cross_entropy(batch.targets_BT, self.chunk)
        targets_N, correct_N = batch.targets_BT.reshape(-1), correct_BT.reshape(-1)
        sums = {"tokens": (targets_N != IGNORE).sum(), "correct": correct_N.sum()}
        if self.answers:
            # Sequences with targets, and those of them with no wrong one. A sequence starts wherever positions start again at 0.
            sequence_N = (batch.position_ids_BT == 0).reshape(-1).cumsum(0) - 1
            learned_N = targets_N != IGNORE
            learned_S = torch.zeros(
                int(sequence_N[-1]) + 1, dtype=torch.long, device=targets_N.device
            )
            learned_S.index_add_(0, sequence_N, learned_N.long())
            wrong_S = torch.zeros_like(learned_S).index_add_(
                0, sequence_N, (learned_N & ~correct_N).long()
            )
            has_targets_S = learned_S > 0
            sums |= {
                "sequences": has_targets_S.sum(),
                "exact": (has_targets_S & (wrong_S == 0)).sum(),
            }
        return LossOut(loss_sum, sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        tokens = max(1.0, sums["tokens"])
        metrics = {"loss": sums["loss"] / tokens, "token_accuracy": sums["correct"] / tokens}
        if self.answers:
            metrics["exact_match"] = sums["exact"] / max(1.0, sums["sequences"])
        return metrics


def made(spec: TextSpec) -> NextToken:
    return NextToken(spec.loss_chunk, spec.has_answers)

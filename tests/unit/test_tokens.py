"""The next-token objective's held-out figures."""

from __future__ import annotations

import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.data.batches import TokenBatch
from drumline.models.head import Outputs

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_exact_match_counts_whole_answers() -> None:
    # Two rows. Row 0: documents [0..2] and [3..4]; row 1: one document, and a tail that carries no loss.
    targets = torch.tensor([[-100, 1, 2, 3, -100], [4, -100, 1, -100, -100]])
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    logits = torch.nn.functional.one_hot(targets.clamp_min(0), 5).float() * 9
    # The second learned token of the first document is wrong.
    logits[0, 2] = torch.tensor([9.0, 0, 0, 0, 0])
    batch = TokenBatch(torch.zeros_like(targets), targets, positions, 5)
    algorithm = NextToken(0, answers=True)
    out = algorithm.eval_objective(Outputs(logits_BTV=logits), batch)
    sums = {name: float(value) for name, value in out.sums.items()} | {"loss": float(out.loss_sum)}
    assert (sums["tokens"], sums["correct"], sums["sequences"], sums["exact"]) == (5, 4, 3, 2)
    figures = algorithm.metrics(sums)
    assert figures["token_accuracy"] == 0.8 and figures["exact_match"] == 2 / 3
    assert "exact_match" not in NextToken(0, answers=False).metrics(sums)

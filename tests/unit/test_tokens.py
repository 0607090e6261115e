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
    """Row 0 has the documents [0..2] and [3..4]. Row 1 has one, and a tail without loss."""
    targets = torch.tensor(
        [
            [-100, 1, 2, 3, -100],
            [4, -100, 1, -100, -100],
        ]
    )
    positions = torch.tensor(
        [
            [0, 1, 2, 0, 1],
            [0, 1, 2, 3, 4],
        ]
    )
    predicted = targets.clamp_min(0)
    # The second learned token of the first document is wrong.
    predicted[0, 2] = 0
    logits = torch.nn.functional.one_hot(predicted, 5).float() * 9
    batch = TokenBatch(torch.zeros_like(targets), targets, positions, 5)

    algorithm = NextToken(0, has_answers=True)
    out = algorithm.eval_objective(Outputs(logits_BTV=logits), batch)

    sums = {name: float(value) for name, value in out.sums.items()}
    expected = {
        "tokens": 5,
        "correct": 4,
        "sequences": 3,
        "exact": 2,
    }
    assert expected.items() <= sums.items()

    sums["loss"] = float(out.loss_sum)
    figures = algorithm.metrics(sums)
    assert figures["token_accuracy"] == 0.8
    assert figures["exact_match"] == 2 / 3

    tokens_alone = NextToken(0, has_answers=False)
    assert "exact_match" not in tokens_alone.metrics(sums)

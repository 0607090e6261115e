"""The plug-in NPO: loss and gradient by hand, whatever the cut, and its size."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.data.judged import judged_batch
from tests.npo import PLUGIN, NPOConfig

LOG_PROBS = [-2.0, -3.0, -1.0]  # of answers under the policy
REFERENCE = [-1.5, -4.0, -1.0]
LABELS = [False, False, True]
BETA, KEEP = 0.5, 0.25
TOKENS = 2


def batch(picks: list[int]) -> Any:
    """Answers of two tokens behind a prompt of one; -1: a filler."""
    tokens = torch.ones(TOKENS + 1, dtype=torch.int64).numpy()
    learn = torch.tensor([0] + [1] * TOKENS, dtype=torch.uint8).numpy()
    rows = [(tokens, learn) if pick >= 0 else None for pick in picks]
    labels = [LABELS[pick] if pick >= 0 else None for pick in picks]
    reference_B = torch.tensor(
        [REFERENCE[pick] if pick >= 0 else 0.0 for pick in picks], dtype=torch.float64
    )
    return replace(judged_batch(rows, labels, picks, 0, None), reference_B=reference_B)


def outputs(log_probs_B: torch.Tensor) -> Any:
    """A model's outputs whose answers have these log-probabilities, all of it at the first token."""
    return SimpleNamespace(log_probs=lambda targets, chunk: (log_probs_B[:, None], None))


@pytest.mark.parametrize("cuts", [[[0, 1, 2]], [[2, -1], [1, 0]]], ids=["whole", "cut"])
def test_loss_and_gradient_by_hand(cuts: list[list[int]]) -> None:
    algorithm = NPOConfig(beta=BETA, keep_weight=KEEP).build()
    policy = torch.tensor(LOG_PROBS, dtype=torch.float64, requires_grad=True)
    sums: dict[str, float] = {}
    for picks in cuts:
        own = torch.stack([policy[pick] if pick >= 0 else policy.new_zeros(()) for pick in picks])
        out = algorithm.objective(outputs(own), batch(picks))
        out.loss_sum.backward()
        for name, value in {"loss": out.loss_sum.detach(), **out.sums}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    ratios = [
        math.exp(BETA * (mine - theirs))
        for mine, theirs in zip(LOG_PROBS[:2], REFERENCE[:2], strict=True)
    ]
    # −(2 / β) log σ(−βs) = (2 / β) log(1 + (π / π_ref)^β), equation 3; its gradient is 2 r / (1 + r), equation 4.
    loss = sum(2 / BETA * math.log(1 + ratio) for ratio in ratios) + KEEP * 1.0 / TOKENS
    assert algorithm.metrics(sums) == pytest.approx(
        {"loss": loss / 3, "forgotten": (0.5 - 1.0) / 2, "kept": 0.0}, rel=1e-6
    )
    gradients = [*(2 * ratio / (1 + ratio) for ratio in ratios), -KEEP / TOKENS]
    assert policy.grad.tolist() == pytest.approx(gradients, rel=1e-6)


def test_the_plugin_is_small() -> None:
    files = [path for path in PLUGIN.rglob("*") if path.suffix in (".py", ".toml")]
    assert (
        len(files) <= 3
        and sum(len(path.read_text().splitlines()) for path in files if path.suffix == ".py") <= 150
    )

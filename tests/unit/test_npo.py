"""The plug-in NPO: loss and gradient by hand, whatever the cut, and its size."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.data.judged import judged_batch
from tests.npo import PLUGIN, NPOConfig

BETA = 0.5
KEEP = 0.25
TOKENS = 2
# Answers of two tokens behind a prompt of one. The last is a filler, so -1 picks it.
ROW = (np.ones(TOKENS + 1, np.int64), np.array([0, 1, 1], np.uint8))
ROWS = [ROW, ROW, ROW, None]
LABELS = [False, False, True, None]
LOG_PROBS = np.array([-2.0, -3.0, -1.0, 0.0])  # under the policy
REFERENCE = np.array([-1.5, -4.0, -1.0, 0.0])


def batch(picks: list[int]) -> Any:
    judged = judged_batch(
        [ROWS[pick] for pick in picks],
        [LABELS[pick] for pick in picks],
        picks,
        pad_id=0,
        width=None,
    )
    reference_B = torch.from_numpy(REFERENCE[picks])
    return replace(judged, reference_B=reference_B)


def outputs(log_probs_B: torch.Tensor) -> Any:
    """Return a model's outputs whose answers have these log-probs, all of it at the first token."""
    log_probs_BT = log_probs_B[:, None]
    return SimpleNamespace(log_probs=lambda targets, chunk: (log_probs_BT, None))


@pytest.mark.parametrize("cuts", [[[0, 1, 2]], [[2, -1], [1, 0]]], ids=["whole", "cut"])
def test_loss_and_gradient_by_hand(cuts: list[list[int]]) -> None:
    """Equations 3 and 4 of the paper.

    With r = (π / π_ref)^β the loss −(2 / β) log σ(−βs) is (2 / β) log(1 + r), and its gradient is
    2 r / (1 + r).
    """
    algorithm = NPOConfig(beta=BETA, keep_weight=KEEP).build()
    policy = torch.tensor(LOG_PROBS, requires_grad=True)
    sums: dict[str, float] = defaultdict(float)
    for picks in cuts:
        out = algorithm.objective(outputs(policy[picks]), batch(picks))
        out.loss_sum.backward()

        told = {"loss": out.loss_sum.detach(), **out.sums}
        for name, value in told.items():
            sums[name] += float(value)

    ratios = np.exp(BETA * (LOG_PROBS - REFERENCE))[:2]
    forget_loss = 2 / BETA * np.log(1 + ratios).sum()
    keep_loss = KEEP * 1.0 / TOKENS
    expected = {
        "loss": (forget_loss + keep_loss) / 3,
        "forgotten": (0.5 - 1.0) / 2,
        "kept": 0.0,
    }
    figures = algorithm.metrics(dict(sums))
    assert figures == pytest.approx(expected, rel=1e-6)

    forget_gradients = 2 * ratios / (1 + ratios)
    gradients = [*forget_gradients, -KEEP / TOKENS, 0.0]
    assert policy.grad.tolist() == pytest.approx(gradients, rel=1e-6)


def test_the_plugin_is_small() -> None:
    modules = list(PLUGIN.rglob("*.py"))
    settings = list(PLUGIN.rglob("*.toml"))
    assert len(modules + settings) <= 3

    lines = 0
    for path in modules:
        lines += len(path.read_text().splitlines())

    assert lines <= 150

"""GRPO and its kin: losses and gradients of a fixed batch equal TRL's, however the batch is cut; advantages equal their formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.credit import group_advantages, have_different_rewards, whiten
from drumline.algorithms.grpo.objective import GRPO
from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.policy import KLController, clipped, divergence
from drumline.data.batches import Episodes, collate_episodes
from drumline.models.head import Outputs

TRL: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "grpo_trl.json").read_text()
)
PROMPTS = [3, 1, 2, 4, 1, 2]  # tokens before each completion
LENGTHS = TRL["lengths"]


def stored(name: str) -> torch.Tensor:
    return torch.tensor(TRL[name])


def episodes(normalize: Any) -> Episodes:
    """TRL's batch as a rollout, behind prompts of uneven length."""
    completions = [
        np.asarray(row[:size]) for row, size in zip(TRL["completions_BM"], LENGTHS, strict=True)
    ]
    rollout = Episodes.start([np.zeros(size, np.int64) for size in PROMPTS], completions)
    mask_NM = rollout.mask_NM
    for name in ("old_log_probs", "sampler_log_probs", "reference_log_probs"):
        field = "log_probs_NM" if name == "old_log_probs" else f"{name}_NM"
        object.__setattr__(rollout, field, stored(f"{name}_BM") * mask_NM)
    object.__setattr__(rollout, "advantages_NM", stored("advantages_B")[:, None] * mask_NM)
    return rollout.weighted(
        normalize, TRL["max_completion"], torch.ones(len(rollout), dtype=torch.bool)
    )


def made(beta: float = 0.0, **named: Any) -> GRPO:
    """As after a step was taken since the rollout, unless `named` says otherwise."""
    return GRPOConfig.model_validate(
        {"kind": "grpo", "kl": {"coefficient": beta}, "minibatches": 2, **named}
    ).build()


def loss_and_gradient(
    algorithm: GRPO, rollout: Episodes, cuts: list[list[int]]
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Σ loss / Σ weight over micro-batches of these episodes, its gradient by the completions' logits, and the figures."""
    logits_NMV = stored("logits_BMV")
    leaf = logits_NMV.clone().requires_grad_()
    batches = [collate_episodes(rollout, picks, pad_id=0, width=None) for picks in cuts]
    denominator = sum(batch.weight for batch in batches)
    total, sums = torch.zeros(()), {}
    for picks, batch in zip(cuts, batches, strict=True):
        # Columns that nobody should look at hold something that would show.
        logits_BTV = torch.full(
            (*batch.input_ids_BT.shape, logits_NMV.shape[-1]), 7.0
        ) * torch.randn(logits_NMV.shape[-1])
        rows = []
        for row, pick in enumerate(picks):
            start = PROMPTS[pick] - 1
            after = logits_BTV[row, start + LENGTHS[pick] :] if pick >= 0 else logits_BTV[row, 0:]
            rows.append(
                torch.cat((logits_BTV[row, :start], leaf[pick, : LENGTHS[pick]], after))
                if pick >= 0
                else after
            )
        out = algorithm.objective(Outputs(logits_BTV=torch.stack(rows)), batch)
        total = total + out.loss_sum / denominator
        for key, value in out.sums.items():
            sums[key] = (
                max(sums.get(key, 0.0), float(value))
                if key.startswith("max_")
                else sums.get(key, 0.0) + float(value)
            )
    total.backward()
    return total.item(), leaf.grad, algorithm.step_metrics(sums)


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("name", TRL["cases"])
@pytest.mark.parametrize(
    "cuts", [[[0, 1, 2, 3, 4, 5]], [[5, 2, -1], [4, 3, 1], [0, -1, -1]]], ids=["whole", "cut"]
)
def test_losses_and_gradients_equal_trl(name: str, cuts: list[list[int]]) -> None:
    case = TRL["cases"][name]
    named = {
        key: case[key]
        for key in ("clip_high", "importance", "surrogate", "ratio", "delta", "entropy_weight")
        if key in case
    }
    algorithm = made(case["beta"], importance_cap=TRL["cap"], **named)
    loss, gradient_NMV, figures = loss_and_gradient(algorithm, episodes(case["normalize"]), cuts)
    assert abs(loss - case["loss"]) < 1e-5
    torch.testing.assert_close(
        gradient_NMV, torch.tensor(case["gradient_BMV"]), atol=1e-5, rtol=1e-5
    )
    assert 0 < figures["clip_fraction"] < 1 and figures["ratio_max"] > 1.2
    assert ("kl" in figures) == bool(case["beta"]) and ("importance_mean" in figures) == (
        case["importance"] != "none"
    )


def test_figures_do_not_hang_on_the_cut() -> None:
    algorithm, rollout = made(0.1), episodes("token")
    whole = loss_and_gradient(algorithm, rollout, [[0, 1, 2, 3, 4, 5]])[2]
    assert loss_and_gradient(algorithm, rollout, [[0, 3], [1, 2, -1], [4, 5]])[2] == pytest.approx(
        whole, rel=1e-5
    )


def test_on_policy_is_a_ratio_of_one() -> None:
    """With no step since the rollout the loss is −mean advantage, and its gradient that of A · log π."""
    rollout = episodes("token")
    loss, gradient_NMV, figures = loss_and_gradient(
        made(minibatches=1), rollout, [[0, 1, 2, 3, 4, 5]]
    )
    mask_NM = rollout.mask_NM
    assert loss == pytest.approx(float(-rollout.advantages_NM.sum() / mask_NM.sum()), abs=1e-6)
    assert figures["ratio_mean"] == figures["ratio_max"] == 1.0 and figures["clip_fraction"] == 0.0
    leaf = stored("logits_BMV").requires_grad_()
    logs_NM = leaf.log_softmax(-1).gather(-1, stored("completions_BM")[..., None]).squeeze(-1)
    (-(rollout.advantages_NM * logs_NM).sum() / mask_NM.sum()).backward()
    torch.testing.assert_close(gradient_NMV, leaf.grad)


def test_an_episode_that_does_not_count_changes_nothing() -> None:
    """One whose reward failed, and one without a token."""
    rollout = episodes("sequence")
    counts_N = torch.tensor([True, True, False, True, True, True])
    without = rollout.weighted("sequence", 8, counts_N)
    loss, gradient_NMV, _ = loss_and_gradient(made(), without, [[0, 1, 2, 3, 4, 5]])
    expected, _, _ = loss_and_gradient(made(), rollout, [[0, 1, 3], [4, 5]])
    assert loss == pytest.approx(expected, abs=1e-6) and not gradient_NMV[2].any()
    empty = Episodes.start([np.zeros(2, np.int64)], [np.zeros(0, np.int64)]).weighted(
        "sequence", 8, torch.ones(1, dtype=torch.bool)
    )
    batch = collate_episodes(empty, [0], pad_id=0, width=None)
    assert batch.weight == 1.0 and not (batch.targets_BT != -100).any()
    out = made().objective(Outputs(logits_BTV=torch.randn(1, 2, 7, requires_grad=True)), batch)
    assert out.loss_sum == 0 and all(torch.isfinite(value) for value in out.sums.values())


def test_group_advantages() -> None:
    rewards_PG = torch.tensor(
        [[0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [1.0, float("nan"), 3.0, float("nan")]],
        dtype=torch.float64,
    )
    none, group, batch = (
        group_advantages(rewards_PG, scale) for scale in ("none", "group", "batch")
    )
    centred = torch.tensor(
        [[-0.5, 0.5, 0.5, -0.5], [0, 0, 0, 0], [-1, 0, 1, 0]], dtype=torch.float64
    )
    torch.testing.assert_close(none, centred)
    deviations = torch.tensor(
        [[np.std([0, 1, 1, 0], ddof=1)], [0.0], [np.std([1, 3], ddof=1)]], dtype=torch.float64
    )
    torch.testing.assert_close(group, centred / (deviations + 1e-4))
    torch.testing.assert_close(
        batch, centred / (np.std([0, 1, 1, 0, 2, 2, 2, 2, 1, 3], ddof=1) + 1e-4)
    )
    assert have_different_rewards(rewards_PG).tolist() == [True, False, True]
    assert not have_different_rewards(torch.tensor([[float("nan"), 1.0]])).item()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_are_all_alike_have_no_advantages(scale: Any, dtype: torch.dtype) -> None:
    """To the last bit: the mean of large numbers is rounded, and what is left of it was divided by a deviation as small."""
    for reward in (12345.678, -1e30, 0.1, 1 / 3):
        rewards_PG = torch.full((2, 7), reward, dtype=dtype)
        rewards_PG[1, 2:4] = float("nan")
        assert group_advantages(rewards_PG, scale).count_nonzero() == 0, reward
        assert whiten(rewards_PG, ~rewards_PG.isnan()).count_nonzero() == 0, reward
    assert (
        group_advantages(torch.full((1, 3), float("nan"), dtype=dtype), scale).count_nonzero() == 0
    )


def test_leave_one_out() -> None:
    """Less the mean of the others; what could not be had is nobody's other."""
    rewards_PG = torch.tensor(
        [[0.0, 1.0, 1.0, 0.5], [2.0, 2.0, 2.0, 2.0], [1.0, float("nan"), 3.0, 0.25]],
        dtype=torch.float64,
    )
    expected = torch.zeros_like(rewards_PG)
    for group, row in enumerate(rewards_PG.tolist()):
        known = [reward for reward in row if reward == reward]
        for place, reward in enumerate(row):
            if reward == reward:
                expected[group, place] = reward - (sum(known) - reward) / (len(known) - 1)
    torch.testing.assert_close(group_advantages(rewards_PG, "none", "rloo"), expected)
    deviation = expected[~rewards_PG.isnan()].std()
    torch.testing.assert_close(
        group_advantages(rewards_PG, "batch", "rloo"), expected / (deviation + 1e-4)
    )


def test_divergence_estimators() -> None:
    """On average over samples k1 and k3 are the KL; each equals its formula."""
    draw = torch.Generator().manual_seed(0)
    policy, reference = (
        torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    kl = float((policy.exp() * (policy - reference)).sum())
    expected = {
        name: float((policy.exp() * divergence(policy, reference, name)).sum())
        for name in ("k1", "k3")
    }
    assert expected == pytest.approx({"k1": kl, "k3": kl})
    torch.testing.assert_close(divergence(policy, reference, "k2"), (policy - reference) ** 2 / 2)
    assert (divergence(policy, reference, "k3") >= 0).all()


@pytest.mark.parametrize("delta", [None, 4.0, 1e39])
def test_a_ratio_beyond_fp32_has_a_loss_and_a_gradient(delta: float | None) -> None:
    """It overflowed, and inf · 0 made NaN of the clip's gradient, or of an advantage of 0."""
    logs_BT = torch.tensor([[100.0, 100.0, 100.0, 0.1]]).requires_grad_()
    advantages_BT = torch.tensor([[1.0, 0.0, -1.0, 1.0]])
    loss_BT, cut_BT = clipped(logs_BT, advantages_BT, 0.2, 0.2, delta)
    loss_BT.sum().backward()
    highest = math.exp(80) if delta != 4.0 else 4.0
    torch.testing.assert_close(
        loss_BT.detach(), torch.tensor([[-1.2, 0.0, highest, -math.exp(0.1)]])
    )
    torch.testing.assert_close(logs_BT.grad, torch.tensor([[0.0, 0.0, 0.0, -math.exp(0.1)]]))
    assert cut_BT.tolist() == [[True, False, True, False]]
    leaf = torch.tensor([-200.0, 0.5]).requires_grad_()
    divergence(leaf, torch.zeros(2), "k3").sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_adaptive_kl_steers_to_its_target() -> None:
    controller = KLController(0.1, target=0.05, horizon=1000)
    controller.update(kl=0.055, episodes=100)  # 10% above: e = 0.1
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    controller.update(kl=5.0, episodes=100)  # far above: e is held at 0.2
    assert controller.coefficient == pytest.approx(0.1 * 1.01 * (1 + 0.2 * 0.1))
    fixed = KLController(0.1)
    fixed.update(kl=5.0, episodes=100)
    assert fixed.coefficient == 0.1

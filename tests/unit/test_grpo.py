"""GRPO and its kin: losses and gradients of a fixed batch equal TRL's, however the batch is cut; advantages equal their formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from drumline.algorithms.credit import group_advantages, have_different_rewards, whiten
from drumline.algorithms.grpo.objective import GRPO
from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.policy import KLController, divergence, ppo_clip_loss
from drumline.data.batches import Episodes, collate_episodes
from drumline.models.head import Outputs
from drumline.rl.rollouts import _sampler_metrics

REFERENCE = Path(__file__).parents[1] / "reference" / "grpo_trl.json"
TRL: dict[str, Any] = json.loads(REFERENCE.read_text())
PROMPTS = [3, 1, 2, 4, 1, 2]  # tokens before each completion
LENGTHS = TRL["lengths"]
WHOLE = [[0, 1, 2, 3, 4, 5]]
NAN = float("nan")


def stored(name: str) -> torch.Tensor:
    return torch.tensor(TRL[name])


def doubles(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def episodes(normalize: Any) -> Episodes:
    """TRL's batch as a rollout, behind prompts of uneven length."""
    prompts = [np.zeros(size, np.int64) for size in PROMPTS]
    completions = []
    for row, size in zip(TRL["completions_BM"], LENGTHS, strict=True):
        completions.append(np.asarray(row[:size]))

    rollout = Episodes.start(prompts, completions)
    values = {
        "log_probs_NM": stored("old_log_probs_BM"),
        "sampler_log_probs_NM": stored("sampler_log_probs_BM"),
        "reference_log_probs_NM": stored("reference_log_probs_BM"),
        "advantages_NM": stored("advantages_B")[:, None],
    }
    for field, value in values.items():
        object.__setattr__(rollout, field, value * rollout.mask_NM)

    is_trained_N = torch.ones(len(rollout), dtype=torch.bool)
    return rollout.add_loss_weights(normalize, TRL["max_completion"], is_trained_N)


def made(beta: float = 0.0, **named: Any) -> GRPO:
    """As after a step was taken since the rollout, unless `named` says otherwise."""
    options = {
        "kind": "grpo",
        "kl": {"coefficient": beta},
        "minibatches": 2,
        **named,
    }
    return GRPOConfig.model_validate(options).build()


class Result(NamedTuple):
    loss: float
    gradient_NMV: torch.Tensor
    figures: dict[str, float]


def with_completion(
    row_TV: torch.Tensor,
    leaf_NMV: torch.Tensor,
    pick: int,
) -> torch.Tensor:
    """Return a row of logits with those of its completion in place; a filler's is left as it is."""
    if pick < 0:
        return row_TV

    size = LENGTHS[pick]
    start = PROMPTS[pick] - 1
    after = row_TV[start + size :]
    return torch.cat((row_TV[:start], leaf_NMV[pick, :size], after))


def loss_and_gradient(
    algorithm: GRPO,
    rollout: Episodes,
    cuts: list[list[int]],
) -> Result:
    """Σ loss / Σ weight over micro-batches of these episodes, its gradient by the completions' logits, and the figures."""
    leaf_NMV = stored("logits_BMV").requires_grad_()
    vocabulary = leaf_NMV.shape[-1]
    batches = [
        collate_episodes(
            rollout,
            picks,
            pad_id=0,
            width=None,
        )
        for picks in cuts
    ]
    denominator = sum(batch.weight for batch in batches)
    total = torch.zeros(())
    sums: dict[str, float] = {}
    for picks, batch in zip(cuts, batches, strict=True):
        # Columns that nobody should look at hold something that would show.
        shape = (*batch.input_ids_BT.shape, vocabulary)
        logits_BTV = torch.full(shape, 7.0) * torch.randn(vocabulary)
        rows = []
        for row_TV, pick in zip(logits_BTV, picks, strict=True):
            rows.append(with_completion(row_TV, leaf_NMV, pick))
        outputs = Outputs(logits_BTV=torch.stack(rows))
        out = algorithm.objective(outputs, batch)
        total = total + out.loss_sum / denominator
        for key, value in out.sums.items():
            before = sums.get(key, 0.0)
            if key.startswith("max_"):
                sums[key] = max(before, float(value))
            else:
                sums[key] = before + float(value)

    total.backward()
    return Result(total.item(), leaf_NMV.grad, algorithm.step_metrics(sums))


CUT = [
    [5, 2, -1],
    [4, 3, 1],
    [0, -1, -1],
]
OPTIONS = {
    "clip_high",
    "importance",
    "importance_bound",
    "surrogate",
    "ratio",
    "delta",
    "entropy_weight",
}


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("name", TRL["cases"])
@pytest.mark.parametrize("cuts", [WHOLE, CUT], ids=["whole", "cut"])
def test_losses_and_gradients_equal_trl(name: str, cuts: list[list[int]]) -> None:
    case = TRL["cases"][name]
    named = {key: case[key] for key in OPTIONS & case.keys()}
    algorithm = made(case["beta"], importance_cap=TRL["cap"], **named)
    found = loss_and_gradient(algorithm, episodes(case["normalize"]), cuts)
    figures = found.figures
    gradient_NMV = torch.tensor(case["gradient_BMV"])

    assert abs(found.loss - case["loss"]) < 1e-5

    torch.testing.assert_close(
        found.gradient_NMV,
        gradient_NMV,
        atol=1e-5,
        rtol=1e-5,
    )
    assert 0 < figures["clip_fraction"] < 1
    assert figures["ratio_max"] > 1.2
    assert ("kl" in figures) == bool(case["beta"])
    assert ("importance_mean" in figures) == (case["importance"] != "none")


def test_figures_do_not_hang_on_the_cut() -> None:
    algorithm = made(0.1)
    rollout = episodes("token")
    whole = loss_and_gradient(algorithm, rollout, WHOLE)
    cut = loss_and_gradient(algorithm, rollout, [[0, 3], [1, 2, -1], [4, 5]])
    assert cut.figures == pytest.approx(whole.figures, rel=1e-5)


def test_on_policy_is_a_ratio_of_one() -> None:
    """With no step since the rollout the loss is −mean advantage, and its gradient that of A · log π."""
    rollout = episodes("token")
    found = loss_and_gradient(made(minibatches=1), rollout, WHOLE)
    advantages_NM = rollout.advantages_NM
    tokens = rollout.mask_NM.sum()

    assert found.loss == pytest.approx(float(-advantages_NM.sum() / tokens), abs=1e-6)
    assert found.figures["ratio_mean"] == 1.0
    assert found.figures["ratio_max"] == 1.0
    assert found.figures["clip_fraction"] == 0.0

    leaf = stored("logits_BMV").requires_grad_()
    ids_NM1 = stored("completions_BM")[..., None]
    logs_NM = leaf.log_softmax(-1).gather(-1, ids_NM1).squeeze(-1)
    (-(advantages_NM * logs_NM).sum() / tokens).backward()

    torch.testing.assert_close(found.gradient_NMV, leaf.grad)


def test_an_episode_that_does_not_count_changes_nothing() -> None:
    """One whose reward failed."""
    rollout = episodes("sequence")
    is_trained_N = torch.tensor([True, True, False, True, True, True])
    without = rollout.add_loss_weights("sequence", 8, is_trained_N)
    found = loss_and_gradient(made(), without, WHOLE)
    expected = loss_and_gradient(made(), rollout, [[0, 1, 3], [4, 5]])

    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert not found.gradient_NMV[2].any()


def test_an_episode_without_a_token_changes_nothing() -> None:
    prompt = np.zeros(2, np.int64)
    completion = np.zeros(0, np.int64)
    rollout = Episodes.start([prompt], [completion])
    empty = rollout.add_loss_weights("sequence", 8, torch.ones(1, dtype=torch.bool))
    batch = collate_episodes(
        empty,
        [0],
        pad_id=0,
        width=None,
    )

    assert batch.weight == 1.0
    assert (batch.targets_BT == -100).all()

    outputs = Outputs(logits_BTV=torch.randn(1, 2, 7, requires_grad=True))
    out = made().objective(outputs, batch)
    assert out.loss_sum == 0

    for name, value in out.sums.items():
        assert torch.isfinite(value), name


def test_group_advantages() -> None:
    rewards_PG = doubles(
        [
            [0, 1, 1, 0],
            [2, 2, 2, 2],
            [1, NAN, 3, NAN],
        ]
    )
    centred = doubles(
        [
            [-0.5, 0.5, 0.5, -0.5],
            [0, 0, 0, 0],
            [-1, 0, 1, 0],
        ]
    )
    first = float(np.std([0, 1, 1, 0], ddof=1))
    third = float(np.std([1, 3], ddof=1))
    of_groups = doubles([[first], [0.0], [third]])
    of_batch = np.std([0, 1, 1, 0, 2, 2, 2, 2, 1, 3], ddof=1)
    none = group_advantages(rewards_PG, "none")
    group = group_advantages(rewards_PG, "group")
    batch = group_advantages(rewards_PG, "batch")

    torch.testing.assert_close(none, centred)
    torch.testing.assert_close(group, centred / (of_groups + 1e-4))
    torch.testing.assert_close(batch, centred / (of_batch + 1e-4))

    assert have_different_rewards(rewards_PG).tolist() == [True, False, True]
    assert not have_different_rewards(torch.tensor([[NAN, 1.0]])).item()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_are_all_alike_have_no_advantages(scale: Any, dtype: torch.dtype) -> None:
    """To the last bit: the mean of large numbers is rounded, and what is left of it was divided by a deviation as small."""
    for reward in (12345.678, -1e30, 0.1, 1 / 3):
        rewards_PG = torch.full((2, 7), reward, dtype=dtype)
        rewards_PG[1, 2:4] = NAN
        whitened_PG = whiten(rewards_PG, ~rewards_PG.isnan())
        assert not group_advantages(rewards_PG, scale).any(), reward
        assert not whitened_PG.any(), reward

    unknown_PG = torch.full((1, 3), NAN, dtype=dtype)

    assert not group_advantages(unknown_PG, scale).any()


def test_leave_one_out() -> None:
    """Less the mean of the others; what could not be had is nobody's other."""
    rewards_PG = doubles(
        [
            [0, 1, 1, 0.5],
            [2, 2, 2, 2],
            [1, NAN, 3, 0.25],
        ]
    )
    expected = torch.zeros_like(rewards_PG)
    for group, row in enumerate(rewards_PG.tolist()):
        known = [reward for reward in row if not math.isnan(reward)]
        for place, reward in enumerate(row):
            if not math.isnan(reward):
                of_others = (sum(known) - reward) / (len(known) - 1)
                expected[group, place] = reward - of_others

    unscaled = group_advantages(rewards_PG, "none", "rloo")

    torch.testing.assert_close(unscaled, expected)

    deviation = expected[~rewards_PG.isnan()].std()
    scaled = group_advantages(rewards_PG, "batch", "rloo")
    torch.testing.assert_close(scaled, expected / (deviation + 1e-4))


def test_divergence_estimators() -> None:
    """On average over samples k1 and k3 are the KL; each equals its formula."""
    draw = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    reference = torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(0)
    difference = policy - reference
    kl = float((policy.exp() * difference).sum())
    k1 = divergence(policy, reference, "k1")
    k2 = divergence(policy, reference, "k2")
    k3 = divergence(policy, reference, "k3")
    for estimates in (k1, k3):
        mean = float((policy.exp() * estimates).sum())
        assert mean == pytest.approx(kl)

    torch.testing.assert_close(k2, difference**2 / 2)

    assert (k3 >= 0).all()


@pytest.mark.parametrize("delta", [None, 4.0, 1e39])
def test_a_ratio_beyond_fp32_has_a_loss_and_a_gradient(delta: float | None) -> None:
    """It overflowed, and inf · 0 made NaN of the clip's gradient, or of an advantage of 0."""
    logs_BT = torch.tensor([[100.0, 100.0, 100.0, 0.1]]).requires_grad_()
    advantages_BT = torch.tensor([[1.0, 0.0, -1.0, 1.0]])
    loss_BT, cut_BT = ppo_clip_loss(
        logs_BT,
        advantages_BT,
        0.2,
        0.2,
        delta,
    )
    loss_BT.sum().backward()
    highest = 4.0 if delta == 4.0 else math.exp(80)
    plain = -math.exp(0.1)

    torch.testing.assert_close(loss_BT.detach(), torch.tensor([[-1.2, 0.0, highest, plain]]))
    torch.testing.assert_close(logs_BT.grad, torch.tensor([[0.0, 0.0, 0.0, plain]]))

    assert cut_BT.tolist() == [[True, False, True, False]]

    leaf = torch.tensor([-200.0, 0.5]).requires_grad_()
    divergence(leaf, torch.zeros(2), "k3").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_adaptive_kl_steers_to_its_target() -> None:
    controller = KLController(0.1, target=0.05, horizon=1000)
    controller.update(kl=0.055, episodes=100)  # 10% above: e = 0.1
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))

    controller.update(kl=5.0, episodes=100)  # far above: e is held at 0.2
    assert controller.coefficient == pytest.approx(0.1 * 1.01 * (1 + 0.2 * 0.1))

    fixed = KLController(0.1)
    fixed.update(kl=5.0, episodes=100)
    assert fixed.coefficient == 0.1


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cuts", [WHOLE, CUT], ids=["whole", "cut"])
def test_what_is_masked_teaches_nothing_and_all_else_as_before(
    level: str, cuts: list[list[int]]
) -> None:
    """Masked and truncated importance sampling differ only where the ratio is above the cap."""
    rollout = episodes("token")
    cap = 1.2
    options = {"importance": level, "importance_cap": cap}
    truncated = loss_and_gradient(made(**options), rollout, cuts)
    masked = loss_and_gradient(made(**options, importance_bound="mask"), rollout, cuts)

    log_ratio_NM = rollout.log_probs_NM - rollout.sampler_log_probs_NM

    if level == "sequence":
        log_ratio_NM = log_ratio_NM.sum(1, keepdim=True).expand_as(log_ratio_NM)

    is_above_NM = (log_ratio_NM.exp() > cap) & rollout.mask_NM
    expected_NMV = torch.where(is_above_NM[:, :, None], 0.0, truncated.gradient_NMV)

    assert 0 < is_above_NM.sum() < rollout.mask_NM.sum()
    torch.testing.assert_close(masked.gradient_NMV, expected_NMV, atol=1e-7, rtol=1e-5)

    for figures in (masked.figures, truncated.figures):
        share = is_above_NM.sum() / rollout.mask_NM.sum()
        assert figures["importance_bounded"] == pytest.approx(share.item())

    assert truncated.figures["importance_max"] == pytest.approx(cap)
    assert masked.figures["importance_max"] < cap
    assert masked.figures["importance_mean"] < truncated.figures["importance_mean"]


@pytest.mark.parametrize("cuts", [WHOLE, CUT], ids=["whole", "cut"])
def test_the_distance_of_the_sampler_is_measured(cuts: list[list[int]]) -> None:
    rollout = episodes("token")
    figures = loss_and_gradient(made(), rollout, cuts).figures
    differences = (rollout.log_probs_NM - rollout.sampler_log_probs_NM)[rollout.mask_NM]
    expected = {
        "sampler_log_ratio": differences.mean().item(),
        "sampler_log_ratio_max": differences.abs().max().item(),
    }

    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-5), name

    assert _sampler_metrics(rollout) == pytest.approx(expected, rel=1e-5)


def test_weights_are_bounded_only_where_there_are_weights() -> None:
    with pytest.raises(ValueError, match="set importance: token or sequence"):
        made(importance_bound="mask")

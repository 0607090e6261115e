"""PPO: advantages, returns, losses and gradients equal their formulas, written out in float64 one token at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from drumline.algorithms.credit import gae, place_at_last_token, whiten
from drumline.algorithms.ppo.spec import PPOConfig
from drumline.data.batches import EpisodeBatch, Episodes, collate_episodes
from drumline.models.head import Outputs

LENGTHS = [4, 1, 0, 6, 3]
PROMPTS = [2, 1, 3, 1, 4]
VOCABULARY = 9


@dataclass(frozen=True)
class Answers(Outputs):
    """Logits and values that are given."""

    values_BT: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        assert self.values_BT is not None
        return self.values_BT


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.7, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(gamma: float, lam: float) -> None:
    mask_NM = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    # Behind the end of a completion a value head says something too, which must not count.
    rewards_NM, values_NM = numbers(5, 6, seed=1) * mask_NM, numbers(5, 6, seed=2)
    advantages_NM, returns_NM = gae(rewards_NM, values_NM, mask_NM, gamma, lam)
    for n, size in enumerate(LENGTHS):
        reward, value = (
            rewards_NM[n].double().tolist(),
            [*values_NM[n, :size].double().tolist(), 0.0],
        )
        delta = [reward[t] + gamma * value[t + 1] - value[t] for t in range(size)]
        for t in range(6):
            expected = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, size))
            assert float(advantages_NM[n, t]) == pytest.approx(expected, abs=1e-5)
            assert float(returns_NM[n, t]) == pytest.approx(
                expected + value[t] if t < size else 0.0, abs=1e-5
            )


def test_whitening_and_scores() -> None:
    mask_NM = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    values_NM = 3 + 2 * numbers(5, 6)
    white = whiten(values_NM, mask_NM)
    inside = values_NM[mask_NM].double().numpy()
    np.testing.assert_allclose(
        white[mask_NM], (inside - inside.mean()) / inside.std(ddof=1), atol=1e-5
    )
    assert not white[~mask_NM].any()
    scores_NM = place_at_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask_NM)
    # The third has no token to stand at.
    assert scores_NM.nonzero().tolist() == [
        [0, 3],
        [1, 0],
        [3, 5],
        [4, 2],
    ]


def rollout() -> Episodes:
    completions = [np.arange(size) % VOCABULARY for size in LENGTHS]
    start = Episodes.start([np.zeros(size, np.int64) for size in PROMPTS], completions)
    mask_NM = start.mask_NM
    fields = ("log_probs_NM", "reference_log_probs_NM", "values_NM", "advantages_NM", "returns_NM")
    drawn = {name: numbers(5, 6, seed=index) * mask_NM for index, name in enumerate(fields)}
    drawn["log_probs_NM"] = (drawn["log_probs_NM"] / 3 - 2.2) * mask_NM
    return replace(start, **drawn).weighted("token", 1, torch.ones(5, dtype=torch.bool))


def by_the_formula(
    ppo: PPOConfig, batch: EpisodeBatch, logits_BTV: torch.Tensor, values_BT: torch.Tensor
) -> torch.Tensor:
    """Every token by itself, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    logs_BTV, probs_BTV = logits_BTV.double().log_softmax(-1), logits_BTV.double().softmax(-1)
    for b, t in (batch.targets_BT != -100).nonzero().tolist():
        ratio = (
            logs_BTV[b, t, batch.targets_BT[b, t]] - batch.old_log_probs_BT[b, t].double()
        ).exp()
        advantage, wanted = batch.advantages_BT[b, t].double(), batch.returns_BT[b, t].double()
        policy = -torch.min(ratio * advantage, ratio.clamp(1 - ppo.clip, 1 + ppo.clip) * advantage)
        value, old = values_BT[b, t].double(), batch.old_values_BT[b, t].double()
        error = (value - wanted) ** 2
        if ppo.value_clip is not None:
            error = torch.max(
                error, (old + (value - old).clamp(-ppo.value_clip, ppo.value_clip) - wanted) ** 2
            )
        entropy = -(probs_BTV[b, t] * logs_BTV[b, t]).sum()
        total = total + policy + ppo.value_weight * error / 2 - ppo.entropy_weight * entropy
    return total


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("value_clip", [0.2, None])
def test_losses_and_gradients_equal_the_formula(value_clip: float | None) -> None:
    ppo = PPOConfig(clip=0.1, value_clip=value_clip, value_weight=0.3, entropy_weight=0.05).build()
    batch = collate_episodes(rollout(), [3, 0, -1, 4, 2, 1], pad_id=0, width=9)
    logits_BTV, values_BT = (
        numbers(6, 9, VOCABULARY, seed=7).requires_grad_(),
        numbers(6, 9, seed=8).requires_grad_(),
    )
    out = ppo.objective(Answers(logits_BTV=logits_BTV, values_BT=values_BT), batch)
    got = torch.autograd.grad(out.loss_sum, (logits_BTV, values_BT))
    expected_sum = by_the_formula(ppo.spec, batch, logits_BTV, values_BT)
    assert out.loss_sum.item() == pytest.approx(expected_sum.item(), abs=1e-5)
    for mine, theirs in zip(
        got, torch.autograd.grad(expected_sum, (logits_BTV, values_BT)), strict=True
    ):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), atol=1e-5, rtol=1e-5)
    figures = ppo.step_metrics({key: float(value) for key, value in out.sums.items()})
    assert batch.weight == sum(LENGTHS) and 0 < figures["clip_fraction"] < 1
    learned = batch.targets_BT != -100
    returns, left = (
        batch.returns_BT[learned].double(),
        (batch.returns_BT - values_BT.detach())[learned].double(),
    )
    assert figures["explained_variance"] == pytest.approx(
        float(1 - left.var() / returns.var()), abs=1e-5
    )
    assert figures["kl"] == pytest.approx(
        ((out_log_probs(logits_BTV, batch) - batch.reference_log_probs_BT)[learned].mean().item()),
        abs=1e-5,
    )


def out_log_probs(logits_BTV: torch.Tensor, batch: EpisodeBatch) -> torch.Tensor:
    return Outputs(logits_BTV=logits_BTV).log_probs(batch.targets_BT, 0)[0]


def test_value_apart_is_the_same_loss_in_two_parts() -> None:
    batch = collate_episodes(rollout(), [0, 1, 2, 3, 4], pad_id=0, width=None)
    shape = batch.input_ids_BT.shape
    outputs = Answers(logits_BTV=numbers(*shape, VOCABULARY), values_BT=numbers(*shape))
    apart = PPOConfig(value="separate").build().objective
    assert set(apart) == {"policy", "value"}
    parts = [apart[role](outputs, batch) for role in apart]
    together = PPOConfig().build().objective(outputs, batch)
    assert float(sum(part.loss_sum for part in parts)) == pytest.approx(
        float(together.loss_sum), rel=1e-6
    )
    assert (
        not set(parts[0].sums) & set(parts[1].sums)
        and parts[0].sums.keys() | parts[1].sums.keys() == together.sums.keys()
    )

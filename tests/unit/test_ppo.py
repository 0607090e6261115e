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

Tensor = torch.Tensor


@dataclass(frozen=True)
class Answers(Outputs):
    """Logits and values that are given."""

    values_BT: Tensor | None = None

    def values(self) -> Tensor:
        assert self.values_BT is not None
        return self.values_BT


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def completion_mask() -> Tensor:
    return torch.arange(6) < torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.7, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(gamma: float, lam: float) -> None:
    mask_NM = completion_mask()
    rewards_NM = numbers(5, 6, seed=1) * mask_NM
    # Behind the end of a completion a value head says something too, which must not count.
    values_NM = numbers(5, 6, seed=2)
    advantages_NM, returns_NM = gae(rewards_NM, values_NM, mask_NM, gamma, lam)
    for n, size in enumerate(LENGTHS):
        reward = rewards_NM[n].double().tolist()
        value = values_NM[n, :size].double().tolist()
        value.append(0.0)
        advantage = [0.0] * 6
        expected_return = [0.0] * 6
        for t in range(size):
            for s in range(t, size):
                error = reward[s] + gamma * value[s + 1] - value[s]
                advantage[t] += (gamma * lam) ** (s - t) * error
            expected_return[t] = advantage[t] + value[t]
        assert advantages_NM[n].tolist() == pytest.approx(advantage, abs=1e-5)
        assert returns_NM[n].tolist() == pytest.approx(expected_return, abs=1e-5)


def test_whitening_and_scores() -> None:
    mask_NM = completion_mask()
    values_NM = 3 + 2 * numbers(5, 6)
    white = whiten(values_NM, mask_NM)
    inside = values_NM[mask_NM].double().numpy()
    expected = (inside - inside.mean()) / inside.std(ddof=1)
    np.testing.assert_allclose(
        white[mask_NM],
        expected,
        atol=1e-5,
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
    """Return episodes with drawn values for all that a rollout fills in."""
    prompts = [np.zeros(size, np.int64) for size in PROMPTS]
    completions = [np.arange(size) % VOCABULARY for size in LENGTHS]
    start = Episodes.start(prompts, completions)
    mask_NM = start.mask_NM
    filled = replace(
        start,
        log_probs_NM=(numbers(5, 6, seed=0) * mask_NM / 3 - 2.2) * mask_NM,
        reference_log_probs_NM=numbers(5, 6, seed=1) * mask_NM,
        values_NM=numbers(5, 6, seed=2) * mask_NM,
        advantages_NM=numbers(5, 6, seed=3) * mask_NM,
        returns_NM=numbers(5, 6, seed=4) * mask_NM,
    )
    return filled.weighted("token", 1, torch.ones(5, dtype=torch.bool))


def policy_loss(ppo: PPOConfig, ratio: Tensor, advantage: Tensor) -> Tensor:
    clipped = ratio.clamp(1 - ppo.clip, 1 + ppo.clip)
    return -torch.min(ratio * advantage, clipped * advantage)


def value_loss(
    ppo: PPOConfig,
    value: Tensor,
    old: Tensor,
    wanted: Tensor,
) -> Tensor:
    error = (value - wanted) ** 2
    if ppo.value_clip is not None:
        change = (value - old).clamp(-ppo.value_clip, ppo.value_clip)
        clipped_error = (old + change - wanted) ** 2
        error = torch.max(error, clipped_error)
    return error / 2


def by_the_formula(
    ppo: PPOConfig,
    batch: EpisodeBatch,
    logits_BTV: Tensor,
    values_BT: Tensor,
) -> Tensor:
    """Return the loss, every token by itself, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    logs_BTV = logits_BTV.double().log_softmax(-1)
    probs_BTV = logits_BTV.double().softmax(-1)
    for place in (batch.targets_BT != -100).nonzero().tolist():
        token = tuple(place)
        logs_V = logs_BTV[token]
        target = batch.targets_BT[token]
        old_log_prob = batch.old_log_probs_BT[token].double()
        ratio = (logs_V[target] - old_log_prob).exp()
        advantage = batch.advantages_BT[token].double()
        total = total + policy_loss(ppo, ratio, advantage)

        value = values_BT[token].double()
        old = batch.old_values_BT[token].double()
        wanted = batch.returns_BT[token].double()
        total = total + ppo.value_weight * value_loss(ppo, value, old, wanted)

        entropy = -(probs_BTV[token] * logs_V).sum()
        total = total - ppo.entropy_weight * entropy

    return total


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("value_clip", [0.2, None])
def test_losses_and_gradients_equal_the_formula(value_clip: float | None) -> None:
    ppo = PPOConfig(clip=0.1, value_clip=value_clip, value_weight=0.3, entropy_weight=0.05).build()
    batch = collate_episodes(
        rollout(),
        [3, 0, -1, 4, 2, 1],
        pad_id=0,
        width=9,
    )
    logits_BTV = numbers(6, 9, VOCABULARY, seed=7).requires_grad_()
    values_BT = numbers(6, 9, seed=8).requires_grad_()
    leaves = (logits_BTV, values_BT)
    answers = Answers(logits_BTV=logits_BTV, values_BT=values_BT)
    out = ppo.objective(answers, batch)
    expected = by_the_formula(ppo.spec, batch, *leaves)
    assert out.loss_sum.item() == pytest.approx(expected.item(), abs=1e-5)

    got_gradients = torch.autograd.grad(out.loss_sum, leaves)
    gradients = torch.autograd.grad(expected, leaves)
    for mine, theirs in zip(got_gradients, gradients, strict=True):
        torch.testing.assert_close(
            mine,
            theirs.to(mine.dtype),
            atol=1e-5,
            rtol=1e-5,
        )

    assert batch.weight == sum(LENGTHS)

    sums = {key: float(value) for key, value in out.sums.items()}
    figures = ppo.step_metrics(sums)
    assert 0 < figures["clip_fraction"] < 1

    learned = batch.targets_BT != -100
    returns = batch.returns_BT[learned].double()
    left = (batch.returns_BT - values_BT.detach())[learned].double()
    explained = 1 - left.var() / returns.var()
    assert figures["explained_variance"] == pytest.approx(float(explained), abs=1e-5)

    log_probs_BT = answers.log_probs(batch.targets_BT, 0)[0]
    log_ratio_BT = log_probs_BT - batch.reference_log_probs_BT
    kl = log_ratio_BT[learned].mean().item()
    assert figures["kl"] == pytest.approx(kl, abs=1e-5)


def test_value_apart_is_the_same_loss_in_two_parts() -> None:
    batch = collate_episodes(
        rollout(),
        [0, 1, 2, 3, 4],
        pad_id=0,
        width=None,
    )
    shape = batch.input_ids_BT.shape
    outputs = Answers(logits_BTV=numbers(*shape, VOCABULARY), values_BT=numbers(*shape))
    apart = PPOConfig(value="separate").build().objective
    assert set(apart) == {"policy", "value"}

    policy = apart["policy"](outputs, batch)
    value = apart["value"](outputs, batch)
    together = PPOConfig().build().objective(outputs, batch)
    loss_sum = float(policy.loss_sum + value.loss_sum)
    assert loss_sum == pytest.approx(float(together.loss_sum), rel=1e-6)
    assert not policy.sums.keys() & value.sums.keys()
    assert policy.sums.keys() | value.sums.keys() == together.sums.keys()

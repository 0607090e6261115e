"""PPO: advantages, returns, losses and gradients equal their formulas.

The formulas are written out in float64, one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.algorithms.credit import gae, place_at_last_token, whiten
from drumline.algorithms.ppo.spec import PPOConfig
from drumline.data.batches import EpisodeBatch, Episodes, collate_episodes
from drumline.models.head import Outputs

LENGTHS = [4, 1, 0, 6, 3]
PROMPTS = [2, 1, 3, 1, 4]
VOCABULARY = 9
MASK_NM = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


@dataclass(frozen=True)
class Answers(Outputs):
    """Logits and values that are given."""

    values_BT: Tensor | None = None

    def values(self) -> Tensor:
        assert self.values_BT is not None
        return self.values_BT


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize(
    ("gamma", "lam"),
    [
        (1.0, 0.95),
        (0.9, 1.0),
        (0.7, 0.0),
    ],
)
def test_gae_is_the_sum_of_discounted_errors(gamma: float, lam: float) -> None:
    rewards_NM = numbers(5, 6, seed=1) * MASK_NM
    # Behind the end of a completion a value head says something too, which must not count.
    values_NM = numbers(5, 6, seed=2)

    advantages_NM, returns_NM = gae(
        rewards_NM,
        values_NM,
        MASK_NM,
        gamma,
        lam,
    )

    for n, size in enumerate(LENGTHS):
        reward = rewards_NM[n].tolist()
        value = values_NM[n, :size].tolist()
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
    values_NM = 3 + 2 * numbers(5, 6)
    white = whiten(values_NM, MASK_NM)

    inside = values_NM[MASK_NM].double().numpy()
    expected = (inside - inside.mean()) / inside.std(ddof=1)
    np.testing.assert_allclose(white[MASK_NM], expected, atol=1e-5)
    assert not white[~MASK_NM].any()

    scores_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    scores_NM = place_at_last_token(scores_N, MASK_NM)
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
    # No completion is as long as the vocabulary is large.
    completions = [np.arange(size) for size in LENGTHS]
    start = Episodes.start(prompts, completions)
    log_probs_NM = numbers(5, 6, seed=0) / 3 - 2.2
    filled = replace(
        start,
        log_probs_NM=log_probs_NM * MASK_NM,
        reference_log_probs_NM=numbers(5, 6, seed=1) * MASK_NM,
        values_NM=numbers(5, 6, seed=2) * MASK_NM,
        advantages_NM=numbers(5, 6, seed=3) * MASK_NM,
        returns_NM=numbers(5, 6, seed=4) * MASK_NM,
    )
    counts_N = torch.ones(5, dtype=torch.bool)
    return filled.add_loss_weights("token", 1, counts_N)


def policy_loss(
    ppo: PPOConfig,
    ratio: Tensor,
    advantage: Tensor,
) -> Tensor:
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
    values_BT = values_BT.double()
    for place in (batch.targets_BT != -100).nonzero().tolist():
        token = tuple(place)
        logs_V = logs_BTV[token]
        log_prob = logs_V[batch.targets_BT[token]]
        ratio = (log_prob - batch.old_log_probs_BT[token]).exp()
        total = total + policy_loss(ppo, ratio, batch.advantages_BT[token])

        loss = value_loss(
            ppo,
            values_BT[token],
            batch.old_values_BT[token],
            batch.returns_BT[token],
        )
        total = total + ppo.value_weight * loss

        entropy = -(logs_V.exp() * logs_V).sum()
        total = total - ppo.entropy_weight * entropy

    return total


@pytest.mark.claim("DPO, reward models, GRPO and PPO are their formulas")
@pytest.mark.parametrize("value_clip", [0.2, None])
def test_losses_and_gradients_equal_the_formula(value_clip: float | None) -> None:
    config = PPOConfig(
        clip=0.1,
        value_clip=value_clip,
        value_weight=0.3,
        entropy_weight=0.05,
    )
    ppo = config.build()
    picks = [3, 0, -1, 4, 2, 1]
    batch = collate_episodes(rollout(), picks, pad_id=0, width=9)
    logits_BTV = numbers(6, 9, VOCABULARY, seed=7).requires_grad_()
    values_BT = numbers(6, 9, seed=8).requires_grad_()
    answers = Answers(logits_BTV=logits_BTV, values_BT=values_BT)

    out = ppo.objective(answers, batch)

    leaves = (logits_BTV, values_BT)
    expected = by_the_formula(ppo.spec, batch, *leaves)
    assert out.loss_sum.item() == pytest.approx(expected.item(), abs=1e-5)

    torch.testing.assert_close(
        torch.autograd.grad(out.loss_sum, leaves),
        torch.autograd.grad(expected, leaves),
        atol=1e-5,
        rtol=1e-5,
    )

    assert batch.weight == sum(LENGTHS)

    sums = {key: float(value) for key, value in out.sums.items()}
    figures = ppo.step_metrics(sums)
    assert 0 < figures["clip_fraction"] < 1

    learned = batch.targets_BT != -100
    returns = batch.returns_BT[learned].double()
    left = returns - values_BT[learned].detach()
    explained = 1 - left.var() / returns.var()
    assert figures["explained_variance"] == pytest.approx(float(explained), abs=1e-5)

    log_probs_BT, _ = answers.log_probs(batch.targets_BT, 0)
    log_ratio_BT = log_probs_BT - batch.reference_log_probs_BT
    kl = log_ratio_BT[learned].mean().item()
    assert figures["kl"] == pytest.approx(kl, abs=1e-5)


def test_value_apart_is_the_same_loss_in_two_parts() -> None:
    picks = [0, 1, 2, 3, 4]
    batch = collate_episodes(rollout(), picks, pad_id=0, width=None)
    shape = batch.input_ids_BT.shape
    logits_BTV = numbers(*shape, VOCABULARY)
    outputs = Answers(logits_BTV=logits_BTV, values_BT=numbers(*shape))

    apart = PPOConfig(value="separate").build().objective
    assert set(apart) == {"policy", "value"}
    policy = apart["policy"](outputs, batch)
    value = apart["value"](outputs, batch)
    together = PPOConfig().build().objective(outputs, batch)

    in_two_parts = float(policy.loss_sum + value.loss_sum)
    expected = float(together.loss_sum)
    assert in_two_parts == pytest.approx(expected, rel=1e-6)

    policy_keys = policy.sums.keys()
    value_keys = value.sums.keys()
    assert not policy_keys & value_keys
    assert policy_keys | value_keys == together.sums.keys()

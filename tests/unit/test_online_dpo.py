"""Online DPO: which episodes are a pair, their loss against a plain loop, and the plan of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.online_dpo.pairing import choose_pairs, weigh_pairs
from drumline.algorithms.online_dpo.spec import OnlineDPOConfig
from drumline.config.load import load_text
from drumline.data.batches import Episodes
from drumline.errors import ConfigError
from drumline.models.head import compute_outputs, trunk_and_head
from drumline.plan.plan import Plan
from drumline.planner.cost.memory import memory
from drumline.planner.cost.times import rollout_seconds
from drumline.rl.reading import EpisodeReader
from drumline.train.replan import planning_question
from tests.harness import write_config
from tests.plans import resolve_plan
from tests.tiny import read_model, tiny_model_dir
from tests.unit.test_distill import FP32_BYTES, ROW
from tests.unit.test_planner_times import cluster

NAN = math.nan
PAD = 0
BETA = 0.4
# The chosen episodes of three pairs, then the rejected ones. Pairs may be of unequal lengths. Of the
# second one the tokens in the middle of the chosen episode are those of an environment. The rewards of
# the last pair are equal.
PROMPTS = [[5, 6, 7], [8], [9, 10]] * 2
COMPLETIONS = [[11, 12], [13, 14, 15, 16], [17], [18, 19, 20], [21], [22, 23]]
SAMPLED = [[True] * 2, [True, False, False, True], [True], [True] * 3, [True], [True] * 2]
REWARDS = torch.tensor([1.0, 0.5, 0.3, 0.2, -1.0, 0.3])


def spec(**options: Any) -> OnlineDPOConfig:
    return OnlineDPOConfig.model_validate(options)


def pairs(rewards: list[float], group_size: int, tokens: list[int] | None = None) -> Any:
    tokens_N = torch.tensor(tokens or [3] * len(rewards))
    return choose_pairs(torch.tensor(rewards), tokens_N, group_size)


def test_a_pair_is_the_best_and_the_worst_of_a_group() -> None:
    assert pairs([1.0, 2.0, 5.0, -5.0], 2) == ([1, 2], [0, 3])
    assert pairs([0.0, 3.0, 1.0, -2.0], 4) == ([1], [3])
    # Of equal rewards the first episode.
    assert pairs([1.0, 0.0, 1.0, 0.0], 4) == ([0], [1])


def test_groups_that_teach_nothing_have_no_pair() -> None:
    alike = [0.1] * 3
    unknown = [NAN] * 3
    one_known = [NAN, 2.0, NAN]
    two_known = [NAN, 2.0, 3.0]
    assert pairs([*alike, *unknown, *one_known, *two_known], 3) == ([11], [10])
    # The best one has no token.
    assert pairs([9.0, 1.0, 2.0], 3, [0, 4, 4]) == ([2], [1])


def test_without_any_pair_a_stand_in_weighs_nothing() -> None:
    rewards_N = torch.tensor([1.0, 1.0, NAN, 2.0])
    picks = spec().learned_episodes(rewards_N, torch.tensor([1, 1, 1, 1]))
    assert picks == [0, 1]
    tokens = [np.array([4, 5])] * 2
    weighted = weigh_pairs(Episodes.start(tokens, tokens), rewards_N[picks])
    assert weighted.weight_N.sum() == 0
    assert weighted.weights_NM.sum() == 0


def episodes(reference: Any) -> Episodes:
    """Three pairs, with the log-probs of a reference model."""
    prompts = [np.array(tokens) for tokens in PROMPTS]
    completions = [np.array(tokens) for tokens in COMPLETIONS]
    made = Episodes.start(prompts, completions, sampled=SAMPLED)
    reference_NM = torch.zeros_like(made.log_probs_NM)
    for row, log_probs in enumerate(token_log_probs(reference)):
        flags = torch.tensor(SAMPLED[row])
        reference_NM[row, : len(flags)] = log_probs.detach() * flags
    made = replace(made, reference_log_probs_NM=reference_NM)
    weighted: Episodes = spec().assign_credit(made, REWARDS, None)
    return weighted


def token_log_probs(model: Any, temperature: float = 1.0) -> list[torch.Tensor]:
    """The log-probability of each token of each completion, computed row by row."""
    found = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
        log_probs = (logits / temperature).log_softmax(-1)
        start = len(prompt) - 1
        found.append(torch.stack([log_probs[start + i, t] for i, t in enumerate(completion)]))
    return found


def plain_losses(policy: Any, reference: Any, loss: str) -> list[torch.Tensor]:
    """The loss of the two pairs whose rewards differ, as their papers write them."""
    scores = []
    both = zip(token_log_probs(policy), token_log_probs(reference), SAMPLED, strict=True)
    for of_policy, of_reference, flags in both:
        score = torch.zeros(())
        for index, is_sampled in enumerate(flags):
            if is_sampled:
                score = score + of_policy[index] - of_reference[index].detach()
        scores.append(score)
    found = []
    for chosen, rejected in ((scores[0], scores[3]), (scores[1], scores[4])):
        difference = chosen - rejected
        if loss == "sigmoid":
            found.append(torch.log(1 + torch.exp(-BETA * difference)))
        elif loss == "hinge":
            found.append(torch.clamp(1 - BETA * difference, min=0))
        else:
            found.append((difference - 1 / (2 * BETA)) ** 2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and a reference that is surer of itself."""
    root = tmp_path_factory.mktemp("models")
    tiny_model_dir(root / "model")
    tiny_model_dir(root / "reference", seed=7)
    reference = read_model(root / "reference")
    with torch.no_grad():
        reference.model.norm.weight.mul_(20)
    reference.save_pretrained(root / "reference")
    return root


@pytest.mark.claim("online DPO's losses are those of its paper")
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_the_loss_is_that_of_a_plain_loop(folder: Path, loss: Any) -> None:
    reference = read_model(folder / "reference")
    policy = read_model(folder / "model")
    # The temperature of the sampling is not that of the loss.
    generator = {"kind": "hf", "temperature": 1.7}
    algorithm = spec(loss=loss, beta=BETA, loss_chunk=3, generator=generator).build()
    mesh = SimpleNamespace(data_ranks=1)
    plan: Any = SimpleNamespace(mesh=mesh, batch=SimpleNamespace(rows_per_sample=2))
    reader = EpisodeReader(plan, 0, True, "cpu", PAD, None)
    made = episodes(reference)
    # The last pair, whose rewards are equal, and a filler.
    (batch,), tokens = reader.micro_batches(made, [0, 1, 2, -1], 1, 4)
    assert tokens == made.lengths.sum()
    assert batch.weight == 2
    assert batch.input_ids_BT.shape[0] == 8
    found = algorithm.objective(compute_outputs(policy, batch, trunk_and_head(policy)), batch)

    expected = torch.stack(plain_losses(policy, reference, loss)).sum()
    assert expected > 0.1
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found.loss_sum, [policy.model.norm.weight])
    (wanted,) = torch.autograd.grad(expected, [policy.model.norm.weight])
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    metrics = algorithm.step_metrics({name: float(value) for name, value in found.sums.items()})
    assert metrics["pairs"] == 2
    assert 0 <= metrics["accuracy"] <= 1
    margin = metrics["reward_chosen"] - metrics["reward_rejected"]
    assert metrics["margin"] == pytest.approx(margin)
    assert metrics["kl"] > 0


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_distance_of_the_sampler_is_measured(folder: Path, temperature: float) -> None:
    """At the tokens of pairs that were sampled, by probabilities at the temperature of the sampling."""
    policy = read_model(folder / "model")
    generator = {"kind": "vllm", "url": "http://127.0.0.1:8000", "temperature": temperature}
    algorithm = spec(loss_chunk=3, generator=generator).build()
    mesh = SimpleNamespace(data_ranks=1)
    plan: Any = SimpleNamespace(mesh=mesh, batch=SimpleNamespace(rows_per_sample=2))
    reader = EpisodeReader(plan, 0, True, "cpu", PAD, None)
    made = episodes(read_model(folder / "reference"))
    sampler_NM = torch.randn(made.mask_NM.shape, generator=torch.Generator().manual_seed(5))
    made = replace(made, sampler_log_probs_NM=sampler_NM)
    (batch,), _ = reader.micro_batches(made, [0, 1, 2, -1], 1, 4)
    found = algorithm.objective(compute_outputs(policy, batch, trunk_and_head(policy)), batch)
    figures = algorithm.step_metrics({name: float(value) for name, value in found.sums.items()})

    differences = []
    log_probs = token_log_probs(policy, temperature)
    # The pair whose rewards are equal teaches nothing.
    for row in (0, 1, 3, 4):
        for column, is_sampled in enumerate(SAMPLED[row]):
            if is_sampled:
                log_prob = log_probs[row][column].item()
                differences.append(log_prob - sampler_NM[row, column].item())
    expected = torch.tensor(differences)
    assert figures["sampler_log_ratio"] == pytest.approx(expected.mean().item(), rel=1e-4)
    assert figures["sampler_log_ratio_max"] == pytest.approx(expected.abs().max().item(), rel=1e-4)


def test_pairs_stay_together_however_they_are_dealt(folder: Path) -> None:
    made = episodes(read_model(folder / "reference"))
    found = []
    for rank in range(2):
        mesh = SimpleNamespace(data_ranks=2)
        plan: Any = SimpleNamespace(mesh=mesh, batch=SimpleNamespace(rows_per_sample=2))
        reader = EpisodeReader(plan, rank, True, "cpu", PAD, None)
        batches, _ = reader.micro_batches(made, [2, 0, -1, 1], 1, 2)
        for batch in batches:
            # Two pairs: rows 0 and 2 are one of them, rows 1 and 3 the other.
            assert batch.input_ids_BT.shape[0] == 4
            for chosen, rejected in ((0, 2), (1, 3)):
                learned = batch.weights_BT[[chosen, rejected]].sum(1)
                assert learned[0] == learned[1]
                found.append(float(learned.sum()))
    assert sorted(found) == pytest.approx([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("group_size: 1", "2 or more"),
        ("clip: 0.1", "unknown key 'clip'"),
        ("kl: {coefficient: 0.1}", "unknown key 'kl'"),
        ("loss: aot", "loss"),
        ("beta: 0", "greater than 0"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(ROW, [f"algorithm={{kind: online_dpo, {options}}}"])
    assert line in error.value.line()
    assert "\n" not in error.value.line()


def planned(folder: Path, root: Path, **algorithm: Any) -> Plan:
    """The plan of a run in one process."""
    root.mkdir()
    sections: dict[str, Any] = {}
    if algorithm.pop("lora", False):
        sections["adapter"] = {"kind": "lora", "r": 4}
    options = {
        "kind": "online_dpo",
        "rewards": [{"kind": "regex", "pattern": "a"}],
        "generator": {"kind": "hf", "max_new_tokens": 8, "batch": 4},
        **algorithm,
    }
    path = write_config(
        root,
        folder / "model",
        algorithm=options,
        strategy={"kind": "single"},
        launch={"nproc": 1},
        **sections,
    )
    return resolve_plan(path, world_size=1)


def test_the_reference_is_planned_once_and_every_completion_is_sampled(
    folder: Path, tmp_path: Path
) -> None:
    plan = planned(folder, tmp_path / "two")
    facts = planning_question(plan).facts
    held = memory(plan, facts, cluster())
    # The reference is as large as the policy.
    assert held.parameters == FP32_BYTES * 2 * facts.parameters
    assert held.phases["rollout"] > held.parameters
    assert plan.batch.rows_per_sample == 2
    # A prompt has one row, which is as long as the prompt and an answer.
    assert plan.data is not None
    assert plan.tokens_per_row == plan.data.tokens_per_sample + 8

    eight = planned(folder, tmp_path / "eight", group_size=8)
    assert rollout_seconds(eight, facts, cluster()) > rollout_seconds(plan, facts, cluster())
    # A whole group is one pair, so the size of groups does not divide the batch.
    assert eight.batch == plan.batch
    assert eight.config.algorithm.rollout is not None
    assert eight.config.algorithm.rollout.episodes_of_rollout(4) == 32


def test_under_lora_the_reference_is_the_policy_without_its_adapter(
    folder: Path, tmp_path: Path
) -> None:
    plan = planned(folder, tmp_path / "run", lora=True)
    assert not plan.roles
    other = planned(
        folder, tmp_path / "other", lora=True, reference_model={"id": str(folder / "reference")}
    )
    assert set(other.roles) == {"reference"}


def test_a_step_is_traced_with_pairs(folder: Path, tmp_path: Path) -> None:
    plan = planned(folder, tmp_path / "run")
    batch = plan.config.algorithm.traced_batch(plan, rows=4, length=6, channels=3)
    model = read_model(folder / "model")
    outputs = compute_outputs(model, batch, trunk_and_head(model))
    loss = plan.config.algorithm.build().objective(outputs, batch).loss_sum
    loss.backward()
    assert torch.isfinite(loss)

"""Completions that are sampled in segments: which weights sample which token is a function of the step."""

from __future__ import annotations

import string
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.rl.sampler_check import PROMPTS as PROBES
from tests.distributed.ahead_runs import (
    GROUP,
    PROMPTS,
    STEP,
    STEPS,
    STEPS_PER_ROLLOUT,
    figures,
    grpo,
    plan_ahead,
    require_equal,
    train_alone,
)
from tests.distributed.ranks import run_plans
from tests.distributed.setups import SAVED_TWICE, UNSAVED, copy_checkpoint
from tests.harness import Sections, column, events, same_tensors, weights
from tests.sglang_stub import SGLangStub
from tests.tiny import read_model, tiny_model_dir
from tests.vllm_stub import StubServer

pytestmark = pytest.mark.timeout(900)
ROLLOUTS = STEPS // STEPS_PER_ROLLOUT
AHEAD = 3
MAX_NEW_TOKENS = 13
# Of a segment: 13 tokens in three segments are 5, 5 and 3.
MOST_TOKENS = 5
GRPO = grpo(MAX_NEW_TOKENS, ahead=AHEAD, partial=True)


def plan(
    root: Path, name: str, world_size: int, checkpoint: Sections = UNSAVED, **options: Any
) -> Path:
    """Plan a run. `options`: keys of its algorithm."""
    return plan_ahead(root, name, world_size, {**GRPO, **options}, checkpoint)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partial")
    tiny_model_dir(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    """The run of one process, with a checkpoint after each rollout."""
    return train_alone(root, GRPO)


def train_by(root: Path, name: str, sampler: Sections) -> Path:
    """Train in one process by another generator. Returns the run's folder."""
    path = plan(root, name, 1, generator={**sampler, "max_new_tokens": MAX_NEW_TOKENS})
    run_plans([path], 1)
    return path.parent


def versions_by_simulation() -> list[list[int]]:
    """Return the version that samples each token of the longest completion of each rollout.

    A plain loop over time: before a rollout is learned from, each pending one gets its next tokens.
    """
    sampled: list[list[int]] = [[] for _ in range(ROLLOUTS)]
    # The first rollout does not wait for anything.
    sampled[0] = [0] * MAX_NEW_TOKENS
    for now in range(ROLLOUTS):
        for rollout in range(now + 1, min(ROLLOUTS, now + AHEAD + 1)):
            calls = 1
            if now == 0:
                # At the beginning all that the initial weights are to sample is due.
                calls = AHEAD - rollout + 1
            for _ in range(calls * MOST_TOKENS):
                if len(sampled[rollout]) < MAX_NEW_TOKENS:
                    sampled[rollout].append(now * STEPS_PER_ROLLOUT)
    return sampled


def versions_in(completion: dict[str, Any]) -> list[int]:
    """Return the version that sampled each token of a completion of an event."""
    versions = []
    for part in completion["versions"]:
        versions += [part["version"]] * part["tokens"]
    return versions


def test_each_token_is_sampled_by_the_weights_of_the_schedule(alone: Path) -> None:
    simulated = versions_by_simulation()
    longest_of_rollouts = []
    for event, expected in zip(events(alone, "completions"), simulated, strict=True):
        longest = 0
        for completion in event["completions"]:
            versions = versions_in(completion)
            assert len(versions) == completion["tokens"]
            assert versions == expected[: len(versions)]
            assert completion["version"] == versions[0]
            longest = max(longest, len(versions))
        longest_of_rollouts.append(longest)
    assert max(longest_of_rollouts) == MAX_NEW_TOKENS
    # The last rollout has tokens of all three versions, and none is older than `ahead` rollouts.
    assert len(set(simulated[-1])) == AHEAD
    for rollout, versions in enumerate(simulated):
        assert rollout - min(versions) // STEPS_PER_ROLLOUT <= AHEAD


def test_staleness_is_the_mean_over_tokens(alone: Path) -> None:
    staleness = column(alone, "staleness", "rollout")
    assert staleness[0] == 0
    # A third rollout without segments would be 4 steps old, and a fourth and fifth one 6.
    assert staleness[1] == STEPS_PER_ROLLOUT
    for steps in staleness[-2:]:
        assert STEPS_PER_ROLLOUT < steps < AHEAD * STEPS_PER_ROLLOUT


def test_importance_weights_use_the_log_probs_of_each_segment(alone: Path) -> None:
    first, *later = column(alone, "importance_mean", "step")
    assert abs(first - 1) < 1e-5
    assert all(abs(mean - 1) > 1e-5 for mean in later[1:])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_several_processes_learn_what_one_does(root: Path, alone: Path, world_size: int) -> None:
    path = plan(root, f"on-{world_size}", world_size)
    run_plans([path], world_size)
    require_equal(path.parent, alone, 1e-5)


@pytest.mark.parametrize("step", [2, 6])
def test_a_resumed_run_continues_the_partial_completions(
    root: Path, alone: Path, step: int
) -> None:
    path = plan(root, f"resumed-{step}", 1, checkpoint=SAVED_TWICE)
    copy_checkpoint(alone, path, step)
    run_plans([path], 1)
    rollouts_done = step // STEPS_PER_ROLLOUT
    assert figures(path.parent, "step", STEP) == figures(alone, "step", STEP)[step:]
    found = events(path.parent, "completions")
    expected = events(alone, "completions")[rollouts_done:]
    assert [each["completions"] for each in found] == [each["completions"] for each in expected]
    same_tensors(weights(path.parent), weights(alone))


def test_two_processes_resume_what_one_has_begun(root: Path, alone: Path) -> None:
    path = plan(root, "resumed-on-two", 2, checkpoint=SAVED_TWICE)
    copy_checkpoint(alone, path, 4)
    run_plans([path], 2)
    found = figures(path.parent, "step", STEP)
    for values, expected in zip(found, figures(alone, "step", STEP)[4:], strict=True):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_partial_completions_are_not_learned_by_a_run_without_segments(
    root: Path, alone: Path
) -> None:
    path = plan(root, "whole", 1, partial=False)
    copy_checkpoint(alone, path, 4)
    with pytest.raises(AssertionError, match="has completions that are sampled in part"):
        run_plans([path], 1)


class LimitedServer(StubServer):
    """A slow server that notes how many tokens it is asked for after each hand-over."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # Number of hand-overs and most tokens of each request.
        self.limits: list[tuple[int, int]] = []

    def load(self, path: str) -> None:
        assert self.at_once == 0, "no request is under way when weights change"
        super().load(path)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.limits.append((self.loads, body["max_tokens"]))
        time.sleep(0.02)
        return super().complete(body)


def test_no_call_to_a_server_is_longer_than_a_segment(root: Path, alone: Path) -> None:
    with LimitedServer(read_model(root / "model")) as server:
        served = train_by(root, "served", {"kind": "vllm", "url": server.url})
    # The server's completions are those of the policy's own sampler.
    require_equal(served, alone, 1e-4)
    # Rollout 0 is sampled whole, and before each rollout but the last one there is a call for later ones.
    assert server.loads == ROLLOUTS
    asked = [(call, tokens) for call, tokens in server.limits if call > 2]
    assert max(tokens for _, tokens in asked) == MOST_TOKENS
    # Each call has at most a segment of each completion of three rollouts, and the prompts of a probe.
    for call in {call for call, _ in asked}:
        requests = [tokens for each, tokens in asked if each == call]
        assert len(requests) <= AHEAD * PROMPTS * GROUP + PROBES
    assert all(gap is not None for gap in column(served, "sampler_gap", "rollout"))


def test_sglang_and_continuous_batching_sample_segments_alike(root: Path, alone: Path) -> None:
    with SGLangStub(read_model(root / "model")) as server:
        by_sglang = train_by(root, "sglang", {"kind": "sglang", "url": server.url})
    require_equal(by_sglang, alone, 1e-4)
    continuous = train_by(root, "continuous", {"kind": "continuous"})
    require_equal(continuous, alone, 1e-4)


def test_completions_that_have_ended_are_not_continued(root: Path) -> None:
    """Of a rollout all completions end in their first segment, so that learning waits for no later call."""
    stop = list(string.ascii_letters + " .,")
    generator = {"kind": "hf", "max_new_tokens": MAX_NEW_TOKENS, "stop": stop}
    runs = []
    for world_size in (1, 2):
        path = plan(root, f"stopped-{world_size}", world_size, generator=generator)
        run_plans([path], world_size)
        runs.append(path.parent)
    require_equal(runs[1], runs[0], 1e-5)
    assert min(column(runs[0], "length_max", "rollout")) <= MOST_TOKENS
    for event in events(runs[0], "completions"):
        for completion in event["completions"]:
            assert len(versions_in(completion)) == completion["tokens"]
            assert completion["ended"] or completion["tokens"] == MAX_NEW_TOKENS

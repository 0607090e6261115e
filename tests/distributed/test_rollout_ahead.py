"""Rollouts that are sampled several rollouts ahead: which weights sample which prompts is a function
of the step, whatever the world size, the sampler, its speed, and whether the run was broken off."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.rl.generate import request_seed
from tests.distributed.ahead_runs import (
    GROUP,
    PROMPTS,
    ROLLOUT,
    SEED,
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
from tests.harness import Sections, column, events, same_tensors, weights, weights_at
from tests.tiny import read_model, tiny_model_dir
from tests.vllm_stub import StubServer

pytestmark = pytest.mark.timeout(900)
AHEAD = 2
MAX_NEW_TOKENS = 6
GRPO = grpo(MAX_NEW_TOKENS, ahead=AHEAD)
# The versions of the weights that sample the five rollouts: steps after which they were exported, which
# are max(0, first step − AHEAD × STEPS_PER_ROLLOUT).
VERSIONS = [0, 0, 0, 2, 4]


class SlowServer(StubServer):
    """A server that needs a while for a completion, and notes what it is asked for by which weights."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # The final norm of each hand-over.
        self.norms: list[torch.Tensor] = []
        # Number of hand-overs → seeds of the completions that were begun after as many.
        self.seeds: dict[int, set[int]] = defaultdict(set)

    def load(self, path: str) -> None:
        assert self.at_once == 0, "no request is under way when weights change"
        super().load(path)
        self.norms.append(self.model.get_parameter("model.norm.weight").detach().clone())

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.seeds[self.loads].add(body["seed"])
        time.sleep(0.05)
        answer = super().complete(body)
        assert body["seed"] in self.seeds[self.loads], "the same weights until the end"
        return answer


def plan(
    root: Path, name: str, world_size: int, checkpoint: Sections = UNSAVED, **options: Any
) -> Path:
    """Plan a run. `options`: keys of its algorithm."""
    return plan_ahead(root, name, world_size, {**GRPO, **options}, checkpoint)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    tiny_model_dir(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    """The run of one process, with a checkpoint after each rollout."""
    return train_alone(root, GRPO)


def test_a_rollout_is_sampled_by_the_weights_of_the_schedule(alone: Path) -> None:
    first_steps = range(0, STEPS, STEPS_PER_ROLLOUT)
    expected = [step - version for step, version in zip(first_steps, VERSIONS, strict=True)]
    assert column(alone, "staleness", "rollout") == expected
    versions = []
    for event in events(alone, "completions"):
        versions.append({each["version"] for each in event["completions"]})
    assert versions == [{version} for version in VERSIONS]
    first, *later = figures(alone, "step", ("importance_mean",))
    assert abs(first[0] - 1) < 1e-5
    assert all(abs(mean[0] - 1) > 1e-5 for mean in later[1:])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_several_processes_learn_what_one_does(root: Path, alone: Path, world_size: int) -> None:
    path = plan(root, f"on-{world_size}", world_size)
    run_plans([path], world_size)
    require_equal(path.parent, alone, 1e-5)


@pytest.mark.parametrize("step", [2, 6])
def test_a_run_that_goes_on_learns_from_the_pending_rollouts(
    root: Path, alone: Path, step: int
) -> None:
    """After the rollout whose weights sample a later one, and where all weights have moved."""
    path = plan(root, f"resumed-{step}", 1, checkpoint=SAVED_TWICE)
    copy_checkpoint(alone, path, step)
    run_plans([path], 1)
    rollouts_done = step // STEPS_PER_ROLLOUT
    assert figures(path.parent, "step", STEP) == figures(alone, "step", STEP)[step:]
    rollouts = figures(path.parent, "rollout", ROLLOUT)
    assert rollouts == figures(alone, "rollout", ROLLOUT)[rollouts_done:]
    same_tensors(weights(path.parent), weights(alone))


def test_a_server_gets_the_weights_when_it_has_sampled_the_rollout_before(
    root: Path, alone: Path
) -> None:
    with SlowServer(read_model(root / "model")) as server:
        sampler = {"kind": "vllm", "url": server.url, "max_new_tokens": MAX_NEW_TOKENS}
        path = plan(root, "served", 1, generator=sampler)
        run_plans([path], 1)

    # The server's completions are those of the policy's own sampler.
    require_equal(path.parent, alone, 1e-4)
    # One hand-over a rollout, each with the weights of the schedule.
    first_norm = read_model(root / "model").get_parameter("model.norm.weight")
    for norm, version in zip(server.norms, VERSIONS, strict=True):
        expected = first_norm
        if version:
            saved = weights_at(alone / "checkpoints" / f"step-{version:08}")
            (expected,) = (saved[name] for name in saved if name.endswith("model.norm.weight"))
        assert torch.allclose(norm, expected, rtol=1e-5, atol=1e-6)
    for rollout in range(len(VERSIONS)):
        assert server.seeds[rollout + 1] >= seeds_of(rollout)
        for other in range(len(VERSIONS)):
            assert other == rollout or not server.seeds[other + 1] & seeds_of(rollout)
    # Those that were set aside are not checked, and they are no longer on the disk.
    gaps = column(path.parent, "sampler_gap", "rollout")
    assert gaps[0] is not None
    assert gaps[2] is None
    assert len(list((path.parent / "rollout-weights").iterdir())) == 1


def seeds_of(rollout: int) -> set[int]:
    """Return the seeds of the requests of a rollout."""
    seeds = set()
    for prompt in range(PROMPTS):
        for index in range(GROUP):
            key = (rollout * PROMPTS + prompt, index)
            seeds.add(request_seed(SEED, rollout * STEPS_PER_ROLLOUT, key))
    return seeds

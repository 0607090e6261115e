"""Online DPO samples, pairs and learns the same however policy and reference are spread, and after a
restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.train.setup import Request
from tests.distributed.ranks import run_plans
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import (
    EIGHT_BY_FOUR,
    UNSAVED,
    claim,
    merge,
    plan_in,
    same_evaluations,
    slug,
)
from tests.distributed.test_distill import WAYS, Way, pairs_of, train_pairs
from tests.harness import LETTERS, Sections, column, events, losses, same_weights, write_config
from tests.tiny import tiny_model_dir

ONLINE_DPO: Sections = {
    "kind": "online_dpo",
    "loss_chunk": 32,
    "generator": {"kind": "hf", "max_new_tokens": 6},
    "rewards": [LETTERS],
}
CASES: dict[str, Sections] = {
    "two": {"algorithm": ONLINE_DPO},
    # Two steps of a rollout, twice; the reference is the policy without its adapter.
    "best of four, lora": {
        "algorithm": {
            **ONLINE_DPO,
            "group_size": 4,
            "loss": "ipo",
            "minibatches": 2,
            "epochs": 2,
            "dynamic_sampling": 1,
        },
        "adapter": {"kind": "lora", "r": 4},
    },
    "in turns": {
        "algorithm": {
            **ONLINE_DPO,
            "loss": "hinge",
            "generator": {**ONLINE_DPO["generator"], "stop": list("aeiou"), "temperature": 1.5},
            "rewards": [{"kind": "environment"}],
            "environment": {
                "kind": "class",
                "path": "tests.episodes:Vowels",
                "turns": 3,
                "max_tokens": 48,
            },
        },
        "data": {"max_length": 128},
    },
}
pytestmark = pytest.mark.timeout(3000)


KEPT = {("ddp, accumulation", "best of four, lora"), ("fsdp2", "two")}
# Both completions of a pair have a prompt in common, so gradients nearly cancel: steps must not be
# made of the entries that are rounding alone.
BASE: Sections = {
    "batch": EIGHT_BY_FOUR,
    "optimizer": {"lr": 3e-3, "eps": 1e-4},
    "checkpoint": {**UNSAVED, "every": 4},
    "run": {"steps": 4},
}
OF_STEPS = ("pairs", "accuracy", "margin", "reward_chosen", "log_prob_rejected", "kl", "tokens")
OF_ROLLOUTS = ("length", "ended", "episodes", "drawn", "groups_differ", "failures")


def pairs() -> list[Any]:
    return pairs_of(WAYS, CASES, KEPT)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("online_dpo")
    model = tiny_model_dir(root / "model")

    def plan(name: str, world_size: int, case: str, *sections: Sections) -> Path:
        settings = merge(BASE, CASES[case], *sections)
        folder = root / name
        folder.mkdir()
        return plan_in(folder, "one", world_size, model, **settings)

    train_pairs(request.session, __file__, root, plan)
    return root


@pytest.mark.claim("online DPO has the numbers of one process on any number of them")
@pytest.mark.parametrize(("way", "case"), pairs())
def test_same_pairs_losses_and_weights_as_one_process(runs: Path, way: Way, case: str) -> None:
    mine = runs / slug(way.name, case) / "one" / "run"
    alone = runs / slug(case) / "one" / "run"
    apart = difference(mine, alone)
    assert apart.largest <= TOLERANCE, apart
    assert len(events(mine, "step")) == 4
    for key in OF_STEPS:
        # In the first step policy and reference are equal, and rounding alone gives the margin's sign.
        first = 1 if key == "accuracy" else 0
        expected = pytest.approx(column(alone, key)[first:], rel=TOLERANCE, abs=1e-6)
        assert column(mine, key)[first:] == expected, key
    for key in OF_ROLLOUTS:
        assert column(mine, key, "rollout") == column(alone, key, "rollout"), key
    for key in ("reward", "length"):
        same_evaluations(mine, alone, TOLERANCE, key)
    same_weights(mine, alone, 1e-5)
    assert min(column(alone, "pairs")) > 0
    assert max(column(alone, "kl")) > 0
    assert min(column(alone, "grad_norm")) > 1e-3


def test_a_step_learns_from_the_groups_whose_rewards_differ(runs: Path) -> None:
    """A pair of each group in a rollout of eight groups; the others are fillers."""
    found = sorted(runs.glob("*/one/run"))
    assert found
    for run in found:
        differ = column(run, "groups_differ", "rollout")
        prompts = column(run, "prompts", "rollout")
        by_step = column(run, "pairs")
        steps = len(by_step) // len(differ)
        epochs = steps * 8 // prompts[0]
        for number, share in enumerate(differ):
            of_rollout = by_step[number * steps : (number + 1) * steps]
            assert sum(of_rollout) == pytest.approx(epochs * share * prompts[number])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models") / "model")


def plan_of(folder: Path, model: Path, resume: Resume | None = None) -> Path:
    """A run of two ranks with checkpoints of steps 2 and 4."""
    folder.mkdir(exist_ok=True)
    path = write_config(folder, model, algorithm=ONLINE_DPO, strategy="ddp", batch=EIGHT_BY_FOUR)
    return claim(Request(load(path, []), world_size=2, resume=resume))


def test_a_resumed_run_has_the_same_numbers(tmp_path: Path, model: Path) -> None:
    """The reference is the model from which the first run started."""
    folder = tmp_path / "a"
    run = folder / "run"
    run_plans([plan_of(folder, model)], 2)
    whole = losses(run)
    rollouts = column(run, "reward", "rollout")
    chosen = column(run, "reward_chosen")
    assert len(whole) == 4
    assert chosen[0] == pytest.approx(0, abs=1e-5)
    assert abs(chosen[-1]) > 1e-4
    shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    run_plans([plan_of(folder, model, Resume())], 2)
    assert [event["step"] for event in events(run, "restore")] == [2]
    assert losses(run) == whole
    assert column(run, "reward", "rollout") == [*rollouts, *rollouts[2:]]
    assert column(run, "reward_chosen") == [*chosen, *chosen[2:]]
    same_weights(run, tmp_path / "whole", 0.0)

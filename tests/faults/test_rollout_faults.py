"""Killed in the middle of a rollout, and resumed: the same trajectory as a run that was left alone,
bit for bit on the same world size.

The curriculum's success rates, what its domains are owed, and the steered KL coefficient come back;
so do sampled episodes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.live import gone, kill, wait_for
from tests.harness import (
    column,
    drumline,
    events,
    run_drumline,
    same_tensors,
    start_drumline,
    weights,
    write_config,
)
from tests.tiny import tiny_model_dir

# Slow enough for the kill to fall between two steps, into the sampling and scoring of the next
# rollout.
SLOW = """
import time

def slow(prompt, completion, **_):
    time.sleep(0.1)
    return float(sum(letter in "aeiou" for letter in completion))
"""
# Episodes of several turns, whose environments are slow, too.
IN_TURNS: dict[str, Any] = {
    "environment": {
        "kind": "class",
        "path": "tests.episodes:Vowels",
        "options": {"seconds": 0.1},
        "turns": 4,
        "max_tokens": 40,
    },
    "generator": {"kind": "hf", "max_new_tokens": 6, "stop": list("aeiou")},
}
STEP = (
    "step",
    "loss",
    "grad_norm",
    "tokens",
    "samples",
    "entropy",
    "ratio_max",
    "kl_coefficient",
)
ROLLOUT = (
    "step",
    "reward",
    "reward_std",
    "drawn",
    "shares",
    "kl",
    "kl_coefficient",
    "length",
    "groups_differ",
)


def told(run: Path, kind: str, keys: tuple[str, ...]) -> dict[int, Any]:
    """Step → these fields, the last word on each."""
    found = {}
    for event in events(run, kind):
        found[event["step"]] = [event[key] for key in keys]
    return found


def rows_of(domain: str, limit: int) -> dict[str, Any]:
    """A source of that many rows, which are said to be of one domain."""
    return {"kind": "file", "path": "train.jsonl", "domain": domain, "limit": limit}


GRPO: dict[str, Any] = {
    "kind": "grpo",
    "group_size": 4,
    "kl": {"coefficient": 0.05, "target": 0.01, "horizon": 50},
}


def slow_rewards(folder: Path, model: Path, options: dict[str, Any]) -> Path:
    """A run of two ranks over two domains of rows; `options`: keys of its algorithm."""
    (folder / "slow.py").write_text(SLOW)
    algorithm = {
        "loss_chunk": 32,
        "generator": {"kind": "hf", "max_new_tokens": 6},
        "rewards": [{"kind": "function", "path": "slow.py:slow"}],
        "reward_workers": 2,
        "curriculum": {"kind": "success", "solved": 3.0},
    }
    return write_config(
        folder,
        model,
        algorithm={**algorithm, **options},
        adapter={"kind": "lora", "r": 4},
        data={"train": [rows_of("one", 10), rows_of("two", 20)]},
        launch={"nproc": 2},
        batch={"global_samples": 8, "micro_batch": 2},
        optimizer={"lr": 1e-2},
        run={"steps": 16},
        checkpoint={"every": 4, "export": "none"},
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"minibatches": 2, "epochs": 2, "dynamic_sampling": 1},
        {"minibatches": 4, "ahead": 1},
        {"minibatches": 2, "ahead": 3},
        {"minibatches": 2, "ahead": 3, "partial": True},
        {"minibatches": 4, **IN_TURNS},
        {"minibatches": 4, "ahead": 1, **IN_TURNS},
    ],
    ids=["one after another", "ahead", "far ahead", "in segments", "in turns", "turns ahead"],
)
def test_killed_in_a_rollout_then_resumed(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    config = slow_rewards(tmp_path, model, {**GRPO, **options})
    run, alone = kill_and_resume(config, tmp_path)
    assert told(run, "step", STEP) == told(alone, "step", STEP)
    assert told(run, "rollout", ROLLOUT) == told(alone, "rollout", ROLLOUT)
    assert len(set(column(alone, "kl_coefficient", "rollout"))) > 1
    require_same_weights(run, alone)


@pytest.mark.full
def test_distillation_killed_in_a_rollout_then_resumed(model: Path, tmp_path: Path) -> None:
    """Half of the completions are those of rows, and they are the same rows again."""
    options = {
        "kind": "gkd",
        "teacher": {"id": str(tiny_model_dir(tmp_path / "teacher", layers=4, seed=7))},
        "on_policy_share": 0.5,
        "minibatches": 4,
    }
    run, alone = kill_and_resume(slow_rewards(tmp_path, model, options), tmp_path)
    of_step = ("step", "loss", "grad_norm", "tokens", "samples", "kl")
    assert told(run, "step", of_step) == told(alone, "step", of_step)
    of_rollout = ("step", "reward", "drawn", "shares", "length", "from_rows")
    assert told(run, "rollout", of_rollout) == told(alone, "rollout", of_rollout)
    assert min(column(alone, "from_rows", "rollout")) > 0
    require_same_weights(run, alone)


@pytest.mark.full
def test_online_dpo_killed_in_a_rollout_then_resumed(model: Path, tmp_path: Path) -> None:
    """The reference is the policy without its adapter, also after the restart."""
    options = {"kind": "online_dpo", "group_size": 4, "minibatches": 2, "dynamic_sampling": 1}
    run, alone = kill_and_resume(slow_rewards(tmp_path, model, options), tmp_path)
    of_step = ("step", "loss", "grad_norm", "tokens", "samples", "pairs", "margin", "kl")
    assert told(run, "step", of_step) == told(alone, "step", of_step)
    of_rollout = ("step", "reward", "drawn", "shares", "length", "groups_differ")
    assert told(run, "rollout", of_rollout) == told(alone, "rollout", of_rollout)
    assert max(column(alone, "pairs")) > 0
    require_same_weights(run, alone)


def kill_and_resume(config: Path, folder: Path) -> tuple[Path, Path]:
    """Return a run that was killed in a rollout and then resumed, and one that was left alone."""
    alone = folder / "alone"
    run = folder / "run"
    run_drumline("train", config, f"run.dir={alone}")

    process = start_drumline("train", config, f"run.dir={run}")
    wait_for(run, "save", 4, process)
    wait_for(run, "step", 8, process)
    time.sleep(0.3)
    kill(process.pid)
    process.communicate(timeout=60)
    assert gone(run, 2.0), "ranks outlived their launcher"
    assert max(column(run, "step")) < 16
    assert not events(run, "run_end")

    run_drumline("train", config, f"run.dir={run}", "--resume")
    assert column(run, "step", "restore")[-1] in (4, 8)
    return run, alone


def require_same_weights(run: Path, alone: Path) -> None:
    """Assert that the weights of two runs are equal, bit for bit."""
    got = weights(run)
    expected = weights(alone)
    assert got.keys() == expected.keys()
    same_tensors(got, expected)


BY_DOMAIN = """
def first(prompt, completion, domain):
    return float(len(completion)) if domain == "one" else None

def second(prompt, completion, domain):
    return float(completion.count("e")) if domain == "two" else None
"""


def domain_rewards(folder: Path, model: Path, *functions: str) -> Path:
    """A run of two steps over two domains of rows, rewarded by these functions."""
    (folder / "mine.py").write_text(BY_DOMAIN)
    rewards = [{"kind": "function", "path": f"mine.py:{name}"} for name in functions]
    return write_config(
        folder,
        model,
        algorithm={
            "kind": "grpo",
            "group_size": 4,
            "generator": {"kind": "hf", "max_new_tokens": 6},
            "rewards": rewards,
            "reward_workers": 1,
        },
        data={"train": [rows_of("one", 10), rows_of("two", 10)]},
        batch={"global_samples": 16, "micro_batch": 8},
        run={"steps": 2, "dir": str(folder / "run")},
        checkpoint={"export": "none"},
    )


@pytest.mark.slow
def test_rewards_that_do_not_apply_leave_the_others_to_decide(model: Path, tmp_path: Path) -> None:
    run_drumline("train", domain_rewards(tmp_path, model, "first", "second"))
    for rollout in events(tmp_path / "run", "rollout"):
        assert rollout["left_out"] == 0
        assert not rollout["failures"]
        assert set(rollout["rewards"]) == {"first", "second"}
        assert rollout["reward"] is not None


@pytest.mark.slow
def test_a_run_in_which_no_reward_applied_is_not_finished(model: Path, tmp_path: Path) -> None:
    config = domain_rewards(tmp_path, model, "first")
    one_domain = "data.train=[{kind: file, path: train.jsonl, domain: two}]"
    done = drumline("train", config, one_domain)
    said = done.out + done.err
    assert done.code == 3, said
    assert "no episode of this run got a reward" in done.err
    assert "no reward applies (16×)" in done.err
    assert column(tmp_path / "run", "left_out", "rollout") == [16, 16]
    assert "no reward applies to 16 of 16 episodes" in said

"""Killed in the middle of a rollout, and resumed: the same trajectory as a run that was left alone, bit for bit on the same world size.

The curriculum's success rates, what its domains are owed, and the steered KL coefficient come back; so do sampled episodes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.live import gone, kill, wait_for
from tests.harness import drumline, events, start_drumline, weights, write_config
from tests.tiny import tiny_model_dir

# Slow enough for the kill to fall between two steps, into the sampling and scoring of the next rollout.
SLOW = """
import time

def slow(prompt, completion, **_):
    time.sleep(0.1)
    return float(sum(letter in "aeiou" for letter in completion))
"""
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
    return {event["step"]: {key: event[key] for key in keys} for event in events(run, kind)}


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"minibatches": 2, "epochs": 2, "dynamic_sampling": 1}, {"minibatches": 4, "ahead": 1}],
    ids=["one after another", "ahead"],
)
def test_killed_in_a_rollout_then_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        algorithm={
            "kind": "grpo",
            "group_size": 4,
            "loss_chunk": 32,
            "generator": {"kind": "hf", "max_new_tokens": 6},
            "rewards": [{"kind": "function", "path": "slow.py:slow"}],
            "reward_workers": 2,
            "curriculum": {"kind": "success", "solved": 3.0},
            "kl": {"coefficient": 0.05, "target": 0.01, "horizon": 50},
            **options,
        },
        adapter={"kind": "lora", "r": 4},
        data={
            "train": [
                {"kind": "file", "path": "train.jsonl", "domain": d, "limit": n}
                for d, n in (("one", 10), ("two", 20))
            ]
        },
        launch={"nproc": 2},
        batch={"global_samples": 8, "micro_batch": 2},
        optimizer={"lr": 1e-2},
        run={"steps": 16},
        checkpoint={"every": 4, "export": "none"},
    )
    alone, run = tmp_path / "alone", tmp_path / "run"
    finished = drumline("train", config, f"run.dir={alone}")
    assert finished.code == 0, finished.err
    process = start_drumline("train", config, f"run.dir={run}")
    wait_for(run, "save", 4, process)
    wait_for(run, "step", 8, process)
    time.sleep(0.3)
    kill(process.pid)
    process.communicate(timeout=60)
    assert gone(str(run), 2.0), "ranks outlived their launcher"
    assert max(event["step"] for event in events(run, "step")) < 16 and not events(run, "run_end")
    resumed = drumline("train", config, f"run.dir={run}", "--resume")
    assert resumed.code == 0, resumed.out + resumed.err
    assert events(run, "restore")[-1]["step"] in (4, 8)
    steps = (
        "step",
        "loss",
        "grad_norm",
        "tokens",
        "samples",
        "entropy",
        "ratio_max",
        "kl_coefficient",
    )
    assert told(run, "step", steps) == told(alone, "step", steps)
    assert told(run, "rollout", ROLLOUT) == told(alone, "rollout", ROLLOUT)
    assert len({event["kl_coefficient"] for event in events(alone, "rollout")}) > 1
    got, expected = weights(run), weights(alone)
    assert got.keys() == expected.keys() and all(
        (got[name] == expected[name]).all() for name in expected
    )


BY_DOMAIN = """
def first(prompt, completion, domain):
    return float(len(completion)) if domain == "one" else None

def second(prompt, completion, domain):
    return float(completion.count("e")) if domain == "two" else None
"""


def domain_rewards(folder: Path, *functions: str) -> Path:
    """A run of two steps over two domains of rows, rewarded by these functions."""
    (folder / "mine.py").write_text(BY_DOMAIN)
    sources = [
        {"kind": "file", "path": "train.jsonl", "domain": domain, "limit": 10}
        for domain in ("one", "two")
    ]
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
        algorithm={
            "kind": "grpo",
            "group_size": 4,
            "generator": {"kind": "hf", "max_new_tokens": 6},
            "rewards": [{"kind": "function", "path": f"mine.py:{name}"} for name in functions],
            "reward_workers": 1,
        },
        data={"train": sources},
        batch={"global_samples": 16, "micro_batch": 8},
        run={"steps": 2, "dir": str(folder / "run")},
        checkpoint={"export": "none"},
    )


@pytest.mark.slow
def test_rewards_that_do_not_apply_leave_the_others_to_decide(tmp_path: Path) -> None:
    done = drumline("train", domain_rewards(tmp_path, "first", "second"))
    assert done.code == 0, done.out + done.err
    for rollout in events(tmp_path / "run", "rollout"):
        assert rollout["left_out"] == 0 and not rollout["failures"]
        assert set(rollout["rewards"]) == {"first", "second"} and rollout["reward"] is not None


@pytest.mark.slow
def test_a_run_in_which_no_reward_applied_is_not_finished(tmp_path: Path) -> None:
    config = domain_rewards(tmp_path, "first")
    one_domain = "data.train=[{kind: file, path: train.jsonl, domain: two}]"
    done = drumline("train", config, one_domain)
    assert done.code == 3, done.out + done.err
    assert (
        "no episode of this run got a reward" in done.err and "no reward applies (16×)" in done.err
    )
    assert [event["left_out"] for event in events(tmp_path / "run", "rollout")] == [16, 16]
    assert "no reward applies to 16 of 16 episodes" in done.out + done.err

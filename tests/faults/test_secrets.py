"""A whole run with secrets in its config and a reward that tells them: they are in no file of it, and on no command line."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.harness import ENV, drumline, events, write_config
from tests.tiny import tiny_model_dir

REWARD = """
import sys

def tells(prompt, completion, api_key, mine, **_):
    assert (api_key, mine) == ("hunter2hunter2", "open-sesame")
    print("printed", api_key, file=sys.stderr, flush=True)
    raise ValueError(f"no access with {api_key} and {mine}, nor postgres://me:hunter2@db")
"""
SECRETS = (b"hunter2", b"open-sesame")


@pytest.mark.claim("secrets are written nowhere")
def test_secrets_are_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run whose rewards all fail stops with exit code 3, saying why."""
    (tmp_path / "mine.py").write_text(REWARD)
    options = {"api_key": "hunter2hunter2", "mine": "${env:MY_VALUE}"}
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data={
            "train": [{"kind": "tasks", "tasks": {"gcd": {}}, "size": 8}],
            "eval": [],
            "max_length": 200,
        },
        algorithm={
            "kind": "grpo",
            "group_size": 2,
            "generator": {"kind": "hf", "max_new_tokens": 4},
            "rewards": [{"kind": "function", "path": "mine.py:tells", "options": options}],
            "reward_workers": 1,
            "reward_failure": {"rollouts": 2},
        },
        batch={"global_samples": 4, "micro_batch": 4},
        eval={"at_start": False},
        checkpoint={"every": 1, "export": "none"},
        run={"steps": 6, "report_to": []},
    )
    run = tmp_path / "run"
    unset = drumline("train", config)
    assert unset.code == 2 and not run.exists()
    (line,) = unset.error_lines
    assert (
        "algorithm.rewards[0].options: the environment variable 'MY_VALUE', which 'mine' names, is not set"
        in line
    )

    monkeypatch.setitem(ENV, "MY_VALUE", "open-sesame")
    finished = drumline("train", config)
    assert finished.code == 3, finished.err
    (line,) = finished.error_lines
    raises = REWARD[: REWARD.index("raise ")].count("\n") + 1
    told = f"tells raised ValueError in mine.py:{raises}: no access with [redacted]"
    assert f"100% of the episodes got no reward, in rollout 2 of such in a row: {told}" in line
    assert [event["step"] for event in events(run, "step")] == [1] and events(run, "run_end")[-1][
        "status"
    ] == "stopped"
    (reason,) = events(run, "rollout")[-1]["failures"]["tells"]
    assert (
        reason
        == f"raised ValueError in mine.py:{raises}: no access with [redacted] and [redacted], nor postgres://me:[redacted]@db"
    )

    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [
        (path, secret) for path in files for secret in SECRETS if secret in path.read_bytes()
    ]
    assert not any(
        secret.decode() in text for secret in SECRETS for text in (finished.out, finished.err)
    )
    assert "printed [redacted]" in (run / "logs/attempt-0/rank-0.log").read_text()
    private = [run / "plan.json", run / "config.yaml", *run.glob("checkpoints/*/state.json")]
    assert len(private) >= 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)
    kept = json.loads((run / "plan.json").read_text())["config"]["algorithm"]["rewards"][0][
        "options"
    ]
    assert kept == {
        "api_key": "${env:DRUMLINE_SECRET_ALGORITHM_REWARDS_0_OPTIONS_API_KEY}",
        "mine": "${env:MY_VALUE}",
    }

    lost = drumline("train", run / "config.yaml", f"run.dir={run}", "--resume")
    assert (
        lost.code == 2 and "options: the secret 'api_key' is not kept in the run folder" in lost.err
    )
    again = drumline(
        "train",
        config,
        "--resume",
        "algorithm.reward_failure.action=continue",
        "run.steps=2",
        "--allow",
        "run.steps",
    )
    assert again.code == 3 and "no episode of this run got a reward" in again.err, again.err

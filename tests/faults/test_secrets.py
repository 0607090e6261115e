"""A whole run with secrets in its config and a reward that tells them: they are in no file of it,
and on no command line."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.harness import ENV, column, drumline, events, write_config

REWARD = """
import sys

def tells(prompt, completion, api_key, mine, **_):
    assert (api_key, mine) == ("hunter2hunter2", "open-sesame")
    print("printed", api_key, file=sys.stderr, flush=True)
    raise ValueError(f"no access with {api_key} and {mine}, nor postgres://me:hunter2@db")
"""
RAISES = REWARD[: REWARD.index("raise ")].count("\n") + 1  # the line that does
SECRETS = ("hunter2", "open-sesame")


def telling_rewards(folder: Path, model: Path) -> Path:
    """A run whose reward gets two secrets, one of them from the environment, and fails."""
    (folder / "mine.py").write_text(REWARD)
    reward = {
        "kind": "function",
        "path": "mine.py:tells",
        "options": {"api_key": "hunter2hunter2", "mine": "${env:MY_VALUE}"},
    }
    return write_config(
        folder,
        model,
        data={
            "train": [{"kind": "tasks", "tasks": {"gcd": {}}, "size": 8}],
            "eval": [],
            "max_length": 200,
        },
        algorithm={
            "kind": "grpo",
            "group_size": 2,
            "generator": {"kind": "hf", "max_new_tokens": 4},
            "rewards": [reward],
            "reward_workers": 1,
            "reward_failure": {"rollouts": 2},
        },
        batch={"global_samples": 4, "micro_batch": 4},
        eval={"at_start": False},
        checkpoint={"every": 1, "export": "none"},
        run={"steps": 6, "report_to": []},
    )


def require_redacted(run: Path) -> None:
    """Require that no file has a secret, and that those of the config are the user's alone."""
    for path in run.rglob("*"):
        if path.is_file():
            for secret in SECRETS:
                assert secret.encode() not in path.read_bytes(), path

    private = [run / "plan.json", run / "config.yaml", *run.glob("checkpoints/*/state.json")]
    assert len(private) >= 3
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.claim("secrets are written nowhere")
def test_secrets_are_in_no_file_of_a_run(
    model: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run whose rewards all fail stops with exit code 3, saying why."""
    config = telling_rewards(tmp_path, model)
    unset = drumline("train", config)
    assert unset.code == 2
    assert not run_dir.exists()
    (line,) = unset.error_lines
    missing = "the environment variable 'MY_VALUE', which 'mine' names, is not set"
    assert f"algorithm.rewards[0].options: {missing}" in line

    monkeypatch.setitem(ENV, "MY_VALUE", "open-sesame")
    finished = drumline("train", config)
    assert finished.code == 3, finished.err
    (line,) = finished.error_lines
    told = f"raised ValueError in mine.py:{RAISES}: no access with [redacted]"
    failed = "100% of the episodes got no reward (2 such rollouts in a row)"
    assert f"{failed}: tells {told}" in line
    assert column(run_dir, "step") == [1]
    assert column(run_dir, "status", "run_end")[-1] == "stopped"
    failures = events(run_dir, "rollout")[-1]["failures"]
    (reason,) = failures["tells"]
    assert reason == f"{told} and [redacted], nor postgres://me:[redacted]@db"

    require_redacted(run_dir)
    for secret in SECRETS:
        assert secret not in finished.out
        assert secret not in finished.err
    assert "printed [redacted]" in (run_dir / "logs/attempt-0/rank-0.log").read_text()
    plan = json.loads((run_dir / "plan.json").read_text())
    (reward,) = plan["config"]["algorithm"]["rewards"]
    assert reward["options"] == {
        "api_key": "${env:DRUMLINE_SECRET_ALGORITHM_REWARDS_0_OPTIONS_API_KEY}",
        "mine": "${env:MY_VALUE}",
    }

    lost = drumline("train", run_dir / "config.yaml", f"run.dir={run_dir}", "--resume")
    assert lost.code == 2
    assert "options: the secret 'api_key' is not kept in the run folder" in lost.err
    go_on = "algorithm.reward_failure.action=continue"
    shorter = ("run.steps=2", "--allow", "run.steps")
    again = drumline("train", config, "--resume", go_on, *shorter)
    assert again.code == 3, again.err
    assert "no episode of this run got a reward" in again.err, again.err

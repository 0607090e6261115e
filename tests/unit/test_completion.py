"""`drumline --install-completion`: what bash itself completes with the script that it installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drumline.config.complete import keys
from drumline.config.load import load_values
from tests.harness import ENV

# As pip writes it.
SCRIPT = f"#!{sys.executable}\nfrom drumline.cli import main\nmain()\n"
ASK = """
eval "$(drumline --show-completion bash)"
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _drumline_completion drumline; echo "$*:" "${COMPREPLY[@]}"; }
ask drumline tr
ask drumline train mine.yaml --dry
ask drumline train mine.yaml run.dev
ask drumline train mi
"""


@pytest.mark.slow
def test_bash_completes_commands_options_and_keys(tmp_path: Path) -> None:
    (tmp_path / "drumline").write_text(SCRIPT)
    (tmp_path / "drumline").chmod(0o755)
    env = {**ENV, "PATH": f"{tmp_path}:{ENV['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = {
        line.partition(": ")[0].split()[-1].rstrip(":"): line.partition(": ")[2].split()
        for line in done.stdout.splitlines()
    }
    assert "train" in found["tr"] and found["--dry"] == ["--dry-run"]
    assert found["run.dev"] == ["run.device=", "run.device=auto"]
    assert found["mi"] == []  # names of files are bash's own


@pytest.mark.slow
def test_keys_are_those_of_the_schema() -> None:
    every = keys("")
    assert len(every) > 250 and {
        "optimizer.lr",
        "strategy.offload",
        "batch.micro_batch",
        "data.train",
    } <= set(every)
    assert keys("optimizer.lr_sc") == ["optimizer.lr_scaling=", "optimizer.lr_scaling=none"]
    assert keys("data.tra") == ["data.train="], "it has no default"
    assert keys("nothing") == [] and keys("health.on_sp")[0] == "health.on_spike="
    values = {"data": {"train": [{"kind": "digits"}]}}
    defaults = [
        keys(key)[-1] for key in every if key.startswith(("run.s", "run.e", "health.on", "eval.e"))
    ]
    assert len(defaults) >= 5 and load_values(values, defaults).config.run.seed == 0

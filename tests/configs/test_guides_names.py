"""The names under which guides have files: each does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ENV, ROOT, write_config
from tests.tiny import tiny_model_dir


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        env={**ENV, "PYTHON": sys.executable},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_deepspeed_configs_are_the_examples() -> None:
    files = names_in(ROOT / "configs" / "deepspeed")
    assert files == names_in(ROOT / "examples" / "deepspeed")
    assert "zero3_offload.json" in files


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.full
def test_scripts_of_guides(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    prepared = run(
        sys.executable, ROOT / "scripts" / "prepare_datasets.py", "--config", config, cwd=tmp_path
    )
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout.startswith("train  "), prepared.stderr
    script = ROOT / "scripts" / "run_ddp.sh"
    assert os.access(script, os.X_OK)
    assert run(script, cwd=tmp_path).returncode == 2
    planned = run(script, config, "--dry-run", "launch.nproc=2", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "kind: ddp" in planned.stdout, planned.stderr


def test_flags_without_effect_are_said(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "scripts" / "run_distributed.py",
        "--config",
        "none.yaml",
        "--master_port",
        "29501",
    ]
    alone = run(*command, cwd=tmp_path)
    assert alone.returncode == 2
    assert "note: --master_port has no effect" in alone.stderr
    assert "none.yaml: no such file" in alone.stderr


def test_algorithms_by_a_guides_name(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    wrong = run(
        sys.executable,
        ROOT / "main.py",
        "--config",
        config,
        "--algorithm",
        "reward_model",
        "--mode",
        "plan",
        cwd=tmp_path,
    )
    assert "no kind" not in wrong.stderr
    assert "reward" in wrong.stdout + wrong.stderr

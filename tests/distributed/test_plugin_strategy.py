"""A strategy of an installed package: commands know of it without being told, and it trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ENV, ROOT, losses, same_weights, write_config
from tests.tiny import tiny_model_dir

PACKAGE = ROOT / "examples" / "plugins" / "strategy"
PAIR = ["--nproc", "2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into, without a network."""
    target, copy = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("package") / "strategy"
    shutil.copytree(PACKAGE, copy)  # pip builds in the folder of the package
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(copy),
    ]
    subprocess.run(pip, check=True, timeout=120, capture_output=True)
    return target


def drumline(installed: Path, *arguments: object) -> str:
    """What the command line prints, where the package is installed."""
    env = {
        **ENV,
        "PYTHONPATH": f"{installed}:{ENV['PYTHONPATH']}" if "PYTHONPATH" in ENV else str(installed),
    }
    command = [sys.executable, "-m", "drumline", *map(str, arguments)]
    made = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_commands_know_of_it(installed: Path) -> None:
    listed = drumline(installed, "strategies").splitlines()
    assert any(line.startswith("gossip ") for line in listed), listed
    assert '"gossip"' in drumline(installed, "schema")


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_on_a_ring_train_what_local_sgd_does(installed: Path, tmp_path: Path) -> None:
    """With two ranks the neighbours' mean is the mean of all, which local SGD of period 1 takes."""
    model = tiny_model_dir(tmp_path / "model")
    runs = {}
    for name in ("gossip", "local_sgd"):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, model, strategy={"kind": name, "period": 1})
        if name == "gossip":
            dry = drumline(installed, "train", config, *PAIR, "--dry-run")
            assert "gossip" in dry and "clips by its own gradient norm" in dry
        drumline(installed, "train", config, *PAIR)
        runs[name] = tmp_path / name / "run"
    assert losses(runs["gossip"]) == pytest.approx(losses(runs["local_sgd"]), rel=1e-6)
    same_weights(runs["gossip"], runs["local_sgd"], 1e-6)

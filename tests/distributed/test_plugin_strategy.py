"""A strategy of an installed package: commands know of it without being told, and it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.installing import install, interpret_drumline
from tests.harness import ROOT, losses, same_weights, write_config
from tests.tiny import tiny_model_dir

PACKAGE = ROOT / "examples" / "plugins" / "strategy"
PAIR = ["--nproc", "2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH that the package is in."""
    return install(PACKAGE, tmp_path_factory.mktemp("package"))


def test_commands_know_of_it(installed: str) -> None:
    listed = interpret_drumline(installed, "strategies")
    assert "\ngossip " in f"\n{listed}"
    assert '"gossip"' in interpret_drumline(installed, "schema")


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_on_a_ring_train_what_local_sgd_does(installed: str, tmp_path: Path) -> None:
    """With two ranks the neighbours' mean is the mean of all, which local SGD of period 1 takes."""
    model = tiny_model_dir(tmp_path / "model")
    runs = []
    for name in ("gossip", "local_sgd"):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, model, strategy={"kind": name, "period": 1})
        if name == "gossip":
            dry = interpret_drumline(installed, "train", config, *PAIR, "--dry-run")
            assert "gossip" in dry
            assert "clips by its own gradient norm" in dry
        interpret_drumline(installed, "train", config, *PAIR)
        runs.append(folder / "run")
    gossip, local_sgd = runs
    assert losses(gossip) == pytest.approx(losses(local_sgd), rel=1e-6)
    same_weights(gossip, local_sgd, 1e-6)

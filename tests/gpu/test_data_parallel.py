"""nn.DataParallel over GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.runs import same_losses, train
from tests.gpu.stand_in import NEEDS_CUDA, NEEDS_TWO_GPUS
from tests.harness import write_config
from tests.tiny import tiny_model_dir

pytestmark = NEEDS_CUDA


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The config of a run on GPUs in fp32."""
    model = tiny_model_dir(tmp_path / "model")
    return write_config(tmp_path, model, run={"device": "cuda"}, precision="fp32")


def test_all_gpus_of_the_machine_train_as_one(path: Path, tmp_path: Path) -> None:
    dp = train(path, tmp_path / "dp", "strategy=dp")
    single = train(path, tmp_path / "single", "strategy=single")
    same_losses(dp, single, 1e-4)


@NEEDS_TWO_GPUS
def test_several_gpus_take_part(path: Path, tmp_path: Path) -> None:
    run = train(path, tmp_path / "run", "strategy=dp")
    assert "cut over" in (run / "plan.json").read_text()

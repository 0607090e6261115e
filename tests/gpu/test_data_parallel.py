"""nn.DataParallel over GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import drumline, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 1, reason="needs a CUDA GPU; this machine has none"
)


def train(folder: Path, strategy: str) -> dict[int, float]:
    path = write_config(
        folder, tiny_model_dir(folder / "model"), run={"device": "cuda"}, precision="fp32"
    )
    done = drumline("train", path, f"strategy={strategy}")
    assert done.code == 0, done.err
    return losses(folder / "run")


def test_all_gpus_of_the_machine_train_as_one(tmp_path: Path) -> None:
    (tmp_path / "dp").mkdir()
    (tmp_path / "single").mkdir()
    assert train(tmp_path / "dp", "dp") == pytest.approx(
        train(tmp_path / "single", "single"), rel=1e-4
    )


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs; this machine has {torch.cuda.device_count()}",
)
def test_several_gpus_take_part(tmp_path: Path) -> None:
    train(tmp_path, "dp")
    assert "cut over" in (tmp_path / "run" / "plan.json").read_text()

"""DeepSpeed on a GPU: NCCL, bf16 and fp16 as it has them, offloading to host memory; ranks hold the numbers of the native engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.runs import memory_of_ranks, same_losses
from tests.gpu.stand_in import NEEDS_CUDA
from tests.harness import run_drumline, same_weights, write_config
from tests.tiny import tiny_model_dir

HAS_DEEPSPEED = find_spec("deepspeed") is not None
pytestmark = [
    NEEDS_CUDA,
    pytest.mark.skipif(
        not HAS_DEEPSPEED, reason="needs the package deepspeed; it is not installed"
    ),
]
OFFLOADED = {
    "kind": "zero3",
    "offload_optimizer": {"kind": "cpu", "pin_memory": True},
    "offload_parameters": "cpu",
}


def train(folder: Path, strategy: Any, precision: str) -> Path:
    """Train a model in `folder`, and return its run folder. DeepSpeed's own words are not shown."""
    folder.mkdir()
    path = write_config(
        folder,
        tiny_model_dir(folder / "model"),
        strategy=strategy,
        precision={"kind": precision, "tf32": False},
        run={"device": "cuda", "steps": 4},
    )
    finished = run_drumline("train", path, timeout=280)
    assert "DeepSpeed" not in finished.out.replace("deepspeed", "")
    assert "DeepSpeed" not in finished.err
    return folder / "run"


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the native engine on one GPU in fp32."""
    return train(tmp_path_factory.mktemp("deepspeed") / "native", "single", "fp32")


@pytest.mark.parametrize(
    "strategy",
    ["zero1", "zero2", "zero3", OFFLOADED],
    ids=["zero1", "zero2", "zero3", "zero3 offloaded"],
)
def test_as_the_native_engine(native: Path, tmp_path: Path, strategy: Any) -> None:
    run = train(tmp_path / "zero", strategy, "fp32")
    same_losses(run, native, 1e-4)
    same_weights(run, native, 1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_low_precision_stays_near(
    native: Path, tmp_path: Path, strategy: str, precision: str
) -> None:
    run = train(tmp_path / "zero", strategy, precision)
    same_losses(run, native, 3e-2)
    assert memory_of_ranks(run)[0] > 0

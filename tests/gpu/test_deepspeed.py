"""DeepSpeed on a GPU: NCCL, bf16 and fp16 as it has them, offloading to host memory; ranks hold the numbers of the native engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import drumline, events, losses, same_weights, write_config
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
    ),
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="needs the package deepspeed; it is not installed"
    ),
]
OFFLOADED = {
    "kind": "zero3",
    "offload_optimizer": {"kind": "cpu", "pin_memory": True},
    "offload_parameters": "cpu",
}


def run(folder: Path, strategy: Any, precision: str, *more: str) -> Path:
    folder.mkdir()
    model = tiny_model_dir(folder / "model")
    path = write_config(
        folder,
        model,
        strategy=strategy,
        precision={"kind": precision, "tf32": False},
        run={"device": "cuda", "steps": 4},
    )
    finished = drumline("train", path, *more, timeout=280)
    assert finished.code == 0, finished.err
    assert "DeepSpeed" not in finished.out.replace("deepspeed", "") + finished.err, (
        "its own words are not shown"
    )
    return folder / "run"


@pytest.mark.parametrize(
    "strategy",
    ["zero1", "zero2", "zero3", OFFLOADED],
    ids=["zero1", "zero2", "zero3", "zero3 offloaded"],
)
def test_as_the_native_engine(tmp_path: Path, strategy: Any) -> None:
    mine, native = (
        run(tmp_path / "zero", strategy, "fp32"),
        run(tmp_path / "native", "single", "fp32"),
    )
    assert losses(mine) == pytest.approx(losses(native), rel=1e-4)
    same_weights(mine, native, 1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_low_precision_stays_near(tmp_path: Path, strategy: str, precision: str) -> None:
    mine, native = (
        run(tmp_path / "zero", strategy, precision),
        run(tmp_path / "native", "single", "fp32"),
    )
    assert losses(mine) == pytest.approx(losses(native), rel=3e-2)
    assert events(mine, "step")[-1]["memory_bytes"][0] > 0

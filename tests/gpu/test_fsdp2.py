"""FSDP2 on a GPU: NCCL in a group of one, models laid out without weights, low precision, and weights that live in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from drumline.engine.muon import _orthogonal
from drumline.vendor.torch import FakeStore
from tests.gpu.stand_in import size
from tests.harness import drumline, events, losses, weights, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the GPU without FSDP2 to hold the others against."""
    made = tmp_path_factory.mktemp("fsdp2")
    tiny_model_dir(made / "model")
    assert train(made, "single", "single") == 0
    return made


def train(folder: Path, name: str, strategy: Any, *more: str, **sections: Any) -> int:
    place = folder / f"{name}-config"
    place.mkdir(exist_ok=True)
    path = write_config(
        place,
        folder / "model",
        strategy=strategy,
        run={"device": "cuda", "steps": 6, "dir": str(folder / name)},
        **sections,
    )
    fp32 = () if "precision" in sections else ("precision=fp32", "precision.tf32=false")
    return drumline("train", path, *fp32, *more).code


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload": "cpu"},
        {"reshard_after_forward": False},
        {"offload": "cpu", "wrap": ["LlamaMLP"]},
    ],
)
def test_as_without_it(folder: Path, options: dict[str, Any]) -> None:
    """Gradient norm, clipping, optimizer and checkpoints, with DTensors on the GPU and with those that lie in host memory."""
    name = "-".join(["fsdp2", *map(str, options)])
    assert train(folder, name, {"kind": "fsdp2", **options}) == 0
    assert losses(folder / name) == pytest.approx(losses(folder / "single"), rel=1e-4)
    norms = [[e["grad_norm"] for e in events(folder / run, "step")] for run in (name, "single")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert weights(folder / name).keys() == weights(folder / "single").keys()


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(folder: Path, precision: str, offload: str) -> None:
    name = f"{precision}-{offload}"
    assert train(folder, name, {"kind": "fsdp2", "offload": offload}, precision=precision) == 0
    assert losses(folder / name) == pytest.approx(losses(folder / "single"), rel=3e-2)


def test_offloaded_state_takes_no_gpu_memory(folder: Path, tmp_path: Path) -> None:
    """Weights, gradients and moments of a model with a large embedding: most of them never lie on the GPU together."""
    tiny_model_dir(tmp_path / "model", hidden=size(512, 384), layers=8)
    peaks = {}
    for offload in ("none", "cpu"):
        assert train(tmp_path, offload, {"kind": "fsdp2", "offload": offload}) == 0
        peaks[offload] = events(tmp_path / offload, "step")[-1]["memory_bytes"][0]
    assert peaks["cpu"] < 0.6 * peaks["none"], peaks


def test_an_optimizer_on_the_host_takes_no_gpu_memory(tmp_path: Path) -> None:
    """Weights and gradients are all that is left there: half of it."""
    tiny_model_dir(tmp_path / "model", hidden=size(512, 384), layers=8)
    peaks = {}
    for offload in ("false", "true"):
        assert train(tmp_path, offload, "fsdp2", f"optimizer.offload={offload}") == 0
        peaks[offload] = events(tmp_path / offload, "step")[-1]["memory_bytes"][0]
    assert peaks["true"] < 0.8 * peaks["false"], peaks


def test_muon_updates_what_is_cut_twice_and_lies_on_the_host() -> None:
    """On one of four ranks; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cuda", (2, 2))
        weight = DTensor.from_local(
            torch.ones(4, 4, device="cuda"), mesh, [Shard(0), Shard(1)], run_check=False
        )
        (update,) = _orthogonal([torch.ones(4, 4, dtype=torch.bfloat16)], weight)
    finally:
        dist.destroy_process_group()
    assert update.device.type == "cpu" and update.shape == (4, 4)


def test_resume_with_offload(folder: Path) -> None:
    options = {"kind": "fsdp2", "offload": "cpu"}
    constant = {"schedule": {"kind": "constant"}}
    assert train(folder, "whole", options, **constant) == 0
    assert train(folder, "parts", options, "run.steps=4", **constant) == 0
    assert train(folder, "parts", options, "--resume", "--allow", "run.steps", **constant) == 0
    assert losses(folder / "parts") == pytest.approx(losses(folder / "whole"), rel=1e-4)

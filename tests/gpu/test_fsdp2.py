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
from tests.gpu.runs import memory_of_ranks, same_losses
from tests.gpu.stand_in import NEEDS_CUDA, size
from tests.harness import column, run_drumline, weights, write_config
from tests.tiny import tiny_model_dir

pytestmark = NEEDS_CUDA
FP32 = {"kind": "fp32", "tf32": False}
OFFLOADED = {"kind": "fsdp2", "offload": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with the run `single` on the GPU without FSDP2."""
    made = tmp_path_factory.mktemp("fsdp2")
    tiny_model_dir(made / "model")
    train(made, "single", "single")
    return made


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with a model of a large embedding."""
    tiny_model_dir(tmp_path / "model", hidden=size(512, 384), layers=8)
    return tmp_path


def train(folder: Path, name: str, strategy: Any, *more: str, **sections: Any) -> Path:
    """Train the folder's model, and return the run folder of that name."""
    place = folder / f"{name}-config"
    place.mkdir(exist_ok=True)
    run = folder / name
    options = {"device": "cuda", "steps": 6, "dir": str(run)}
    layers = {"precision": FP32, **sections}
    path = write_config(place, folder / "model", strategy=strategy, run=options, **layers)
    run_drumline("train", path, *more)
    return run


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
    single = folder / "single"
    run = train(folder, "-".join(["fsdp2", *options]), {"kind": "fsdp2", **options})

    same_losses(run, single, 1e-4)
    norms = column(single, "grad_norm")
    assert column(run, "grad_norm") == pytest.approx(norms, rel=1e-3)
    assert weights(run).keys() == weights(single).keys()


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(folder: Path, precision: str, offload: str) -> None:
    strategy = {"kind": "fsdp2", "offload": offload}
    run = train(folder, f"{precision}-{offload}", strategy, precision=precision)
    same_losses(run, folder / "single", 3e-2)


def test_offloaded_state_takes_no_gpu_memory(large: Path) -> None:
    """Weights, gradients and moments: most of them never lie on the GPU together."""
    on_gpu = memory_of_ranks(train(large, "on_gpu", "fsdp2"))[0]
    offloaded = memory_of_ranks(train(large, "offloaded", OFFLOADED))[0]
    assert offloaded < 0.6 * on_gpu


def test_an_optimizer_on_the_host_takes_no_gpu_memory(large: Path) -> None:
    """Weights and gradients are all that is left there: half of it."""
    on_gpu = memory_of_ranks(train(large, "on_gpu", "fsdp2"))[0]
    offloaded = memory_of_ranks(train(large, "offloaded", "fsdp2", "optimizer.offload=true"))[0]
    assert offloaded < 0.8 * on_gpu


def test_muon_updates_what_is_cut_twice_and_lies_on_the_host() -> None:
    """On one of four ranks; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cuda", (2, 2))
        shard = torch.ones(4, 4, device="cuda")
        weight = DTensor.from_local(shard, mesh, [Shard(0), Shard(1)], run_check=False)
        (update,) = _orthogonal([torch.ones(4, 4, dtype=torch.bfloat16)], weight)
    finally:
        dist.destroy_process_group()
    assert update.device.type == "cpu"
    assert update.shape == (4, 4)


def test_resume_with_offload(folder: Path) -> None:
    constant = {"schedule": {"kind": "constant"}}
    whole = train(folder, "whole", OFFLOADED, **constant)
    parts = train(folder, "parts", OFFLOADED, "run.steps=4", **constant)
    train(folder, "parts", OFFLOADED, "--resume", "--allow", "run.steps", **constant)
    same_losses(parts, whole, 1e-4)

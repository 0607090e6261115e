"""Ring attention with the kernels of a GPU, on as many GPUs as there are (one: a ring of one rank, which runs the same code)."""

from __future__ import annotations

import contextlib
import copy
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from drumline.engine.context_parallel import apply_context_parallel
from drumline.models.head import ForwardWithObjective
from tests.distributed.test_context_parallel import answers, build, made_batch
from tests.harness import drumline, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank over NCCL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_one(alone: None, method: str, dtype: torch.dtype) -> None:
    model = build("llama").cuda()
    whole, parted = ForwardWithObjective(copy.deepcopy(model)), ForwardWithObjective(model)
    batch = made_batch(packed=False).to("cuda")
    apply_context_parallel(parted, parted.model, init_device_mesh("cuda", (1,)), method, False)
    assert parted.sequence is not None
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss, correct, gradients = answers(whole, batch, contextlib.nullcontext)
        my_loss, my_correct, my_gradients = answers(parted, batch, parted.sequence.around)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert my_loss == pytest.approx(loss, rel=tolerance)
    assert dtype != torch.float32 or my_correct == correct
    for name, gradient in my_gradients.items():
        assert float((gradient - gradients[name]).norm()) <= tolerance * float(
            gradients[name].norm()
        ), name


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs; this machine has {torch.cuda.device_count()}",
)
@pytest.mark.parametrize("strategy", ["cp", "{kind: cp, method: ring}"])
def test_two_gpus_train_as_one(tmp_path: Path, strategy: str) -> None:
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        run={"device": "cuda"},
        # In fp32 the ring's kernel takes multiples of 32 tokens: two ranks hold four parts.
        data={"packing": False, "max_length": 128},
        precision="fp32",
    )
    for name, options in {
        "one": ["strategy=single"],
        "two": [f"strategy={strategy}", "launch.nproc=2"],
    }.items():
        done = drumline("train", path, f"run.dir={tmp_path / name}", *options)
        assert done.code == 0, done.err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)

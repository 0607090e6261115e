"""What only a GPU has: NCCL, bf16 and fp16 on tensor cores, memory as the allocator counts it, compiled blocks."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.checkpoint.staging import Staging
from drumline.config.strategy import Compression
from drumline.data.batches import TokenBatch
from drumline.engine.compress import compress_ddp
from drumline.engine.data_parallel import Replicated
from drumline.engine.transforms import apply_ddp, apply_sync_batchnorm
from drumline.system.threads import bind_to_gpu
from drumline.train.data_loaders import Copies
from tests.gpu.runs import memory_of_ranks, same_losses, train
from tests.gpu.stand_in import (
    COMPILED_CODE,
    GPUS,
    KERNELS_THAT_TAKE_TIME,
    NEEDS_CUDA,
    NEEDS_TWO_GPUS,
    requires,
)
from tests.harness import events, losses, run_drumline, write_config
from tests.strategies import DDPStrategy
from tests.tiny import tiny_model_dir

pytestmark = NEEDS_CUDA
# Precision → the relative distance of its losses from those of the CPU in fp32.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
LONG_KERNEL = 2**30  # clock cycles: about half a second


def config(folder: Path, **sections: object) -> Path:
    model = tiny_model_dir(folder / "model")
    return write_config(folder, model, run={"device": "cuda", "steps": 6}, **sections)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_losses_as_on_the_cpu(tmp_path: Path, precision: str) -> None:
    path = config(tmp_path, precision={"kind": precision, "tf32": False})

    on_gpu = train(path, tmp_path / "gpu")
    on_cpu = train(path, tmp_path / "cpu", "run.device=cpu", "precision=fp32")

    same_losses(on_gpu, on_cpu, TOLERANCES[precision])
    assert memory_of_ranks(on_gpu)[0] > 0


def test_copies_for_the_background_are_pinned_and_take_no_more() -> None:
    staging = Staging()
    large = torch.randn(1000, 33, device="cuda")
    small = torch.randn(3, device="cuda")

    staged = staging.copy({"a": large, "b": small})

    assert staged["a"].is_pinned()
    assert staging.arena_bytes < 1001 * 33 * 4
    torch.testing.assert_close(staged, {"a": large.cpu(), "b": small.cpu()})
    staging.copy({"a": torch.ones(5, device="cuda")})


@requires(KERNELS_THAT_TAKE_TIME)
def test_a_batch_is_copied_beside_a_step() -> None:
    copies = Copies("cuda")
    ids = torch.arange(2**20).reshape(64, -1)
    pinned = copies.pin(lambda: TokenBatch(ids, ids + 1, ids % 7, 5))
    batch = pinned()
    assert batch.targets_BT.is_pinned()
    assert batch.lengths_B.is_pinned()

    torch.cuda._sleep(LONG_KERNEL)
    (there,) = copies.move([batch])

    assert copies.copy_stream is not None
    copies.copy_stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the step still runs, and the copy is done"
    assert there.input_ids_BT.is_cuda
    targets = there.targets_BT.cpu()
    assert torch.equal(targets - 1, ids)
    assert there.weight == 5


@NEEDS_TWO_GPUS
def test_a_thread_begins_on_the_gpu_of_its_rank() -> None:
    with torch.cuda.device(1), ThreadPoolExecutor(1) as thread:
        torch.zeros(1, device="cuda")
        current = thread.submit(bind_to_gpu(torch.cuda.current_device))
        assert current.result() == 1


def test_auto_is_bf16_with_a_known_peak(tmp_path: Path) -> None:
    run_drumline("train", config(tmp_path))
    (start,) = events(tmp_path / "run", "run_start")
    assert "bf16" in start["plan_line"]
    assert start["device"] == "cuda"


def test_resume_is_exact_when_deterministic(tmp_path: Path) -> None:
    # A course that does not depend on its length.
    path = config(tmp_path, precision="fp32", schedule={"kind": "constant"})
    exact = "run.deterministic=true"
    whole = train(path, tmp_path / "whole", exact)
    parts = train(path, tmp_path / "parts", exact, "run.steps=4")
    train(path, parts, exact, "--resume", "--allow", "run.steps")
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("option", ["in_backward", "offload"])
def test_steps_parameter_by_parameter_are_those_of_a_whole_step(
    tmp_path: Path, option: str
) -> None:
    """On FSDP2's streams, and with copies that run beside steps on the host."""
    path = config(
        tmp_path,
        strategy="fsdp2",
        precision={"kind": "fp32", "tf32": False},
        optimizer={"max_grad_norm": None},
        batch={"global_samples": 4 * GPUS, "micro_batch": 4},
    )
    whole = train(path, tmp_path / "whole", f"optimizer.{option}=false")
    parts = train(path, tmp_path / "parts", f"optimizer.{option}=true")
    same_losses(parts, whole, 1e-5)


def learns(run: Path) -> None:
    """The loss of the last step is below that of the first."""
    figures = losses(run)
    assert figures[6] < figures[1]


@requires(COMPILED_CODE)
def test_compiled_blocks_train(tmp_path: Path) -> None:
    run_drumline("train", config(tmp_path, compile={"enabled": True}), timeout=280)
    learns(tmp_path / "run")


@pytest.mark.parametrize(
    "strategy", ["single", "fsdp2", {"kind": "fsdp2", "offload": "cpu"}], ids=str
)
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_qlora_learns_over_packed_weights(tmp_path: Path, bits: str, strategy: Any) -> None:
    """In bf16: codes lie in it, also where FSDP2 gathers them."""
    path = config(
        tmp_path,
        adapter={"kind": "lora", "quantize": bits},
        strategy=strategy,
        checkpoint={"export": "last"},
    )
    run_drumline("train", path)
    learns(tmp_path / "run")
    (export, *_) = events(tmp_path / "run", "export")
    assert export["max_logit_difference"] < 1e-5


@requires(KERNELS_THAT_TAKE_TIME)
@pytest.mark.parametrize("kind", ["none", "bf16"])
def test_the_host_does_not_wait_to_know_how_long_copies_did(group_of_one: None, kind: Any) -> None:
    ddp = apply_ddp(nn.Linear(64, 64).cuda(), DDPStrategy(), dist.group.WORLD)
    spread = Replicated(ddp, compress_ddp(ddp, Compression(kind=kind), 0))

    def step(cycles: int) -> float:
        """Run a step whose forward has a kernel of so many cycles."""
        with spread.micro_batch(last=True):
            loss = spread.train_module(torch.ones(4, 64, device="cuda")).sum()
            torch.cuda._sleep(cycles)
            with spread.backward_context(loss):
                loss.backward()
        return spread.exposed_communication()

    step(0)
    step(0)
    torch.cuda.synchronize()
    assert 0 <= step(0) < 1
    step(LONG_KERNEL)
    step(LONG_KERNEL)
    assert not torch.cuda.current_stream().query(), "the steps still run"
    torch.cuda.synchronize()
    assert 0 <= spread.exposed_communication() < 0.25, "the kernel is none of it"


def test_synchronised_batch_norm_is_torchs_own_over_nccl(group_of_one: None) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
    shared = copy.deepcopy(plain)
    apply_sync_batchnorm(shared, "cuda", None)
    assert isinstance(shared[1], nn.SyncBatchNorm)

    images = torch.randn(4, 3, 9, 9, device="cuda")
    plain(images).square().sum().backward()
    ddp = apply_ddp(shared, DDPStrategy(), dist.group.WORLD)
    ddp(images).square().sum().backward()

    for one, other in zip(plain.parameters(), shared.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert torch.allclose(plain[1].running_var, shared[1].running_var)

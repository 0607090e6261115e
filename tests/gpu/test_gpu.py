"""What only a GPU has: NCCL, bf16 and fp16 on tensor cores, memory as the allocator counts it, compiled blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.staging import Staging
from drumline.config.strategy import Compression
from drumline.data.batches import TokenBatch
from drumline.system.threads import on_this_gpu
from drumline.train.data_loaders import Copies
from tests.gpu.stand_in import COMPILED_CODE, KERNELS_THAT_TAKE_TIME, requires
from tests.harness import drumline, events, losses, write_config
from tests.strategies import DDPStrategy
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)


def config(folder: Path, **sections: object) -> Path:
    return write_config(
        folder, tiny_model_dir(folder / "model"), run={"device": "cuda", "steps": 6}, **sections
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_as_on_the_cpu(tmp_path: Path, precision: str) -> None:
    path = config(tmp_path, precision={"kind": precision, "tf32": False})
    assert drumline("train", path, f"run.dir={tmp_path / 'gpu'}").code == 0
    assert (
        drumline(
            "train", path, f"run.dir={tmp_path / 'cpu'}", "run.device=cpu", "precision=fp32"
        ).code
        == 0
    )
    tolerance = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}[precision]
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)
    last = events(tmp_path / "gpu", "step")[-1]
    assert last["memory_bytes"][0] > 0


def test_copies_for_the_background_are_pinned_and_take_no_more() -> None:
    staging, tensors = (
        Staging(),
        {"a": torch.randn(1000, 33, device="cuda"), "b": torch.randn(3, device="cuda")},
    )
    staged = staging.copy(tensors)
    assert staged["a"].is_pinned() and staging.bytes_ < 1001 * 33 * 4
    torch.testing.assert_close(staged, {name: tensor.cpu() for name, tensor in tensors.items()})
    staging.copy({"a": torch.ones(5, device="cuda")})


@requires(KERNELS_THAT_TAKE_TIME)
def test_a_batch_is_copied_beside_a_step() -> None:
    copies, ids = Copies("cuda"), torch.arange(2**20).reshape(64, -1)
    batch = copies.pin(lambda: TokenBatch(ids, ids + 1, ids % 7, 5))()
    assert batch.targets_BT.is_pinned() and batch.lengths_B.is_pinned()
    torch.cuda._sleep(2**30)  # about half a second of a kernel
    (there,) = copies.move([batch])
    assert copies.copy_stream is not None
    copies.copy_stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the step still runs, and the copy is done"
    assert (
        there.input_ids_BT.is_cuda
        and torch.equal((there.targets_BT - 1).cpu(), ids)
        and there.weight == 5
    )


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs; this machine has {torch.cuda.device_count()}",
)
def test_a_thread_begins_on_the_gpu_of_its_rank() -> None:
    with torch.cuda.device(1), ThreadPoolExecutor(1) as thread:
        torch.zeros(1, device="cuda")
        assert thread.submit(on_this_gpu(torch.cuda.current_device)).result() == 1


def test_auto_is_bf16_with_a_known_peak(tmp_path: Path) -> None:
    assert drumline("train", config(tmp_path)).code == 0
    (start,) = events(tmp_path / "run", "run_start")
    assert "bf16" in start["plan_line"] and start["device"] == "cuda"


def test_resume_is_exact_when_deterministic(tmp_path: Path) -> None:
    path = config(tmp_path)
    # A course that does not depend on its length.
    more = [
        "run.deterministic=true",
        "precision=fp32",
        "schedule.kind=constant",
    ]
    assert drumline("train", path, f"run.dir={tmp_path / 'whole'}", *more).code == 0
    assert drumline("train", path, f"run.dir={tmp_path / 'parts'}", *more, "run.steps=4").code == 0
    assert (
        drumline(
            "train",
            path,
            f"run.dir={tmp_path / 'parts'}",
            *more,
            "--resume",
            "--allow",
            "run.steps",
        ).code
        == 0
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("option", ["in_backward", "offload"])
def test_steps_parameter_by_parameter_are_those_of_a_whole_step(
    tmp_path: Path, option: str
) -> None:
    """On FSDP2's streams, and with copies that run beside steps on the host."""
    batch = {"global_samples": 4 * torch.cuda.device_count(), "micro_batch": 4}
    path = config(
        tmp_path,
        strategy="fsdp2",
        precision={"kind": "fp32", "tf32": False},
        optimizer={"max_grad_norm": None},
        batch=batch,
    )
    for name, value in (("whole", "false"), ("parts", "true")):
        assert (
            drumline(
                "train", path, f"run.dir={tmp_path / name}", f"optimizer.{option}={value}"
            ).code
            == 0
        )
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@requires(COMPILED_CODE)
def test_compiled_blocks_train(tmp_path: Path) -> None:
    assert drumline("train", config(tmp_path, compile={"enabled": True}), timeout=280).code == 0
    figures = losses(tmp_path / "run")
    assert figures[6] < figures[1]


@pytest.mark.parametrize(
    "strategy", ["single", "fsdp2", {"kind": "fsdp2", "offload": "cpu"}], ids=str
)
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_qlora_learns_over_packed_weights(tmp_path: Path, bits: str, strategy: Any) -> None:
    """In bf16: codes lie in it, also where FSDP2 gathers them."""
    adapter = {"kind": "lora", "quantize": bits}
    ended = drumline(
        "train", config(tmp_path, adapter=adapter, strategy=strategy, checkpoint={"export": "last"})
    )
    assert ended.code == 0, ended.err
    figures = losses(tmp_path / "run")
    assert figures[6] < figures[1]
    assert events(tmp_path / "run", "export")[0]["max_logit_difference"] < 1e-5


@requires(KERNELS_THAT_TAKE_TIME)
@pytest.mark.parametrize("kind", ["none", "bf16"])
def test_the_host_does_not_wait_to_know_how_long_copies_did(kind: Any) -> None:
    import torch.distributed as dist

    from drumline.engine.compress import compress_ddp
    from drumline.engine.data_parallel import Replicated
    from drumline.engine.transforms import apply_ddp

    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        compression = Compression(kind=kind)
        ddp = apply_ddp(torch.nn.Linear(64, 64).cuda(), DDPStrategy(), dist.group.WORLD)
        spread = Replicated(ddp, compress_ddp(ddp, compression, 0))

        def step(kernel: int) -> float:
            with spread.micro_batch(last=True):
                loss = spread.train_module(torch.ones(4, 64, device="cuda")).sum()
                torch.cuda._sleep(kernel)
                with spread.backward_context(loss):
                    loss.backward()
            return spread.exposed_communication()

        for _ in range(2):
            step(0)
        torch.cuda.synchronize()
        assert 0 <= step(0) < 1
        for _ in range(2):
            step(2**30)  # about half a second of a kernel
        assert not torch.cuda.current_stream().query(), "the steps still run"
        torch.cuda.synchronize()
        assert 0 <= spread.exposed_communication() < 0.25, "the kernel is none of it"
    finally:
        dist.destroy_process_group()


def test_synchronised_batch_norm_is_torchs_own_over_nccl() -> None:
    import copy

    import torch.distributed as dist
    from torch import nn

    from drumline.engine.transforms import apply_ddp, apply_sync_batchnorm

    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
        shared = copy.deepcopy(plain)
        apply_sync_batchnorm(shared, "cuda", None)
        assert isinstance(shared[1], nn.SyncBatchNorm)
        images = torch.randn(4, 3, 9, 9, device="cuda")
        for model in (plain, apply_ddp(shared, DDPStrategy(), dist.group.WORLD)):
            model(images).square().sum().backward()
        for one, other in zip(plain.parameters(), shared.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)
        assert torch.allclose(plain[1].running_var, shared[1].running_var)
    finally:
        dist.destroy_process_group()

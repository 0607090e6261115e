"""Ring attention with the kernels of a GPU, on as many GPUs as there are (one: a ring of one rank, which runs the same code)."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from drumline.engine.context_parallel import apply_context_parallel
from drumline.models.head import ForwardWithObjective
from tests.distributed.test_context_parallel import answers, build, made_batch
from tests.gpu.runs import same_losses, train
from tests.gpu.stand_in import NEEDS_CUDA, NEEDS_TWO_GPUS
from tests.harness import write_config
from tests.tiny import tiny_model_dir

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_one(group_of_one: None, method: str, dtype: torch.dtype) -> None:
    is_fp32 = dtype == torch.float32
    model = build("llama").cuda()
    whole = ForwardWithObjective(copy.deepcopy(model))
    parted = ForwardWithObjective(model)
    batch = made_batch(packed=False).to("cuda")
    mesh = init_device_mesh("cuda", (1,))
    apply_context_parallel(parted, parted.model, mesh, method, False)
    assert parted.sequence is not None

    with torch.autocast("cuda", dtype, enabled=not is_fp32):
        loss, correct, gradients = answers(whole, batch, contextlib.nullcontext)
        my_loss, my_correct, my_gradients = answers(parted, batch, parted.sequence.around)

    tolerance = 1e-5 if is_fp32 else 2e-2
    assert my_loss == pytest.approx(loss, rel=tolerance)
    if is_fp32:
        assert my_correct == correct
    for name, gradient in my_gradients.items():
        expected = gradients[name]
        difference = (gradient - expected).norm()
        assert difference <= tolerance * expected.norm(), name


@NEEDS_TWO_GPUS
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
    one = train(path, tmp_path / "one", "strategy=single")
    two = train(path, tmp_path / "two", f"strategy={strategy}", "launch.nproc=2")
    same_losses(two, one, 1e-4)

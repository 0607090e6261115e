"""Kernels for variable lengths on a GPU: the numbers of documents one by one, and no stop of the host in a micro-batch."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.models.attention import KERNELS, _works, attend_by_documents
from drumline.models.head import ForwardWithObjective
from drumline.plan.attention import PACKAGES
from tests.gpu.stand_in import COMPILED_CODE, IS_STAND_IN
from tests.unit.test_attention import batch_of, build, layout

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)
MISSING = {
    kernel: f"{package} is not installed"
    for kernel, package in PACKAGES.items()
    if find_spec(package) is None
}
if IS_STAND_IN:
    MISSING["flex_attention"] = f"needs {COMPILED_CODE}"


def trained(model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cuda", torch.bfloat16):
        loss_sum, _ = ForwardWithObjective(model)(
            batch.to("cuda"), NextToken(chunk=8, answers=False).objective
        )
    loss_sum.backward()
    return float(loss_sum), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("kind", ["llama", "mistral with a window", "gemma2 with a window"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_of_documents_one_by_one(kernel: Any, kind: str) -> None:
    if kernel in MISSING:
        pytest.skip(MISSING[kernel])
    if kernel == "varlen" and kind.startswith("gemma2"):
        pytest.skip("varlen has no soft caps")
    model, batch = build(kind).cuda(), batch_of((3, 7, 5), (9,), width=16)
    one, other = model, copy.deepcopy(model)
    attend_by_documents(one, layout())
    attend_by_documents(other, layout("cuda", "bf16", attention=kernel))
    (loss, gradients), (far, of_kernel) = trained(one, batch), trained(other, batch)
    assert _works(kernel, torch.device("cuda", 0), torch.bfloat16, 8)
    assert far == pytest.approx(loss, rel=1e-2)
    least = 1e-2 * max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (of_kernel[name] - gradient).norm() <= 5e-2 * torch.maximum(
            gradient.norm(), least
        ), name


@pytest.mark.parametrize("attention", ["auto", "documents"])
def test_a_micro_batch_does_not_stop_the_host(attention: str) -> None:
    model, batch = build("llama").cuda(), batch_of((3, 7, 5), (9,), width=16)
    attend_by_documents(model, layout("cuda", "bf16", attention=attention))
    trained(model, batch)  # kernels are tried, and compiled
    module, objective, on_gpu = (
        ForwardWithObjective(model),
        NextToken(chunk=8, answers=False).objective,
        batch.to("cuda"),
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            loss_sum, _ = module(on_gpu, objective)
        (loss_sum / batch.weight).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

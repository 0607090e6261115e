"""Kernels for variable lengths on a GPU: the numbers of documents one by one, and no stop of the host in a micro-batch."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.models.attention import KERNELS, _works, use_document_attention
from drumline.models.head import ForwardWithObjective
from drumline.plan.attention import PACKAGES
from tests.gpu.stand_in import COMPILED_CODE, IS_STAND_IN, NEEDS_CUDA
from tests.unit.test_attention import batch_of, build, gradients_of, layout

pytestmark = NEEDS_CUDA
DOCUMENTS = ((3, 7, 5), (9,))
BF16 = torch.bfloat16


def why_not(kernel: Any, kind: str) -> str | None:
    """Return why a model of a kind cannot be run with a kernel here, or None."""
    package = PACKAGES.get(kernel)
    if IS_STAND_IN and kernel == "flex_attention":
        return f"needs {COMPILED_CODE}"
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed"
    if kernel == "varlen" and kind.startswith("gemma2"):
        return "varlen has no soft caps"
    return None


def summed_loss(model: Any) -> torch.Tensor:
    """Return the loss of the documents under autocast, summed over their tokens."""
    batch = batch_of(*DOCUMENTS).to("cuda")
    objective = NextToken(chunk=8, has_answers=False).objective
    with torch.autocast("cuda", BF16):
        loss_sum, _ = ForwardWithObjective(model)(batch, objective)
    loss_sum.backward()
    return loss_sum.detach()


@pytest.mark.parametrize("kind", ["llama", "mistral with a window", "gemma2 with a window"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_of_documents_one_by_one(kernel: Any, kind: str) -> None:
    reason = why_not(kernel, kind)
    if reason is not None:
        pytest.skip(reason)
    one = build(kind).cuda()
    other = copy.deepcopy(one)
    use_document_attention(one, layout())
    use_document_attention(other, layout("cuda", "bf16", attention=kernel))

    loss = summed_loss(one)
    loss_of_kernel = summed_loss(other)

    assert _works(kernel, torch.device("cuda", 0), BF16, 8)
    assert float(loss_of_kernel) == pytest.approx(float(loss), rel=1e-2)
    gradients = gradients_of(one)
    gradients_of_kernel = gradients_of(other)
    norms = {name: gradient.norm() for name, gradient in gradients.items()}
    least = 1e-2 * max(norms.values())
    for name, gradient in gradients.items():
        difference = gradients_of_kernel[name] - gradient
        assert difference.norm() <= 5e-2 * max(norms[name], least), name


@pytest.mark.parametrize("attention", ["auto", "documents"])
def test_a_micro_batch_does_not_stop_the_host(attention: str) -> None:
    model = build("llama").cuda()
    use_document_attention(model, layout("cuda", "bf16", attention=attention))
    summed_loss(model)  # kernels are tried, and compiled
    batch = batch_of(*DOCUMENTS)
    on_gpu = batch.to("cuda")
    module = ForwardWithObjective(model)
    objective = NextToken(chunk=8, has_answers=False).objective

    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", BF16):
            loss_sum, _ = module(on_gpu, objective)
        (loss_sum / batch.weight).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

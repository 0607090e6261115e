"""The chunked cross-entropy on a GPU, where products of 16-bit factors are given out in fp32."""

from __future__ import annotations

import pytest
import torch

from drumline.models.losses import LinearHead, linear_cross_entropy
from tests.gpu.stand_in import NEEDS_CUDA

pytestmark = NEEDS_CUDA
BF16 = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_under_autocast_it_is_at_least_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = draw(300, 64)
    weight = draw(1000, 64)
    targets = torch.randint(1000, (300,), device="cuda")
    targets[::3] = -100

    exact, _ = linear_cross_entropy(hidden.double(), LinearHead(weight.double()), targets, 0)
    results = [torch.autograd.grad(exact, (hidden, weight))]
    for chunk in (0, 64):
        with torch.autocast("cuda", dtype):
            loss_sum, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, chunk)
        assert loss_sum.dtype == torch.float32
        results.append(torch.autograd.grad(loss_sum, (hidden, weight)))

    for truth, plain, chunked in zip(*results, strict=True):
        error = (chunked - truth).norm()
        assert error <= 1.05 * (plain - truth).norm()


def test_logits_are_never_all_there() -> None:
    tokens = 4096
    vocabulary = 32000
    hidden = draw(tokens, 64, dtype=BF16)
    weight = draw(vocabulary, 64)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    with torch.autocast("cuda", BF16):
        loss_sum, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, 256)
    loss_sum.backward()

    taken = torch.cuda.max_memory_allocated() - before
    all_logits = tokens * vocabulary * BF16.itemsize
    assert taken < all_logits / 2

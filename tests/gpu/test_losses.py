"""The chunked cross-entropy on a GPU, where products of 16-bit factors are given out in fp32."""

from __future__ import annotations

import pytest
import torch

from drumline.models.losses import LinearHead, linear_cross_entropy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)

N, D, V = 300, 64, 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_at_least_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device="cuda", requires_grad=True)
    weight = torch.randn(V, D, device="cuda", requires_grad=True)
    targets = torch.randint(V, (N,), device="cuda")
    targets[::3] = -100
    exact = torch.autograd.grad(
        linear_cross_entropy(hidden.double(), LinearHead(weight.double()), targets, 0)[0],
        (hidden, weight),
    )
    results = []
    for chunk in (0, 64):
        with torch.autocast("cuda", dtype):
            loss_sum, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, chunk)
        assert loss_sum.dtype == torch.float32
        results.append(torch.autograd.grad(loss_sum, (hidden, weight)))
    for plain, chunked, truth in zip(*results, exact, strict=True):
        assert (chunked - truth).norm() <= 1.05 * (plain - truth).norm()


def test_logits_are_never_all_there() -> None:
    tokens, vocabulary, chunk = 4096, 32000, 256
    hidden = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, D, device="cuda", requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss_sum, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, chunk)
    loss_sum.backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary * 2 / 2, (
        "half of what all logits take in bf16"
    )

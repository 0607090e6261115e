"""Cross-entropy and log-probs over a head that two ranks hold between them: answers and gradients are those of the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from drumline.models.losses import (
    LinearHead,
    VocabularyPart,
    linear_cross_entropy,
    linear_log_probs,
)
from tests.distributed.ranks import free_port

TOKENS, WIDTH, ROWS = 23, 8, 13
FIRST = (0, 7, ROWS)


def inputs(bias: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(hidden, weight, bias), and targets: some without loss, and some whose first choice is a tie between rows of the two ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(TOKENS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )
    weight[9] = weight[2] = hidden[0] * 4
    targets = torch.randint(0, ROWS, (TOKENS,), generator=generator)
    targets[0], targets[1::5] = 2, -100
    hidden[2], targets[2] = hidden[0], 9
    hidden[3], targets[3] = hidden[0], 2
    return [
        hidden,
        weight,
        *(
            [torch.randn(ROWS, generator=generator).index_fill(0, torch.tensor([2, 9]), 1.0)]
            if bias
            else []
        ),
    ], targets


def answers(
    tensors: list[torch.Tensor],
    targets: torch.Tensor,
    chunk: int,
    part: VocabularyPart | None,
    low: Any,
) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    hidden, weight, bias = (*leaves, None)[:3]
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        loss, correct = linear_cross_entropy(hidden, LinearHead(weight, bias, part), targets, chunk)
    (loss / 7).backward()
    return [loss.detach(), correct, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def token_answers(
    tensors: list[torch.Tensor],
    targets: torch.Tensor,
    chunk: int,
    part: VocabularyPart | None,
    low: Any,
) -> list[Any]:
    """The same of log-probs, a gradient of another size for each token."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    hidden, weight, bias = (*leaves, None)[:3]
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        head = LinearHead(weight, bias, part)
        chosen, entropy = linear_log_probs(hidden, head, targets, chunk, 0.8, True)
    back = torch.linspace(-1, 2, TOKENS)
    assert entropy is not None
    (chosen * back + entropy * back.flip(0)).sum().backward()
    return [
        chosen.detach(),
        entropy.detach(),
        *(leaf.grad for leaf in leaves if leaf.grad is not None),
    ]


def worker(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    mine = slice(FIRST[rank], FIRST[rank + 1])
    for bias in (False, True):
        tensors, targets = inputs(bias)
        for low in (None, torch.bfloat16, torch.float16):
            for chunk in (0, 5, 100):
                whole = answers(tensors, targets, chunk or 100, None, low)
                assert whole[1][0] and whole[1][3] and not whole[1][2], (
                    "of equal logits the lowest is the first choice"
                )
                part = VocabularyPart(group, FIRST[rank])
                got = answers(
                    [tensors[0], *(t[mine] for t in tensors[1:])], targets, chunk, part, low
                )
                expected = [*whole[:3], *(t[mine] for t in whole[3:])]
                assert torch.equal(got[1], expected[1])
                whole = token_answers(tensors, targets, chunk or 100, None, low)
                got += token_answers(
                    [tensors[0], *(t[mine] for t in tensors[1:])], targets, chunk, part, low
                )
                expected += [*whole[:3], *(t[mine] for t in whole[3:])]
                for one, other in zip(got, expected, strict=True):
                    difference, size = (one.float() - other.float()).norm(), other.float().norm()
                    assert difference <= (1e-5 if low is None else 1e-2) * size, (
                        bias,
                        low,
                        chunk,
                        float(difference / size),
                    )
    dist.destroy_process_group()


@pytest.mark.full
def test_as_over_the_whole_head() -> None:
    port = free_port()
    try:
        mp.spawn(worker, (port,), nprocs=2)
    except mp.ProcessRaisedException as error:
        pytest.fail(str(error))

"""Cross-entropy and log-probs over a head that two ranks hold between them: answers and gradients
are those of the whole head."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from drumline.models.divergence import Divergence
from drumline.models.losses import (
    LinearHead,
    VocabularyPart,
    linear_cross_entropy,
    linear_log_probs,
)
from drumline.models.teaching import Comparison, TeacherStates
from tests.distributed.ranks import free_port

TOKENS = 23
WIDTH = 8
ROWS = 13
FIRST = (0, 7, ROWS)


def inputs(bias: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(hidden, weight, bias), and targets: some without loss, and some whose first choice is a tie
    between rows of the two ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(ROWS, WIDTH, generator=generator)
    weight[9] = weight[2] = hidden[0] * 4
    targets = torch.randint(0, ROWS, (TOKENS,), generator=generator)
    targets[0] = 2
    targets[1::5] = -100
    hidden[2] = hidden[0]
    targets[2] = 9
    hidden[3] = hidden[0]
    targets[3] = 2
    tensors = [hidden, weight]
    if bias:
        biases = torch.randn(ROWS, generator=generator)
        biases[[2, 9]] = 1.0
        tensors.append(biases)
    return tensors, targets


class Leaves:
    """Copies of (hidden, weight, bias) that learn, and autocast to a low type."""

    def __init__(self, tensors: list[torch.Tensor], low: torch.dtype | None) -> None:
        self.all = [tensor.clone().requires_grad_() for tensor in tensors]
        self.hidden, self.weight, *more = self.all
        self.bias = more[0] if more else None
        self.low = low

    def autocast(self) -> torch.autocast:
        dtype = self.low or torch.bfloat16
        return torch.autocast("cpu", dtype, enabled=self.low is not None)

    def gradients(self) -> list[torch.Tensor]:
        return [leaf.grad for leaf in self.all if leaf.grad is not None]


def answers(
    leaves: Leaves, targets: torch.Tensor, chunk: int, part: VocabularyPart | None
) -> list[torch.Tensor]:
    with leaves.autocast():
        head = LinearHead(leaves.weight, leaves.bias, part)
        loss, correct = linear_cross_entropy(leaves.hidden, head, targets, chunk)
    (loss / 7).backward()
    return [loss.detach(), correct, *leaves.gradients()]


def token_answers(
    leaves: Leaves, targets: torch.Tensor, chunk: int, part: VocabularyPart | None
) -> list[torch.Tensor]:
    """The same of log-probs, a gradient of another size for each token."""
    with leaves.autocast():
        head = LinearHead(leaves.weight, leaves.bias, part)
        chosen, entropy = linear_log_probs(leaves.hidden, head, targets, chunk, 0.8, True)
    back = torch.linspace(-1, 2, TOKENS)
    assert entropy is not None
    (chosen * back + entropy * back.flip(0)).sum().backward()
    return [chosen.detach(), entropy.detach(), *leaves.gradients()]


def compare(bias: bool, low: torch.dtype | None, chunk: int, part: VocabularyPart) -> None:
    """Answers of a part of the head are those of the whole, and its gradients that part of the
    whole's."""
    tolerance = 1e-2
    if low is None:
        tolerance = 1e-5
    rank = dist.get_rank()
    mine = slice(FIRST[rank], FIRST[rank + 1])
    tensors, targets = inputs(bias)
    parts = [tensors[0], *(tensor[mine] for tensor in tensors[1:])]
    for ask in (answers, token_answers):
        whole = ask(Leaves(tensors, low), targets, chunk or 100, None)
        found = ask(Leaves(parts, low), targets, chunk, part)
        if ask is answers:
            correct = whole[1]
            assert torch.equal(found[1], correct)
            firsts = [bool(correct[token]) for token in (0, 2, 3)]
            assert firsts == [True, False, True], "of equal logits the lowest is the first choice"
        expected = [*whole[:3], *(tensor[mine] for tensor in whole[3:])]
        for one, other in zip(found, expected, strict=True):
            difference = (one.float() - other.float()).norm()
            size = other.float().norm()
            assert difference <= tolerance * size, (bias, low, chunk, float(difference / size))


def compare_with_scaled_logits(part: VocabularyPart) -> None:
    """A student that scales its logits has all of them, and its teacher's head a part of the rows."""
    mine = slice(part.first, FIRST[dist.get_rank() + 1])
    (hidden, weight), targets = inputs(bias=False)
    logits = 3 * hidden.flip(0) @ weight.T
    rows = (targets >= 0).nonzero().squeeze(1)
    comparison = Comparison(Divergence("forward_kl"), 1.5)
    whole = TeacherStates(hidden[rows], LinearHead(weight))
    cut = TeacherStates(hidden[rows], LinearHead(weight[mine], None, part))
    expected = comparison.sum_with_logits(logits, rows, whole)
    for one, other in zip(comparison.sum_with_logits(logits, rows, cut), expected, strict=True):
        torch.testing.assert_close(one, other)


def worker(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    for bias, low, chunk in product(
        (False, True), (None, torch.bfloat16, torch.float16), (0, 5, 100)
    ):
        compare(bias, low, chunk, VocabularyPart(group, FIRST[rank]))
    compare_with_scaled_logits(VocabularyPart(group, FIRST[rank]))
    dist.destroy_process_group()


@pytest.mark.full
def test_as_over_the_whole_head() -> None:
    port = free_port()
    try:
        mp.spawn(worker, (port,), nprocs=2)
    except mp.ProcessRaisedException as error:
        pytest.fail(str(error))

"""The chunked cross-entropy is the plain one: value, first choices and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.models.losses import LinearHead, cross_entropy, linear_cross_entropy

N, D, V = 37, 16, 53


def tensors(
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    masked: float = 0.3,
    sizes: tuple[int, int, int] = (N, D, V),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(0)
    rows, width, vocabulary = sizes
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias_V = torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(vocabulary, (rows,))
    targets[torch.rand(rows) < masked] = -100
    return hidden, weight, bias_V, targets


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(torch.nn.functional.linear(hidden, weight, bias), targets)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss * 0.37, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize("chunk", [0, 1, 8, 37, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_one(chunk: int, bias: bool) -> None:
    hidden, weight, bias_V, targets = tensors(bias=bias)
    loss, correct = linear_cross_entropy(hidden, LinearHead(weight, bias_V), targets, chunk)
    expected, expected_correct = plain(hidden, weight, bias_V, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert torch.equal(correct, expected_correct)
    for got, wanted in zip(
        gradients(loss, hidden, weight, bias_V),
        gradients(expected, hidden, weight, bias_V),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_tied_weights_get_both_gradients() -> None:
    _, weight, _, targets = tensors()
    ids = torch.randint(V, (N,))
    loss, _ = linear_cross_entropy(weight[ids], LinearHead(weight), targets, 8)
    expected, _ = plain(weight[ids], weight, None, targets)
    torch.testing.assert_close(
        gradients(loss, weight), gradients(expected, weight), rtol=1e-5, atol=1e-6
    )


def test_no_targets_at_all() -> None:
    hidden, weight, _, targets = tensors(masked=1.1)
    loss, correct = linear_cross_entropy(hidden, LinearHead(weight), targets, 8)
    assert loss.item() == 0 and not correct.any()
    assert all(not g.any() for g in gradients(loss, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = tensors()
    exact = gradients(plain(hidden, weight, None, targets)[0], hidden, weight)
    with torch.autocast("cpu", dtype):
        loss, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, 8)
        expected, _ = plain(hidden, weight, None, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for got, wanted, truth in zip(
        gradients(loss, hidden, weight), gradients(expected, hidden, weight), exact, strict=True
    ):
        assert got.dtype == torch.float32
        assert (got - truth).norm() <= 1.2 * (wanted - truth).norm()


@pytest.mark.claim("the chunked cross-entropy and log-probs are the plain ones")
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_gradient_is_right_in_float64(chunk: int) -> None:
    # Gradcheck goes once forward for each number.
    hidden, weight, bias, targets = tensors(torch.float64, bias=True, sizes=(7, 3, 11))
    assert 0 < int((targets == -100).sum()) < len(targets)
    # gradcheck goes back twice, and our backward works on what it saved: hand it copies.
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, torch.clone):
        assert torch.autograd.gradcheck(
            lambda h, w, b: linear_cross_entropy(h, LinearHead(w, b), targets, chunk)[0],
            (hidden, weight, bias),
        )


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    hidden, weight, _, targets = tensors()
    loss, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, 8)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss * 3).backward()


def test_fp16_keeps_gradients_that_fp16_has_no_number_for() -> None:
    """Of 4096 equally likely tokens one is learned; the others' gradients, scaled by 2⁻¹⁴ as their hidden states are, are under fp16's
    smallest number (6e-8), and a loss scale that comes after them could not bring them back."""
    vocabulary = 4096
    hidden = torch.full((2, D), 2.0**-14, requires_grad=True)
    weight = torch.zeros(vocabulary, D, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss, _ = linear_cross_entropy(hidden, LinearHead(weight), torch.tensor([0, -100]), 8)
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad[1:], torch.full_like(weight.grad[1:], 2.0**-14 / vocabulary), rtol=1e-3, atol=0
    )


def test_fp16_sums_over_more_than_fp16_can_hold() -> None:
    """One token is wrong in the same way everywhere: its gradient, a sum over places, passes 65504."""
    places = 64
    hidden = torch.full((places, D), 2048.0, requires_grad=True)
    weight = torch.zeros(2, D, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss, _ = linear_cross_entropy(
            hidden, LinearHead(weight), torch.zeros(places, dtype=torch.long), 64
        )
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], torch.full((D,), -0.5 * places * 2048.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_get_gradients_of_16_bits(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = tensors(dtype)
    loss, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, 8)
    assert loss.dtype == torch.float32
    exact = gradients(plain(hidden.float(), weight.float(), None, targets)[0], hidden, weight)
    for got, truth in zip(gradients(loss, hidden, weight), exact, strict=True):
        assert got.dtype == dtype
        assert (got - truth).norm() <= 2 * torch.finfo(dtype).eps * truth.norm()


def test_only_learned_rows_are_looked_at() -> None:
    """What stands where nothing is learned (padding, prompts) has no part in the result, not even where it is no number."""
    hidden, weight, _, targets = tensors()
    broken = hidden.detach().clone()
    broken[targets == -100] = torch.nan
    broken.requires_grad_()
    loss, correct = linear_cross_entropy(broken, LinearHead(weight), targets, 8)
    expected, _ = linear_cross_entropy(hidden, LinearHead(weight), targets, 8)
    assert torch.equal(loss, expected) and not correct[targets == -100].any()
    got, wanted = gradients(loss, broken, weight), gradients(expected, hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products (torch's own counter does not know those in place)."""

    multiplied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.multiplied += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def test_only_the_work_that_is_wanted_is_done() -> None:
    """In products of a learned row with the head: one for its logits, and one each for the gradients of hidden states and weight."""
    hidden, weight, bias, targets = tensors(bias=True)
    one = int((targets != -100).sum()) * D * V

    def products(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> float:
        with Products() as counter:
            loss_sum, _ = linear_cross_entropy(h, LinearHead(w, b), targets, 8)
            if loss_sum.requires_grad:
                loss_sum.backward()
        return counter.multiplied / one

    assert products(hidden, weight, bias) == 3
    assert products(hidden, weight.detach(), None) == 2
    assert products(hidden.detach(), weight.detach(), bias) == 1
    with torch.no_grad():
        assert products(hidden, weight, bias) == 1


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same() -> None:
    hidden, weight, bias, targets = tensors(bias=True)
    assert bias is not None
    wanted = gradients(plain(hidden, weight, bias, targets)[0], hidden, weight, bias)
    for frozen in itertools.product([False, True], repeat=3):
        leaves = [
            leaf.detach() if still else leaf
            for leaf, still in zip((hidden, weight, bias), frozen, strict=True)
        ]
        loss, _ = linear_cross_entropy(leaves[0], LinearHead(leaves[1], leaves[2]), targets, 8)
        assert loss.requires_grad is not all(frozen)
        if loss.requires_grad:
            expected = [grad for grad, still in zip(wanted, frozen, strict=True) if not still]
            got = gradients(
                loss, *[leaf for leaf, still in zip(leaves, frozen, strict=True) if not still]
            )
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

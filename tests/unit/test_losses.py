"""The chunked cross-entropy is the plain one: value, first choices and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.models.losses import LinearHead, cross_entropy, linear_cross_entropy

N, D, V = 37, 16, 53

Tensor = torch.Tensor
Leaves = list[Tensor | None]  # hidden states, weight and bias


def tensors(
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    masked: float = 0.3,
    sizes: tuple[int, int, int] = (N, D, V),
) -> tuple[Leaves, Tensor]:
    """Return what is learned and the targets, of which the share `masked` does not count."""
    torch.manual_seed(0)
    rows, width, vocabulary = sizes
    hidden = torch.randn(
        rows,
        width,
        dtype=dtype,
        requires_grad=True,
    )
    weight = torch.randn(
        vocabulary,
        width,
        dtype=dtype,
        requires_grad=True,
    )
    bias_V = None
    if bias:
        bias_V = torch.randn(vocabulary, dtype=dtype, requires_grad=True)

    targets = torch.randint(vocabulary, (rows,))
    targets[torch.rand(rows) < masked] = -100
    return [hidden, weight, bias_V], targets


def plain(leaves: Leaves, targets: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight, bias = leaves
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return cross_entropy(logits, targets)


def compute_in_chunks(
    leaves: Leaves,
    targets: Tensor,
    chunk: int = 8,
) -> tuple[Tensor, Tensor]:
    hidden, weight, bias = leaves
    head = LinearHead(weight, bias)
    return linear_cross_entropy(hidden, head, targets, chunk)


def gradients(loss: Tensor, leaves: Leaves) -> list[Tensor]:
    present = [leaf for leaf in leaves if leaf is not None]
    return list(torch.autograd.grad(loss * 0.37, present))


def assert_near(got: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(
        got,
        wanted,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("chunk", [0, 1, 8, 37, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_one(chunk: int, bias: bool) -> None:
    leaves, targets = tensors(bias=bias)
    loss, correct = compute_in_chunks(leaves, targets, chunk)
    expected, expected_correct = plain(leaves, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss,
        expected,
        rtol=1e-6,
        atol=0,
    )
    assert torch.equal(correct, expected_correct)
    assert_near(gradients(loss, leaves), gradients(expected, leaves))


def test_tied_weights_get_both_gradients() -> None:
    (_, weight, _), targets = tensors()
    ids = torch.randint(V, (N,))
    loss, _ = compute_in_chunks([weight[ids], weight, None], targets)
    expected, _ = plain([weight[ids], weight, None], targets)
    assert_near(gradients(loss, [weight]), gradients(expected, [weight]))


def test_no_targets_at_all() -> None:
    leaves, targets = tensors(masked=1.1)
    loss, correct = compute_in_chunks(leaves, targets)
    assert loss.item() == 0
    assert not correct.any()

    for gradient in gradients(loss, leaves):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    leaves, targets = tensors()
    exact_loss, _ = plain(leaves, targets)
    exact = gradients(exact_loss, leaves)
    with torch.autocast("cpu", dtype):
        loss, _ = compute_in_chunks(leaves, targets)
        expected, _ = plain(leaves, targets)

    torch.testing.assert_close(
        loss,
        expected,
        rtol=1e-3,
        atol=0,
    )

    all_got = gradients(loss, leaves)
    all_wanted = gradients(expected, leaves)
    for got, wanted, truth in zip(all_got, all_wanted, exact, strict=True):
        error = (got - truth).norm()
        plain_error = (wanted - truth).norm()
        assert got.dtype == torch.float32
        assert error <= 1.2 * plain_error


@pytest.mark.claim("the chunked cross-entropy and log-probs are the plain ones")
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_gradient_is_right_in_float64(chunk: int) -> None:
    # Gradcheck goes once forward for each number.
    leaves, targets = tensors(
        torch.float64,
        bias=True,
        sizes=(7, 3, 11),
    )
    masked = int((targets == -100).sum())
    assert 0 < masked < len(targets)

    def loss(*leaves: Tensor) -> Tensor:
        return compute_in_chunks([*leaves], targets, chunk)[0]

    # gradcheck goes back twice, and our backward works on what it saved: hand it copies.
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, torch.clone):
        assert torch.autograd.gradcheck(loss, tuple(leaves))


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    loss, _ = compute_in_chunks(*tensors())
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss * 3).backward()


def gradient_under_fp16(
    hidden: Tensor,
    vocabulary: int,
    targets: Tensor,
    chunk: int,
) -> Tensor:
    """Return the gradient of a weight of zeros, computed under autocast to fp16."""
    weight = torch.zeros(vocabulary, D, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss, _ = compute_in_chunks([hidden, weight, None], targets, chunk)

    loss.backward()
    assert weight.grad is not None

    return weight.grad


def test_fp16_keeps_gradients_that_fp16_has_no_number_for() -> None:
    """Of 4096 equally likely tokens one is learned; the others' gradients, scaled by 2⁻¹⁴ as their hidden states are, are under fp16's
    smallest number (6e-8), and a loss scale that comes after them could not bring them back."""
    vocabulary = 4096
    hidden = torch.full(
        (2, D),
        2.0**-14,
        requires_grad=True,
    )
    gradient = gradient_under_fp16(hidden, vocabulary, torch.tensor([0, -100]), 8)
    others = gradient[1:]
    expected = torch.full_like(others, 2.0**-14 / vocabulary)
    torch.testing.assert_close(
        others,
        expected,
        rtol=1e-3,
        atol=0,
    )


def test_fp16_sums_over_more_than_fp16_can_hold() -> None:
    """One token is wrong in the same way everywhere: its gradient, a sum over places, passes 65504."""
    places = 64
    hidden = torch.full(
        (places, D),
        2048.0,
        requires_grad=True,
    )
    targets = torch.zeros(places, dtype=torch.long)
    gradient = gradient_under_fp16(hidden, 2, targets, 64)
    expected = torch.full((D,), -0.5 * places * 2048.0)
    torch.testing.assert_close(gradient[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_get_gradients_of_16_bits(dtype: torch.dtype) -> None:
    leaves, targets = tensors(dtype)
    hidden, weight, _ = leaves
    loss, _ = compute_in_chunks(leaves, targets)
    assert loss.dtype == torch.float32

    exact_loss, _ = plain([hidden.float(), weight.float(), None], targets)
    exact = gradients(exact_loss, leaves)
    rounding = torch.finfo(dtype).eps
    for got, truth in zip(gradients(loss, leaves), exact, strict=True):
        assert got.dtype == dtype
        error = (got - truth).norm()
        assert error <= 2 * rounding * truth.norm()


def test_only_learned_rows_are_looked_at() -> None:
    """What stands where nothing is learned (padding, prompts) has no part in the result, not even where it is no number."""
    leaves, targets = tensors()
    hidden, weight, _ = leaves
    is_masked = targets == -100
    broken = hidden.detach().clone()
    broken[is_masked] = torch.nan
    broken.requires_grad_()
    loss, correct = compute_in_chunks([broken, weight, None], targets)
    expected, _ = compute_in_chunks(leaves, targets)
    assert torch.equal(loss, expected)
    assert not correct[is_masked].any()

    all_got = gradients(loss, [broken, weight])
    all_wanted = gradients(expected, leaves)
    for got, wanted in zip(all_got, all_wanted, strict=True):
        assert torch.equal(got, wanted)


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products (torch's own counter does not know those in place)."""

    multiplied = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            rows, inner = left.shape
            self.multiplied += rows * inner * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_only_the_work_that_is_wanted_is_done() -> None:
    """In products of a learned row with the head: one for its logits, and one each for the gradients of hidden states and weight."""
    (hidden, weight, bias), targets = tensors(bias=True)
    learned = int((targets != -100).sum())

    def products(*leaves: Tensor | None) -> float:
        with Products() as counter:
            loss_sum, _ = compute_in_chunks([*leaves], targets)
            if loss_sum.requires_grad:
                loss_sum.backward()
        return counter.multiplied / (learned * D * V)

    assert products(hidden, weight, bias) == 3
    assert products(hidden, weight.detach(), None) == 2
    assert products(hidden.detach(), weight.detach(), bias) == 1

    with torch.no_grad():
        assert products(hidden, weight, bias) == 1


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same() -> None:
    leaves, targets = tensors(bias=True)
    loss, _ = plain(leaves, targets)
    wanted = gradients(loss, leaves)
    for learns in itertools.product([True, False], repeat=3):
        inputs: Leaves = []
        learned: Leaves = []
        expected = []
        for leaf, gradient, leaf_learns in zip(leaves, wanted, learns, strict=True):
            if leaf_learns:
                inputs.append(leaf)
                learned.append(leaf)
                expected.append(gradient)
            else:
                inputs.append(leaf.detach())
        loss, _ = compute_in_chunks(inputs, targets)
        assert loss.requires_grad == any(learns)
        if learned:
            assert_near(gradients(loss, learned), expected)

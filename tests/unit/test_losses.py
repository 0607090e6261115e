"""The chunked cross-entropy is the plain one: value, first choices and gradients."""

from __future__ import annotations

import pytest
import torch

from drumline.algorithms.losses import cross_entropy, linear_cross_entropy

N, D, V = 37, 16, 53


def tensors(dtype: torch.dtype = torch.float32, bias: bool = False, masked: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    bias_V = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(V, (N,))
    targets[torch.rand(N) < masked] = -100
    return hidden, weight, bias_V, targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(torch.nn.functional.linear(hidden, weight, bias), targets)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss * 0.37, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize("chunk", [0, 1, 8, 37, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_one(chunk: int, bias: bool) -> None:
    hidden, weight, bias_V, targets = tensors(bias=bias)
    loss, correct = linear_cross_entropy(hidden, weight, bias_V, targets, chunk)
    expected, expected_correct = plain(hidden, weight, bias_V, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert torch.equal(correct, expected_correct)
    for got, wanted in zip(gradients(loss, hidden, weight, bias_V), gradients(expected, hidden, weight, bias_V), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_tied_weights_get_both_gradients() -> None:
    _, weight, _, targets = tensors()
    ids = torch.randint(V, (N,))
    loss, _ = linear_cross_entropy(weight[ids], weight, None, targets, 8)
    expected, _ = plain(weight[ids], weight, None, targets)
    torch.testing.assert_close(gradients(loss, weight), gradients(expected, weight), rtol=1e-5, atol=1e-6)


def test_no_targets_at_all() -> None:
    hidden, weight, _, targets = tensors(masked=1.1)
    loss, correct = linear_cross_entropy(hidden, weight, None, targets, 8)
    assert loss.item() == 0 and not correct.any()
    assert all(not g.any() for g in gradients(loss, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = tensors()
    exact = gradients(plain(hidden, weight, None, targets)[0], hidden, weight)
    with torch.autocast("cpu", dtype):
        loss, _ = linear_cross_entropy(hidden, weight, None, targets, 8)
        expected, _ = plain(hidden, weight, None, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for got, wanted, truth in zip(gradients(loss, hidden, weight), gradients(expected, hidden, weight), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - truth).norm() <= 1.2 * (wanted - truth).norm()


def test_gradient_is_right_in_float64() -> None:
    hidden, weight, bias, targets = tensors(torch.float64, bias=True)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, b, targets, 8)[0], (hidden, weight, bias))


def test_without_gradients_none_are_made() -> None:
    hidden, weight, _, targets = tensors()
    with torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, None, targets, 8)
    assert not loss.requires_grad
    frozen, _ = linear_cross_entropy(hidden, weight.detach(), None, targets, 8)
    (grad,) = gradients(frozen, hidden)
    torch.testing.assert_close(grad, gradients(plain(hidden, weight, None, targets)[0], hidden)[0], rtol=1e-5, atol=1e-6)

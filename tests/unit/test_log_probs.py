"""Log-probs over a head in chunks are those of float64 and plain autograd: values, entropies, and gradients for any that comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drumline.models.losses import LinearHead, linear_log_probs, log_probs

N, D, V = 37, 16, 53


def linear_of(hidden: Any, weight: Any, bias: Any, *options: Any, **named: Any) -> Any:
    """Return `linear_log_probs`; a head without a bias has None in its place."""
    return linear_log_probs(hidden, LinearHead(weight, bias), *options, **named)


def tensors(
    dtype: torch.dtype = torch.float32, bias: bool = True, sizes: tuple[int, int, int] = (N, D, V)
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Leaves (hidden, weight, bias), targets of which some are −100, and a gradient for each answer: of both signs, uneven."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = sizes
    shapes = [(rows, width), (vocabulary, width), *([(vocabulary,)] if bias else [])]
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = -100
    return leaves, targets, torch.randn(2, rows, generator=generator)


def exact(
    leaves: list[torch.Tensor], targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, row by row."""
    hidden, weight, bias = (*(leaf.double() for leaf in leaves), None)[:3]
    assert hidden is not None and weight is not None
    rows = torch.nn.functional.linear(hidden, weight, bias) / temperature
    zero = rows.new_zeros(())
    log_p = [row - row.exp().sum().log() for row in rows]
    chosen = [zero if t < 0 else row[t] for row, t in zip(log_p, targets.tolist(), strict=True)]
    return torch.stack(chosen), torch.stack(
        [zero if t < 0 else -(row.exp() * row).sum() for row, t in zip(log_p, targets, strict=True)]
    )


def gradients(answers: Any, back: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = sum((answer * g).sum() for answer, g in zip(answers, back, strict=True))
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.claim("the chunked cross-entropy and log-probs are the plain ones")
@pytest.mark.parametrize("chunk", [0, 1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_formula_in_float64(chunk: int, temperature: float, bias: bool) -> None:
    leaves, targets, back = tensors(bias=bias)
    got = linear_of(*(*leaves, None)[:3], targets, chunk, temperature, entropy=True)
    wanted = exact(leaves, targets, temperature)
    assert got[1] is not None and got[0].dtype == got[1].dtype == torch.float32
    assert not got[0][targets == -100].any() and not got[1][targets == -100].any()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    for one, other in zip(
        gradients(got, back, leaves), gradients(wanted, back, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_one_answer_alone_has_its_own_gradient(entropy: bool) -> None:
    leaves, targets, back = tensors()
    got = linear_of(*leaves, targets, 8, 1.3, entropy)
    assert (got[1] is None) is not entropy
    which = slice(1, 2) if entropy else slice(0, 1)
    wanted = exact(leaves, targets, 1.3)[which]
    for one, other in zip(
        gradients(got[which], back[which], leaves),
        gradients(wanted, back[which], leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 3])
def test_gradcheck(chunk: int) -> None:
    # Gradcheck goes once forward for each number.
    leaves, targets, _ = tensors(torch.float64, sizes=(7, 3, 11))
    assert 0 < int((targets == -100).sum()) < len(targets)
    assert torch.autograd.gradcheck(
        lambda *given: linear_of(*given, targets, chunk, 0.9, True), leaves
    )


def test_answers_can_be_gone_back_from_twice() -> None:
    leaves, targets, back = tensors()
    got = linear_of(*leaves, targets, 8)[0]
    first = torch.autograd.grad((got * back[0]).sum(), leaves, retain_graph=True)
    second = torch.autograd.grad((got * back[0]).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("chunk", [0, 8])
def test_rows_without_a_target_are_not_looked_at(chunk: int) -> None:
    leaves, targets, back = tensors(bias=False)
    broken = leaves[0].detach().clone()
    broken[targets == -100] = torch.nan
    broken.requires_grad_()
    got = gradients(
        linear_of(broken, leaves[1], None, targets, chunk, entropy=True), back, [broken, leaves[1]]
    )
    wanted = gradients(linear_of(*leaves, None, targets, chunk, entropy=True), back, leaves)
    if chunk == 0:  # a product of all rows: the weight's gradient adds 0 · NaN
        got, wanted = got[:1], wanted[:1]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_no_targets_at_all() -> None:
    leaves, targets, back = tensors()
    got = linear_of(*leaves, torch.full_like(targets, -100), 8, entropy=True)
    assert not any(answer.any() for answer in got if answer is not None)
    assert not any(g.any() for g in gradients(got, back, leaves)), (
        "and yet every weight has a gradient, which DDP waits for"
    )


def test_what_is_frozen_gets_no_gradient() -> None:
    leaves, targets, back = tensors()
    got = linear_of(leaves[0], leaves[1].detach(), leaves[2].detach(), targets, 8)[0]
    (grad,) = torch.autograd.grad((got * back[0]).sum(), [leaves[0]])
    wanted = gradients(exact(leaves, targets, 1.0)[:1], back[:1], leaves)[0]
    torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    leaves, targets, back = tensors()
    truth = gradients(exact(leaves, targets, 1.0), back, leaves)
    with torch.autocast("cpu", dtype):
        got = linear_of(*leaves, targets, 8, entropy=True)
        plain = linear_of(*leaves, targets, 0, entropy=True)
    for one, other in zip(got, plain, strict=True):
        assert one is not None and other is not None and one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for one, other, right in zip(
        gradients(got, back, leaves), gradients(plain, back, leaves), truth, strict=True
    ):
        assert one.dtype == torch.float32
        assert (one - right).norm() <= 1.2 * (other - right).norm()


@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_in_fp16_any_size_of_gradient_survives(factor: float) -> None:
    """With the loss scale on it, one that comes back may be far over fp16's largest number, or under its smallest."""
    leaves, targets, back = tensors()
    with torch.autocast("cpu", torch.float16):
        got = linear_of(*leaves, targets, 8, entropy=True)
    wanted = gradients(exact(leaves, targets, 1.0), back, leaves)
    for one, other in zip(gradients(got, back * factor, leaves), wanted, strict=True):
        assert (one / factor - other).norm() <= 1e-2 * other.norm()


def test_an_overflow_is_not_hidden() -> None:
    leaves, targets, back = tensors()
    with torch.autocast("cpu", torch.float16):
        got = linear_of(*leaves, targets, 8)[0]
    back[0, int((targets != -100).nonzero()[0])] = torch.inf
    assert not any(g.isfinite().all() for g in torch.autograd.grad((got * back[0]).sum(), leaves))


def test_of_logits_as_of_a_head() -> None:
    leaves, targets, back = tensors(bias=False)
    logits = torch.nn.functional.linear(*leaves)
    got = log_probs(logits, targets, 0.7, entropy=True)
    wanted = exact(leaves, targets, 0.7)
    for one, other in zip(
        gradients(got, back, leaves), gradients(wanted, back, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

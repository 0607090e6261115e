"""Log-probs over a head in chunks are those of float64 and plain autograd.

That holds for values, entropies, and gradients, whatever comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import linear
from torch.testing import assert_close

from drumline.models.losses import LinearHead, linear_log_probs, log_probs

N, D, V = 37, 16, 53


class HeadCase(NamedTuple):
    """Inputs, and a gradient for each answer; both have both signs and uneven sizes."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    back: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        tensors = [self.hidden, self.weight]
        if self.bias is not None:
            tensors.append(self.bias)
        return tensors

    @property
    def has_target(self) -> Tensor:
        return self.targets != -100

    def log_probs(self, *options: Any, **named: Any) -> Any:
        """Return `linear_log_probs` of this case."""
        head = LinearHead(self.weight, self.bias)
        return linear_log_probs(
            self.hidden,
            head,
            self.targets,
            *options,
            **named,
        )

    def gradients(self, answers: Any, factor: float = 1.0) -> list[Tensor]:
        """Return the leaves' gradients if `back`, times the factor, comes back to the answers."""
        loss = torch.zeros(())
        for answer, back in zip(answers, self.back * factor, strict=True):
            loss = loss + (answer * back).sum()
        return list(grad(loss, self.leaves))

    def gradients_of_one(self, answer: Tensor, row: int = 0, **options: Any) -> list[Tensor]:
        """Return the leaves' gradients if a row of `back` comes back to an answer."""
        loss = (answer * self.back[row]).sum()
        return list(grad(loss, self.leaves, **options))


def make_case(
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    rows: int = N,
    width: int = D,
    vocabulary: int = V,
) -> HeadCase:
    """Return random tensors; some of the targets are −100."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    hidden = leaf(rows, width)
    weight = leaf(vocabulary, width)
    bias_or_none = leaf(vocabulary) if bias else None
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = -100
    back = torch.randn(2, rows, generator=generator)
    return HeadCase(hidden, weight, bias_or_none, targets, back)


def exact(
    case: HeadCase,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies in float64 by the formula, row by row."""
    bias = None if case.bias is None else case.bias.double()
    logits = linear(
        case.hidden.double(),
        case.weight.double(),
        bias,
    )
    zero = logits.new_zeros(())
    chosen = []
    entropies = []
    for row, target in zip(logits / temperature, case.targets.tolist(), strict=True):
        if target < 0:
            chosen.append(zero)
            entropies.append(zero)
        else:
            log_p = row - row.exp().sum().log()
            chosen.append(log_p[target])
            entropies.append(-(log_p.exp() * log_p).sum())

    return torch.stack(chosen), torch.stack(entropies)


def assert_all_close(
    got: Iterable[Tensor],
    wanted: Iterable[Tensor],
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, rtol=rtol, atol=atol)


def assert_all_equal(
    got: Iterable[Tensor],
    wanted: Iterable[Tensor],
) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.claim("the chunked cross-entropy and log-probs are the plain ones")
@pytest.mark.parametrize("chunk", [0, 1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_formula_in_float64(
    chunk: int,
    temperature: float,
    bias: bool,
) -> None:
    case = make_case(bias=bias)
    got = case.log_probs(chunk, temperature, entropy=True)
    wanted = exact(case, temperature)

    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert not one[~case.has_target].any()
        assert_close(one.double(), other, rtol=1e-5, atol=1e-6)

    assert_all_close(case.gradients(got), case.gradients(wanted))


@pytest.mark.parametrize("entropy", [False, True])
def test_one_answer_alone_has_its_own_gradient(entropy: bool) -> None:
    case = make_case()
    got = case.log_probs(8, 1.3, entropy)
    assert (got[1] is None) is not entropy

    row = int(entropy)
    wanted = exact(case, 1.3)
    gradients = case.gradients_of_one(got[row], row)
    assert_all_close(gradients, case.gradients_of_one(wanted[row], row))


@pytest.mark.parametrize("chunk", [0, 3])
def test_gradcheck(chunk: int) -> None:
    """The case is small, because gradcheck goes once forward for each number."""
    case = make_case(
        torch.float64,
        rows=7,
        width=3,
        vocabulary=11,
    )
    assert 0 < int(case.has_target.sum()) < 7

    def forward(hidden: Any, weight: Any, bias: Any) -> Any:
        changed = case._replace(hidden=hidden, weight=weight, bias=bias)
        return changed.log_probs(chunk, 0.9, True)

    assert torch.autograd.gradcheck(forward, case.leaves)


def test_answers_can_be_gone_back_from_twice() -> None:
    case = make_case()
    got, _ = case.log_probs(8)
    first = case.gradients_of_one(got, retain_graph=True)
    second = case.gradients_of_one(got)
    assert_all_equal(first, second)


@pytest.mark.parametrize("chunk", [0, 8])
def test_rows_without_a_target_are_not_looked_at(chunk: int) -> None:
    """Numbers that are none change no gradient.

    In a product of all rows the weight's adds 0 · NaN.
    """
    case = make_case(bias=False)
    hidden = case.hidden.detach().clone()
    hidden[~case.has_target] = torch.nan
    broken = case._replace(hidden=hidden.requires_grad_())

    got = broken.gradients(broken.log_probs(chunk, entropy=True))

    wanted = case.gradients(case.log_probs(chunk, entropy=True))
    compared = 1 if chunk == 0 else 2
    assert_all_equal(got[:compared], wanted[:compared])


def test_no_targets_at_all() -> None:
    """Yet every weight has a gradient, which DDP waits for."""
    case = make_case()
    case.targets.fill_(-100)
    got = case.log_probs(8, entropy=True)
    for tensor in (*got, *case.gradients(got)):
        assert not tensor.any()


def test_what_is_frozen_gets_no_gradient() -> None:
    case = make_case()
    assert case.bias is not None

    frozen = case._replace(
        weight=case.weight.detach(),
        bias=case.bias.detach(),
    )
    got, _ = frozen.log_probs(8)
    loss = (got * case.back[0]).sum()
    gradients = grad(loss, [case.hidden])

    log_p, _ = exact(case)
    wanted = case.gradients_of_one(log_p)
    assert_all_close(gradients, wanted[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_as_the_plain_one(dtype: torch.dtype) -> None:
    case = make_case()
    with torch.autocast("cpu", dtype):
        got = case.log_probs(8, entropy=True)
        plain = case.log_probs(0, entropy=True)

    for one in got:
        assert one.dtype == torch.float32

    assert_all_close(got, plain, rtol=1e-3, atol=1e-3)

    gradients = case.gradients(got)
    plain_gradients = case.gradients(plain)
    truth = case.gradients(exact(case))
    for one, other, right in zip(gradients, plain_gradients, truth, strict=True):
        assert one.dtype == torch.float32
        error = (one - right).norm()
        assert error <= 1.2 * (other - right).norm()


def fp16_answers(case: HeadCase, **options: Any) -> Any:
    with torch.autocast("cpu", torch.float16):
        return case.log_probs(8, **options)


@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_in_fp16_any_size_of_gradient_survives(factor: float) -> None:
    """With the loss scale on it, one that comes back may be far over fp16's largest number.

    It may also be far under its smallest.
    """
    case = make_case()
    got = fp16_answers(case, entropy=True)
    scaled = case.gradients(got, factor)
    wanted = case.gradients(exact(case))

    for one, other in zip(scaled, wanted, strict=True):
        error = one / factor - other
        assert error.norm() <= 1e-2 * other.norm()


def test_an_overflow_is_not_hidden() -> None:
    case = make_case()
    got, _ = fp16_answers(case)

    first = int(case.has_target.nonzero()[0])
    case.back[0, first] = torch.inf
    for gradient in case.gradients_of_one(got):
        assert not gradient.isfinite().all()


def test_of_logits_as_of_a_head() -> None:
    case = make_case(bias=False)
    logits = linear(case.hidden, case.weight)
    got = log_probs(logits, case.targets, 0.7, entropy=True)
    wanted = exact(case, 0.7)
    assert_all_close(case.gradients(got), case.gradients(wanted))

"""The loss of a student against a teacher's distributions, from the logits of few tokens at a time.

A teacher is given by its likeliest choices (`models.choices`), or by its hidden states and its head,
for the whole vocabulary. M tokens that are learned from, at the places `rows_M` of the student's N;
V entries of the vocabulary; D width of the student, E of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from drumline.models.choices import Choices, choice_log_probs, linear_choice_log_probs
from drumline.models.containers import product_dtype
from drumline.models.divergence import Divergence, kl, sum_entries
from drumline.models.losses import (
    HeadGradients,
    LinearHead,
    VocabularyPart,
    cast_head,
    largest_logit,
    rows_in_chunk,
    save_gradients,
    scale_saved_gradients,
    scaled_logits,
)


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states at M tokens, [M, E], and its head, which together give its logits.

    If the head is one rank's part of the rows, the student's head is the same part.
    """

    hidden_ME: Tensor
    head: LinearHead

    def select(self, rows_m: Tensor) -> TeacherStates:
        """Return the states of some of the tokens, by their numbers."""
        return TeacherStates(self.hidden_ME[rows_m], self.head)

    def each(self, change: Callable[[Tensor], Tensor]) -> TeacherStates:
        """Return the states with `change` applied to them and to the head."""
        return TeacherStates(change(self.hidden_ME), self.head.each(change))


# What the batch of a student has of its teacher.
Teacher = Choices | TeacherStates


@dataclass(frozen=True)
class Comparison:
    """How student and teacher are compared.

    `temperature`: both models' logits are divided by it. `chunk`: tokens whose logits are in memory
    at once; 0: all.
    """

    divergence: Divergence
    temperature: float = 1.0
    chunk: int = 0

    def sum_with_logits(
        self, logits_NV: Tensor, rows_M: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of `sum_with_head` from whole logits of the student, by autograd.

        Collective if the teacher's head has a part of the rows.
        """
        logits_MV = logits_NV[rows_M]
        if isinstance(teacher, TeacherStates):
            teacher_logits_MV = _teacher_logits(teacher, self.temperature, logits_MV.shape[1])
            entries = min(logits_MV.shape[1], teacher_logits_MV.shape[1])
            teacher_MV = teacher_logits_MV[:, :entries].log_softmax(-1)
            precise = torch.promote_types(logits_MV.dtype, torch.float32)
            scaled_MV = logits_MV[:, :entries].to(precise) / self.temperature
            student_MV = scaled_MV.log_softmax(-1)
            return self._sums(student_MV, teacher_MV)
        student_ML = choice_log_probs(logits_MV, teacher.ids_MK, self.temperature)
        return self._sums(student_ML, teacher.log_probs_ML)

    def sum_with_head(
        self, hidden_ND: Tensor, head: LinearHead, rows_M: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence and KL(teacher ‖ student), each summed over the M tokens, in fp32.

        The first has a gradient. Collective if the head has a part of the rows.
        """
        if isinstance(teacher, TeacherStates):
            return _states_sums(self, hidden_ND, head, rows_M, teacher)
        student_ML = linear_choice_log_probs(
            hidden_ND, head, rows_M, teacher.ids_MK, self.chunk, self.temperature
        )
        return self._sums(student_ML, teacher.log_probs_ML)

    def _sums(self, student_MV: Tensor, teacher_MV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of `sum_with_head` from log-probabilities."""
        loss_M = self.divergence.loss(student_MV, teacher_MV)
        kl_M = kl(teacher_MV, student_MV.detach())
        return loss_M.sum(), kl_M.sum()


def _teacher_logits(teacher: TeacherStates, temperature: float, entries: int) -> Tensor:
    """Return the logits of a teacher at all its tokens, divided by the temperature, fp32[M, V].

    `entries`: those of the student's vocabulary. If the teacher's head has a part of the rows, both
    models have as many entries. Collective then.
    """
    dtype = product_dtype(teacher.hidden_ME)
    head = teacher.head
    with torch.autocast(teacher.hidden_ME.device.type, enabled=False):
        weight, bias = cast_head(head.weight_VD, head.bias_V, dtype)
        logits = scaled_logits(teacher.hidden_ME.to(dtype), weight, bias, temperature)
    if head.part is None:
        return logits
    # A student that scales its logits has all of them on each rank.
    whole_MV = logits.new_zeros((len(logits), entries))
    stop = head.part.first + logits.shape[1]
    whole_MV[:, head.part.first : stop] = logits
    dist.all_reduce(whole_MV, group=head.part.group)
    return whole_MV


def _states_sums(
    comparison: Comparison,
    hidden_ND: Tensor,
    head: LinearHead,
    rows_M: Tensor,
    teacher: TeacherStates,
) -> tuple[Tensor, Tensor]:
    """Return the sums of `Comparison.sum_with_head` for the whole vocabulary, chunk by chunk.

    As in `losses.linear_cross_entropy` the forward also computes the gradients, so that no logits
    are kept or computed twice. If one model has more entries in its vocabulary, they are left out:
    they are padding.
    """
    head, teacher = _with_equal_vocabularies(head, teacher)
    options = (rows_M, teacher, comparison, head.part, torch.is_grad_enabled())
    loss_sum, kl_sum = _StatesDivergence.apply(hidden_ND, head.weight_VD, head.bias_V, *options)
    return loss_sum, kl_sum


def _with_equal_vocabularies(
    head: LinearHead, teacher: TeacherStates
) -> tuple[LinearHead, TeacherStates]:
    """Return both heads, the larger one without the entries that the other lacks."""
    if head.part is not None:
        return head, teacher
    entries = min(len(head.weight_VD), len(teacher.head.weight_VD))
    cut_teacher = TeacherStates(teacher.hidden_ME, _first_rows(teacher.head, entries))
    return _first_rows(head, entries), cut_teacher


def _first_rows(head: LinearHead, rows: int) -> LinearHead:
    """Return a head with its first rows alone."""
    if len(head.weight_VD) == rows:
        return head
    bias_V = head.bias_V
    if bias_V is not None:
        bias_V = bias_V[:rows]
    return LinearHead(head.weight_VD[:rows], bias_V)


class _StatesDivergence(torch.autograd.Function):
    """The sums of `_states_sums`, whose gradients the forward computes.

    The last five arguments of `apply` are: the places of the tokens, the teacher, the comparison,
    this rank's part of the head or None, and whether gradients are on around the call.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence and KL(teacher ‖ student), each summed over the tokens."""
        rows_M, teacher, comparison, part, is_grad_enabled = options
        dtype = product_dtype(hidden_ND)
        precise = torch.promote_types(dtype, torch.float32)
        temperature = comparison.temperature
        chunk = rows_in_chunk(comparison.chunk, rows_M)
        wants = [is_grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        grads = HeadGradients(hidden_ND, weight_VD, bias_V, wants, precise)
        total = _summed_over_parts(part)
        loss_sum = torch.zeros((), dtype=precise, device=hidden_ND.device)
        kl_sum = torch.zeros_like(loss_sum)
        # Types are set explicitly below: autocast would also lower those of the gradients'
        # products.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = cast_head(weight_VD, bias_V, dtype)
            teacher_weight, teacher_bias = cast_head(
                teacher.head.weight_VD, teacher.head.bias_V, dtype
            )
            for start in range(0, len(rows_M), chunk):
                here = slice(start, start + chunk)
                rows = rows_M[here]
                hidden = hidden_ND[rows].to(dtype)
                student = scaled_logits(hidden, weight, bias, temperature)
                student = _to_log_probs(student, part)
                teacher_hidden = teacher.hidden_ME[here].to(dtype)
                taught = scaled_logits(teacher_hidden, teacher_weight, teacher_bias, temperature)
                taught = _to_log_probs(taught, part)
                kl_sum += kl(taught, student, total).sum()
                if not any(wants):
                    loss_sum += comparison.divergence.loss(student, taught, total).sum()
                    continue
                loss, grad = comparison.divergence.loss_and_gradient(student, taught, total)
                loss_sum += loss.sum()
                # Its entries have no limit: log Q − log P may be large, and 1 / temperature.
                grads.add_scaled(rows, grad, hidden, weight, temperature)
        save_gradients(ctx, grads, part, (hidden_ND, weight_VD, bias_V))
        ctx.mark_non_differentiable(kl_sum)
        return loss_sum, kl_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
        """Return the gradients that the forward has computed, times that of the loss."""
        # The five options have no gradients.
        return (*scale_saved_gradients(ctx, grad_loss), *[None] * 5)


def _summed_over_parts(part: VocabularyPart | None) -> Any:
    """Return the function that sums a distribution's entries, over all parts of the vocabulary."""
    if part is None:
        return sum_entries

    def total(values_NV: Tensor) -> Tensor:
        """Return the sums of rows over all ranks of the part's group. Collective."""
        sums_N = values_NV.sum(-1)
        dist.all_reduce(sums_N, group=part.group)
        return sums_N

    return total


def _to_log_probs(logits: Tensor, part: VocabularyPart | None) -> Tensor:
    """Return log softmax over the whole vocabulary, [n, V], in the place of the logits.

    Collective with `part`.
    """
    if part is None:
        return functional.log_softmax(logits, -1)
    logits.sub_(largest_logit(logits, part)[:, None])
    sums = logits.exp().sum(-1, keepdim=True)
    dist.all_reduce(sums, group=part.group)
    return logits.sub_(sums.log_())

"""Divergences of a student's distribution of the next token from a teacher's, token by token.

With P the teacher's probabilities, Q the student's and M = β P + (1 − β) Q:

    forward_kl   KL(P ‖ Q)
    reverse_kl   KL(Q ‖ P)
    jsd          β KL(P ‖ M) + (1 − β) KL(Q ‖ M)

The last is the generalised Jensen-Shannon divergence (Agarwal et al. 2024, "On-Policy Distillation of
Language Models", section 2). All are in nats. N tokens, V entries that a distribution has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.config.algorithm import DivergenceKind

# Sums over the entries of each token's distribution: [N, V] → [N].
Total = Callable[[Tensor], Tensor]


def sum_entries(values_NV: Tensor) -> Tensor:
    """Return the sum over the entries of each row, [N]."""
    return values_NV.sum(-1)


@dataclass(frozen=True)
class Divergence:
    """One of the divergences of this module.

    `beta`: the β of jsd, between 0 and 1; the others do not read it.
    The arguments of the methods are log-probabilities, fp32[N, V]. `total` sums over V; if the
    vocabulary is cut over ranks, over those of all of them.
    """

    kind: DivergenceKind
    beta: float = 0.5

    def loss(self, student_NV: Tensor, teacher_NV: Tensor, total: Total = sum_entries) -> Tensor:
        """Return the divergence of each token, [N]."""
        if self.kind == "forward_kl":
            return kl(teacher_NV, student_NV, total)
        if self.kind == "reverse_kl":
            return kl(student_NV, teacher_NV, total)
        mixture_NV = self._log_mixture(student_NV, teacher_NV)
        of_teacher_N = kl(teacher_NV, mixture_NV, total)
        of_student_N = kl(student_NV, mixture_NV, total)
        return self.beta * of_teacher_N + (1 - self.beta) * of_student_N

    def loss_and_gradient(
        self, student_NV: Tensor, teacher_NV: Tensor, total: Total = sum_entries
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence of each token, [N], and its gradient, [N, V].

        The gradient is with respect to the logits of which the student's log-probabilities are the
        log-softmax:

            forward_kl   Q − P
            reverse_kl   Q (log Q − log P − KL(Q ‖ P))
            jsd          (1 − β) Q (log Q − log M − KL(Q ‖ M))
        """
        if self.kind == "forward_kl":
            loss_N = kl(teacher_NV, student_NV, total)
            return loss_N, student_NV.exp().sub_(teacher_NV.exp())
        if self.kind == "reverse_kl":
            loss_N = kl(student_NV, teacher_NV, total)
            return loss_N, _gradient_of_student(student_NV, teacher_NV, loss_N)
        mixture_NV = self._log_mixture(student_NV, teacher_NV)
        of_teacher_N = kl(teacher_NV, mixture_NV, total)
        of_student_N = kl(student_NV, mixture_NV, total)
        loss_N = self.beta * of_teacher_N + (1 - self.beta) * of_student_N
        gradient_NV = _gradient_of_student(student_NV, mixture_NV, of_student_N)
        return loss_N, gradient_NV.mul_(1 - self.beta)

    def _log_mixture(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        """Return log M, [N, V]."""
        student_part_NV = student_NV + math.log(1 - self.beta)
        teacher_part_NV = teacher_NV + math.log(self.beta)
        return torch.logaddexp(student_part_NV, teacher_part_NV)


def kl(first_NV: Tensor, second_NV: Tensor, total: Total = sum_entries) -> Tensor:
    """Return KL(first ‖ second) of log-probabilities, [N] in nats."""
    summands_NV = first_NV.exp() * (first_NV - second_NV)
    return total(summands_NV)


def _gradient_of_student(student_NV: Tensor, other_NV: Tensor, kl_N: Tensor) -> Tensor:
    """Return Q (log Q − log other − KL(Q ‖ other)), [N, V]; `kl_N` is this KL."""
    difference_NV = (student_NV - other_NV).sub_(kl_N[:, None])
    return difference_NV.mul_(student_NV.exp())

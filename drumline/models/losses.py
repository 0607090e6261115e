"""Cross-entropy, summed: the plain one, and one over a linear head that never makes all logits. Pure tensor functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

IGNORE = -100
# softmax − one-hot lies in [−1, 1]: this power of two brings it near fp16's largest value (65504), and small ones out of its zero.
FP16_SCALE = 2.0**15


@dataclass(frozen=True)
class VocabularyPart:
    """Which rows of the head this rank holds: those from `first` on. The ranks of `group` hold all of them and see the same tokens."""

    group: dist.ProcessGroup
    first: int


def cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ −log softmax(logits)[target] over targets != −100, in fp32, and bool[N]: whether the first choice is the target."""
    loss_sum = functional.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORE, reduction="sum")
    return loss_sum, logits_NV.detach().argmax(-1) == targets_N


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    chunk: int,
    part: VocabularyPart | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy(hidden @ weightᵀ + bias, targets)` with the logits of at most `chunk` tokens in memory at once.

    The gradients of hidden, weight and bias are made chunk by chunk in the forward, where the logits are at hand: a loss that is
    a sum scales them by one number in backward, so nothing need be computed twice (the idea of Cut Cross-Entropy, Wijmans et
    al. 2025, and of Liger's fused head, Hsu et al. 2024; unlike those this is plain PyTorch). Rows without a target are left out
    before the product. Under autocast the product runs in its type, as a linear layer would; softmax, sums and the gradients of
    the products are fp32. fp16's loss scale is not known yet when gradients are made, so a scale of their own keeps small ones.
    `chunk` 0: all logits at once. One backward, and no second derivatives.

    `part`: weight and bias are this rank's rows. Softmax is taken over all of them (Megatron-LM's vocabulary-parallel loss, Shoeybi et
    al. 2019): loss, first choice and hidden's gradient are those of the whole head on each rank. Collective.
    """
    if part is not None:
        chunk = chunk or max(1, len(targets_N))
    elif chunk == 0:
        return cross_entropy(functional.linear(hidden_ND, weight_VD, bias_V), targets_N)
    # Inside a Function neither grad mode nor needs_input_grad tells of a no_grad around it.
    loss_sum, correct_N = _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias_V, targets_N, chunk, part, torch.is_grad_enabled())
    return loss_sum, correct_N


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        chunk: int,
        part: VocabularyPart | None,
        learning: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind, dtype = hidden_ND.device.type, product_dtype(hidden_ND)
        precise = torch.promote_types(dtype, torch.float32)
        scale = FP16_SCALE if dtype == torch.float16 else 1.0
        wants = [learning and needed for needed in ctx.needs_input_grad[:3]]
        target_rows = (targets_N != IGNORE).nonzero().squeeze(1)
        weight, bias = weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
        loss_sum = torch.zeros((), dtype=precise, device=hidden_ND.device)
        correct_N = torch.zeros_like(targets_N, dtype=torch.bool)
        grad_hidden = torch.zeros_like(hidden_ND, dtype=precise) if wants[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=precise) if wants[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=precise) if bias_V is not None and wants[2] else None
        with torch.autocast(kind, enabled=False):
            for rows in target_rows.split(chunk):
                hidden, targets = hidden_ND[rows].to(dtype), targets_N[rows]
                logits = functional.linear(hidden, weight, bias).to(precise)
                top, first = _largest(logits, part)
                correct_N[rows] = first == targets
                # Written over the logits in turn: logits − largest, exp of that, softmax, softmax − one-hot = d loss / d logits.
                grad = logits.sub_(top[:, None])
                column, mine = columns(targets, part, grad.shape[1])
                chosen = torch.where(mine, grad.gather(1, column), 0.0).squeeze(1)
                total = grad.exp_().sum(-1)
                if part is not None:
                    both = torch.stack([chosen, total])
                    dist.all_reduce(both, group=part.group)
                    chosen, total = both.unbind()
                loss_sum += (total.log() - chosen).sum()
                if not any(wants):
                    continue
                grad.div_(total[:, None]).scatter_add_(1, column, -mine.to(precise))
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                low = grad.mul_(scale).to(dtype) if scale != 1.0 else grad.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = product(low, weight, precise).div_(scale)
                if grad_weight is not None and dtype == precise:
                    grad_weight.addmm_(low.T, hidden)
                elif grad_weight is not None:
                    grad_weight.add_(product(low.T, hidden, precise), alpha=1 / scale)
        if grad_hidden is not None and part is not None:
            dist.all_reduce(grad_hidden, group=part.group)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.mark_non_differentiable(correct_N)
        return loss_sum, correct_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, _: Any) -> tuple[Any, ...]:
        # In place: a second copy of the weight's gradient would be as large as the logits that were saved. autograd sees the
        # change and refuses a second backward.
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        grads = [None if grad is None else grad.mul_(grad_loss).to(dtype) for grad, dtype in saved]
        return (*grads, None, None, None, None)


def _largest(logits_NV: torch.Tensor, part: VocabularyPart | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of each row and its number in the whole vocabulary, of equal ones the lowest."""
    top_N, first_N = logits_NV.max(-1)
    if part is None:
        return top_N, first_N
    mine_N = top_N.clone()
    dist.all_reduce(top_N, dist.ReduceOp.MAX, group=part.group)
    first_N = torch.where(mine_N == top_N, first_N + part.first, torch.iinfo(torch.int64).max)
    dist.all_reduce(first_N, dist.ReduceOp.MIN, group=part.group)
    return top_N, first_N


def product_dtype(hidden_ND: torch.Tensor) -> torch.dtype:
    """In which a linear layer would multiply these: autocast's type where it is on."""
    kind = hidden_ND.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype


def columns(targets_N: torch.Tensor, part: VocabularyPart | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target here, int64[N, 1], and bool[N, 1]: whether it is one (else the column is any)."""
    column_N1 = targets_N[:, None] - (0 if part is None else part.first)
    mine_N1 = (column_N1 >= 0) & (column_N1 < width)
    return column_N1.clamp(0, width - 1), mine_N1


def product(a: torch.Tensor, b: torch.Tensor, precise: torch.dtype) -> torch.Tensor:
    """a @ b for factors of 16 bits with a result in `precise`: rounding it to 16 bits would lose, and in fp16 overflow, what fp32
    sums hold. A GPU's matrix units sum in fp32 anyhow; a CPU multiplies in fp32 for fp16, and rounds once for bf16."""
    if a.dtype == precise:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=precise)
    return a.to(precise) @ b.to(precise) if a.dtype == torch.float16 else (a @ b).to(precise)

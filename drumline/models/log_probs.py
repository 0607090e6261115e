"""Log-probabilities of tokens, one by one: plain ones, and those over a linear head that never makes all logits. Pure tensor functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from drumline.models.losses import FP16_SCALE, IGNORE, VocabularyPart, columns, product, product_dtype

Answers = tuple[torch.Tensor, torch.Tensor | None]


def log_probs(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0, entropy: bool = False) -> Answers:
    """log softmax(logits / temperature)[target] in fp32, [N], 0 where the target is −100; and the entropy (nats) of those
    distributions, 0 in the same places; None unless it is asked for."""
    target_rows = (targets_N != IGNORE).nonzero().squeeze(1)
    logits = logits_NV[target_rows]
    log_NV = functional.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    empty_N = log_NV.new_zeros(len(targets_N))
    chosen_N = empty_N.index_copy(0, target_rows, log_NV.gather(1, targets_N[target_rows][:, None]).squeeze(1))
    return chosen_N, empty_N.index_copy(0, target_rows, -(log_NV.exp() * log_NV).sum(-1)) if entropy else None


def linear_log_probs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    chunk: int,
    temperature: float = 1.0,
    entropy: bool = False,
    part: VocabularyPart | None = None,
) -> Answers:
    """`log_probs(hidden @ weightᵀ + bias, …)` with the logits of at most `chunk` tokens in memory at once, forward and backward.

    What comes back to each token's answer is not known in forward, so the gradients cannot be made there, as `linear_cross_entropy` does:
    forward keeps the hidden states and each token's log-sum-exp, and backward makes the logits again, chunk by chunk (recomputation,
    Chen et al. 2016; of softmax from its log-sum-exp, Cut Cross-Entropy, Wijmans et al. 2025). With p = softmax, H its entropy:
    d log p_target / d logit = onehot − p, dH / d logit = −p (log p + H). Types are as in `linear_cross_entropy`; in fp16 each chunk's
    gradient is brought near fp16's largest number by a power of two of its own, whatever loss scale it comes with.
    `chunk` 0: all logits at once, by autograd. One or several backwards, no second derivatives.

    `part`: weight and bias are this rank's rows, and the answers those of the whole head. Collective, backward too.
    """
    if part is None and chunk == 0:
        return log_probs(functional.linear(hidden_ND, weight_VD, bias_V), targets_N, temperature, entropy)
    answers: Answers = _LinearLogProbs.apply(
        hidden_ND, weight_VD, bias_V, targets_N, chunk or max(1, len(targets_N)), temperature, entropy, part
    )
    return answers


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        chunk: int,
        temperature: float,
        entropy: bool,
        part: VocabularyPart | None,
    ) -> Answers:
        dtype = product_dtype(hidden_ND)
        ctx.dtype, ctx.chunk, ctx.temperature, ctx.part = dtype, chunk, temperature, part
        ctx.set_materialize_grads(False)
        chosen_N, total_N, entropy_N = (
            torch.zeros(len(targets_N), dtype=torch.promote_types(dtype, torch.float32), device=hidden_ND.device) for _ in range(3)
        )
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = _cast(weight_VD, bias_V, dtype)
            for rows in _chunks(targets_N, chunk):
                logits = _logits(hidden_ND[rows].to(dtype), weight, bias, temperature)
                top = logits.amax(-1)
                if part is not None:
                    dist.all_reduce(top, dist.ReduceOp.MAX, group=part.group)
                logits.sub_(top[:, None])
                column, mine = columns(targets_N[rows], part, logits.shape[1])
                chosen = torch.where(mine, logits.gather(1, column), 0.0).squeeze(1)
                weights = logits.exp()
                sums = torch.stack([chosen, weights.sum(-1), *([weights.mul_(logits).sum(-1)] if entropy else [])])
                if part is not None:
                    dist.all_reduce(sums, group=part.group)
                log_total = sums[1].log()
                chosen_N[rows] = sums[0] - log_total
                total_N[rows] = top + log_total
                if entropy:
                    entropy_N[rows] = log_total - sums[2] / sums[1]
        # The weight as it is: a cast one would be another copy of it, kept until backward.
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, total_N, entropy_N)
        return chosen_N, entropy_N if entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_chosen_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, total_N, entropy_N = ctx.saved_tensors
        dtype, precise = ctx.dtype, total_N.dtype
        wants = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_ND, dtype=precise) if wants[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=precise) if wants[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=precise) if wants[2] else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = _cast(weight_VD, bias_V, dtype)
            for rows in _chunks(targets_N, ctx.chunk):
                hidden = hidden_ND[rows].to(dtype)
                log_p = _logits(hidden, weight, bias, ctx.temperature).sub_(total_N[rows][:, None])
                grad = _grad_logits(log_p, rows, grad_chosen_N, grad_entropy_N, entropy_N, *columns(targets_N[rows], ctx.part, len(weight)))
                grad.div_(ctx.temperature)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                scale = _scale(grad) if dtype == torch.float16 else None
                low = (grad if scale is None else grad.mul_(scale)).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = _product(low, weight, precise, scale)
                if grad_weight is not None and dtype == precise:
                    grad_weight.addmm_(low.T, hidden)
                elif grad_weight is not None:
                    grad_weight += _product(low.T, hidden, precise, scale)
        if grad_hidden is not None and ctx.part is not None:
            dist.all_reduce(grad_hidden, group=ctx.part.group)
        grads = zip((grad_hidden, grad_weight, grad_bias), (hidden_ND, weight_VD, bias_V), strict=True)
        return (*(None if grad is None else grad.to(of.dtype) for grad, of in grads), None, None, None, None, None)


def _cast(weight_VD: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _chunks(targets_N: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """Numbers of the rows that have a target, at most `chunk` at a time."""
    return [rows for rows in (targets_N != IGNORE).nonzero().squeeze(1).split(chunk) if len(rows)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _grad_logits(
    log_p: torch.Tensor,
    rows: torch.Tensor,
    grad_chosen_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    entropy_N: torch.Tensor,
    column: torch.Tensor,
    mine: torch.Tensor,
) -> torch.Tensor:
    """What comes back to logits / temperature, [n, V] of the rows in hand."""
    p = log_p.exp()
    zero = torch.zeros_like(entropy_N[rows])
    chosen = zero if grad_chosen_N is None else grad_chosen_N[rows].to(zero.dtype)
    if grad_entropy_N is None:
        grad = p.mul_(-chosen[:, None])
    else:
        entropy = grad_entropy_N[rows].to(zero.dtype)[:, None]
        grad = p.mul_(log_p.add_(entropy_N[rows][:, None]).mul_(-entropy).sub_(chosen[:, None]))
    return grad.scatter_add_(1, column, torch.where(mine, chosen[:, None], 0.0))


def _product(a: torch.Tensor, b: torch.Tensor, precise: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    return product(a, b, precise) if scale is None else product(a, b, precise).div_(scale)


def _scale(grad: torch.Tensor) -> torch.Tensor:
    """The power of two that brings the largest entry near FP16_SCALE, as a tensor: nothing is waited for."""
    largest = grad.abs().amax().clamp_min(torch.finfo(grad.dtype).tiny)
    return torch.exp2((FP16_SCALE / largest).log2().floor().clamp(-100, 100))

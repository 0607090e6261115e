"""Log-probabilities of K chosen continuations of each token, and of all others together.

A teacher's distribution is kept as these K + 1 numbers, and the student's is compared with them.
N tokens; M of them that are learned from, at the places `rows_M`; V entries of the vocabulary, D
width; n tokens of one chunk. In ids_MK are the numbers of the K continuations in the vocabulary.
L = K + 1: the log-probabilities of these, then the logarithm of the sum of all other probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from drumline.models.containers import product_dtype
from drumline.models.losses import (
    HeadGradients,
    LinearHead,
    VocabularyPart,
    cast_head,
    largest_logit,
    rows_in_chunk,
    scaled_logits,
)

# e to this power is still a number in fp32.
LARGEST_EXPONENT = 80.0


class Choices(NamedTuple):
    """The K likeliest continuations of each of M tokens, by one model.

    `ids_MK`: int64. `log_probs_ML`: fp32, without a gradient.
    """

    ids_MK: Tensor
    log_probs_ML: Tensor

    def select(self, rows_m: Tensor) -> Choices:
        """Return the choices of some of the tokens, by their numbers."""
        return Choices(self.ids_MK[rows_m], self.log_probs_ML[rows_m])

    def each(self, change: Callable[[Tensor], Tensor]) -> Choices:
        """Return the choices with `change` applied to both tensors."""
        return Choices(change(self.ids_MK), change(self.log_probs_ML))


def choice_log_probs(logits_MV: Tensor, ids_MK: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of softmax(logits / temperature), fp32[M, L], by autograd."""
    precise = torch.promote_types(logits_MV.dtype, torch.float32)
    scaled_MV = logits_MV.to(precise) / temperature
    total_M1 = scaled_MV.logsumexp(-1, keepdim=True)
    chosen_MK = scaled_MV.gather(1, ids_MK)
    rest_MV = scaled_MV.scatter(1, ids_MK, -torch.inf)
    rest_M1 = rest_MV.logsumexp(-1, keepdim=True)
    return torch.cat((chosen_MK, rest_M1), 1) - total_M1


def top_choices(logits_MV: Tensor, k: int, limit: int, temperature: float = 1.0) -> Choices:
    """Return the K likeliest continuations by whole logits.

    `k`: the most choices; one entry at least is left for the others. `limit`: how many entries of
    the vocabulary count, from the first on.
    """
    logits_MV = logits_MV[:, :limit]
    entries = logits_MV.shape[1]
    _, ids_MK = logits_MV.topk(min(k, entries - 1))
    return Choices(ids_MK, choice_log_probs(logits_MV, ids_MK, temperature))


def linear_top_choices(
    hidden_ND: Tensor,
    head: LinearHead,
    rows_M: Tensor,
    k: int,
    limit: int,
    chunk: int,
    temperature: float = 1.0,
) -> Choices:
    """Return `top_choices` of a head's logits, for a few tokens at a time.

    `chunk`: tokens whose logits are in memory at once; 0: all. If the head has a part of the rows,
    the choices are those of the whole head on each rank. Collective then.
    """
    dtype = product_dtype(hidden_ND)
    all_ids = []
    all_log_probs = []
    with torch.autocast(hidden_ND.device.type, enabled=False):
        weight, bias = cast_head(head.weight_VD, head.bias_V, dtype)
        for rows in rows_M.split(rows_in_chunk(chunk, rows_M)):
            logits = scaled_logits(hidden_ND[rows].to(dtype), weight, bias, temperature)
            if head.part is None:
                ids, log_probs = top_choices(logits, k, limit)
            else:
                ids, log_probs = _top_choices_of_parts(logits, k, limit, head.part)
            all_ids.append(ids)
            all_log_probs.append(log_probs)
    return Choices(torch.cat(all_ids), torch.cat(all_log_probs))


def _top_choices_of_parts(logits: Tensor, k: int, limit: int, part: VocabularyPart) -> Choices:
    """Return `top_choices` of logits [n, V / ranks] that are cut over the ranks of a group.

    The logits are overwritten. Collective.
    """
    entries = logits.shape[1]
    # Entries of this part that count.
    counted = min(max(limit - part.first, 0), entries)
    logits[:, counted:] = -torch.inf
    # Each rank offers its likeliest ones, so the likeliest of all are among what is offered.
    ranks = dist.get_world_size(part.group)
    offered = min(k, entries)
    values, columns = logits.topk(offered)
    # The vocabulary may be cut unevenly, and all ranks must offer as many.
    values = functional.pad(values, (0, k - offered), value=-torch.inf)
    columns = functional.pad(columns, (0, k - offered))
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(all_values, values.contiguous(), group=part.group)
    ids = columns + part.first
    all_ids = [torch.empty_like(ids) for _ in range(ranks)]
    dist.all_gather(all_ids, ids.contiguous(), group=part.group)
    _, places = torch.cat(all_values, 1).topk(min(k, limit - 1))
    chosen_ids = torch.cat(all_ids, 1).gather(1, places)
    sums = _sums_of_logits(logits, chosen_ids, part)
    return Choices(chosen_ids, sums.log_probs)


def linear_choice_log_probs(
    hidden_ND: Tensor,
    head: LinearHead,
    rows_M: Tensor,
    ids_MK: Tensor,
    chunk: int,
    temperature: float = 1.0,
) -> Tensor:
    """Return `choice_log_probs` of a head's logits at `rows_M`, for a few tokens at a time.

    As in `losses.linear_log_probs` backward computes the logits again. With p the probabilities, q
    those among the entries that are not chosen, g the gradients of the L results, and G their sum:
    d / d logit is g − G p of a chosen entry, and g_L q − G p of the others.

    `chunk`: tokens whose logits are in memory at once; 0: all.
    If the head has a part of the rows, the results are those of the whole head. Forward and
    backward are collective then.
    """
    options = (rows_M, ids_MK, rows_in_chunk(chunk, rows_M), temperature, head.part)
    log_probs_ML: Tensor = _LinearChoices.apply(hidden_ND, head.weight_VD, head.bias_V, *options)
    return log_probs_ML


class _LinearChoices(torch.autograd.Function):
    """The function of `linear_choice_log_probs`, whose backward computes the logits again.

    The last five arguments of `apply` are: the places of the tokens, the ids, the most tokens of a
    chunk, the temperature, and this rank's part of the head or None.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *options: Any
    ) -> Tensor:
        """Return the log-probabilities, and keep two sums of each token for backward."""
        rows_M, ids_MK, chunk, temperature, part = options
        dtype = product_dtype(hidden_ND)
        # Backward runs without the autocast of the forward, whose type it needs.
        ctx.dtype = dtype
        ctx.chunk = chunk
        ctx.temperature = temperature
        ctx.part = part
        precise = torch.promote_types(dtype, torch.float32)
        choices = ids_MK.shape[1]
        log_probs_ML = torch.zeros(
            (len(rows_M), choices + 1), dtype=precise, device=hidden_ND.device
        )
        total_M = log_probs_ML.new_zeros(len(rows_M))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = cast_head(weight_VD, bias_V, dtype)
            for start in range(0, len(rows_M), chunk):
                here = slice(start, start + chunk)
                hidden = hidden_ND[rows_M[here]].to(dtype)
                logits = scaled_logits(hidden, weight, bias, temperature)
                sums = _sums_of_logits(logits, ids_MK[here], part)
                log_probs_ML[here] = sums.log_probs
                total_M[here] = sums.log_total
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, rows_M, ids_MK, log_probs_ML, total_M)
        return log_probs_ML

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_ML: Tensor) -> tuple[Any, ...]:
        """Return the gradients of hidden states, weight and bias from the logits computed again."""
        hidden_ND, weight_VD, bias_V, rows_M, ids_MK, log_probs_ML, total_M = ctx.saved_tensors
        head = (hidden_ND, weight_VD, bias_V)
        dtype = ctx.dtype
        grads = HeadGradients(*head, ctx.needs_input_grad[:3], log_probs_ML.dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = cast_head(weight_VD, bias_V, dtype)
            for start in range(0, len(rows_M), ctx.chunk):
                here = slice(start, start + ctx.chunk)
                rows = rows_M[here]
                hidden = hidden_ND[rows].to(dtype)
                logits = scaled_logits(hidden, weight, bias, ctx.temperature)
                logits.sub_(total_M[here][:, None])
                grad = _grad_logits(
                    logits, log_probs_ML[here], grad_ML[here], ids_MK[here], ctx.part
                )
                grads.add_scaled(rows, grad, hidden, weight, ctx.temperature)
        # The five options have no gradients.
        return (*grads.total_as(head, ctx.part), *[None] * 5)


class _Sums(NamedTuple):
    """What is computed from the logits of n tokens.

    `log_probs`: [n, L]. `log_total`: [n], log Σ exp(logit) over the whole vocabulary.
    """

    log_probs: Tensor
    log_total: Tensor


def _sums_of_logits(logits: Tensor, ids: Tensor, part: VocabularyPart | None) -> _Sums:
    """Return the log-probabilities of some entries and of all others together.

    `logits`: [n, V], overwritten. `ids`: [n, K]. Collective with `part`.
    """
    top = largest_logit(logits, part)[:, None]
    columns, is_mine = _columns(logits, ids, part)
    logits.sub_(top)
    chosen = logits.gather(1, columns)
    _hide(logits, columns, is_mine)
    # The chosen entries are left out of this sum, and not taken off it: it may be far smaller.
    rest = logits.exp_().sum(-1, keepdim=True)
    if is_mine is not None and part is not None:
        # The rank that has an entry adds it to the sum over ranks, all others 0.
        chosen = torch.where(is_mine, chosen, 0.0)
        stacked = torch.cat((chosen, rest), 1)
        dist.all_reduce(stacked, group=part.group)
        chosen, rest = stacked.split([ids.shape[1], 1], 1)
    # A probability of 0 has no logarithm.
    rest = rest.clamp_min(torch.finfo(rest.dtype).tiny)
    log_total = (chosen.exp().sum(-1, keepdim=True) + rest).log()
    log_probs = torch.cat((chosen, rest.log()), 1) - log_total
    return _Sums(log_probs, (top + log_total).squeeze(1))


def _columns(
    logits: Tensor, ids: Tensor, part: VocabularyPart | None
) -> tuple[Tensor, Tensor | None]:
    """Return the columns of ids in this part of the logits, [n, K], and which of them it has.

    None if it has all. The column of an entry of another part is any number.
    """
    if part is None:
        return ids, None
    entries = logits.shape[1]
    places = ids - part.first
    is_mine = (places >= 0) & (places < entries)
    return places.clamp(0, entries - 1), is_mine


def _hide(logits: Tensor, columns: Tensor, is_mine: Tensor | None) -> None:
    """Set the logits at some columns to −inf, in place."""
    if is_mine is None:
        logits.scatter_(1, columns, -torch.inf)
        return
    # A column that stands for an entry of another part must keep its logit.
    most = torch.full_like(columns, torch.inf, dtype=logits.dtype)
    most.masked_fill_(is_mine, -torch.inf)
    logits.scatter_reduce_(1, columns, most, "amin")


def _grad_logits(
    log_p: Tensor, log_probs: Tensor, grad: Tensor, ids: Tensor, part: VocabularyPart | None
) -> Tensor:
    """Return the gradient of logits / temperature, [n, V]; `log_p` is overwritten.

    `log_p`: log softmax, [n, V]. `log_probs` and `grad`: the results and their gradients, [n, L].
    """
    columns, is_mine = _columns(log_p, ids, part)
    _hide(log_p, columns, is_mine)
    grad_total = grad.sum(-1, keepdim=True)
    chosen, rest = log_probs.split([ids.shape[1], 1], 1)
    grad_of_chosen, grad_of_rest = grad.split([ids.shape[1], 1], 1)
    # q = p / the sum of all others.
    one_over_rest = (-rest).clamp_max(LARGEST_EXPONENT).exp()
    factor = grad_of_rest * one_over_rest - grad_total
    result = log_p.exp_().mul_(factor)
    # Hidden entries are 0 so far.
    of_chosen = grad_of_chosen - chosen.exp() * grad_total
    if is_mine is not None:
        of_chosen = torch.where(is_mine, of_chosen, 0.0)
    return result.scatter_add_(1, columns, of_chosen)

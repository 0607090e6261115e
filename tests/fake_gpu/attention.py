"""Attention by its formula, in fp32 on the CPU: what the flash, efficient and varlen kernels compute.

Shapes: B batch, H heads, T queries, S keys, D width of a head. Keys and values may have fewer heads
(grouped queries). The backward takes the log-sum-exp that the forward gave, as the kernels do: ring
attention hands in that of all chunks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNBOUNDED = -1


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. `left`, `right`: how many beside its own position; -1: all."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @classmethod
    def of(cls, is_causal: bool, left: int | None = None, right: int | None = None) -> Mask:
        bounded_right = 0 if is_causal else right
        return cls(
            left=UNBOUNDED if left is None else left,
            right=UNBOUNDED if bounded_right is None else bounded_right,
        )

    def visible(self, queries: int, keys: int) -> Tensor:
        """Return a bool tensor [T, S]."""
        query = torch.arange(queries)[:, None]
        key = torch.arange(keys)[None, :]
        visible = torch.ones(queries, keys, dtype=torch.bool)
        if self.right >= 0:
            visible &= key <= query + self.right
        if self.left >= 0:
            visible &= key >= query - self.left
        return visible


class Attended(NamedTuple):
    """What a forward gives, in fp32."""

    output_BHTD: Tensor
    # Of the scores. Kernels pad it in the last dimension.
    log_sum_exp_BHT: Tensor


class Gradients(NamedTuple):
    """Of the queries, keys, values and the bias, in fp32."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor


def forward(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    mask: Mask,
    scale: float | None,
    bias: Tensor | None = None,
) -> Attended:
    """Return the output and the log-sum-exp of the scores."""
    groups = query_BHTD.shape[1] // key_BHSD.shape[1]
    value = value_BHSD.float().repeat_interleave(groups, 1)
    scores = _scores(query_BHTD, key_BHSD, mask, scale, bias)
    probabilities = torch.softmax(scores, -1).nan_to_num(0)  # a query that sees no key
    return Attended(probabilities @ value, torch.logsumexp(scores, -1))


def backward(
    grad_BHTD: Tensor,
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attended: Attended,
    mask: Mask,
    scale: float | None,
    bias: Tensor | None = None,
) -> Gradients:
    """Return the gradients, by the formula of FlashAttention (arXiv:2205.14135, appendix B.2)."""
    key_heads = key_BHSD.shape[1]
    groups = query_BHTD.shape[1] // key_heads
    grad = grad_BHTD.float()
    query = query_BHTD.float()
    key = key_BHSD.float().repeat_interleave(groups, 1)
    value = value_BHSD.float().repeat_interleave(groups, 1)
    scores = _scores(query_BHTD, key_BHSD, mask, scale, bias)
    queries = query.shape[2]
    log_sum_exp = attended.log_sum_exp_BHT[..., :queries, None]
    probabilities = torch.exp(scores - log_sum_exp).nan_to_num(0)

    grad_value = probabilities.transpose(-1, -2) @ grad
    grad_probabilities = grad @ value.transpose(-1, -2)
    correction = (grad * attended.output_BHTD.float()).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - correction)
    factor = _factor(query, scale)
    grad_query = grad_scores @ key * factor
    grad_key = grad_scores.transpose(-1, -2) @ query * factor
    return Gradients(
        query=grad_query,
        key=_sum_of_groups(grad_key, key_heads),
        value=_sum_of_groups(grad_value, key_heads),
        bias=grad_scores,
    )


def _scores(
    query_BHTD: Tensor, key_BHSD: Tensor, mask: Mask, scale: float | None, bias: Tensor | None
) -> Tensor:
    groups = query_BHTD.shape[1] // key_BHSD.shape[1]
    query = query_BHTD.float()
    key = key_BHSD.float().repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * _factor(query, scale)
    if bias is not None:
        scores = scores + bias.float()
    visible = mask.visible(query.shape[2], key.shape[2])
    return scores.masked_fill(~visible, float("-inf"))


def _factor(query: Tensor, scale: float | None) -> float:
    if scale is not None:
        return scale
    width: int = query.shape[-1]
    return float(width**-0.5)


def _sum_of_groups(grad_BHSD: Tensor, key_heads: int) -> Tensor:
    """Return [B, key heads, S, D]: what all queries of a group give to their common key."""
    groups = grad_BHSD.shape[1] // key_heads
    return grad_BHSD.unflatten(1, (key_heads, groups)).sum(2)

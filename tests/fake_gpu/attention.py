"""Attention by its formula, in fp32 on the CPU: what the flash, efficient and varlen kernels compute.

Shapes: B batch, H heads, T queries, S keys, D width of a head. Keys and values may have fewer heads
(grouped queries). The backward takes the log-sum-exp that the forward gave, as the kernels do: ring
attention hands in that of all chunks together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNBOUNDED = -1


class Mask(NamedTuple):
    """Which keys a query sees. `left`, `right`: how many beside its own position."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED

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


class Attention:
    """What queries make of keys and values. All have as many heads as the queries, in fp32."""

    def __init__(
        self,
        query_BHTD: Tensor,
        key_BHSD: Tensor,
        value_BHSD: Tensor,
        mask: Mask,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> None:
        self.groups = query_BHTD.shape[1] // key_BHSD.shape[1]
        self.query = query_BHTD.float()
        self.key = key_BHSD.float().repeat_interleave(self.groups, 1)
        self.value = value_BHSD.float().repeat_interleave(self.groups, 1)
        self.scale = scale
        if scale is None:
            self.scale = self.query.shape[-1] ** -0.5

        scores = self.query @ self.key.mT * self.scale
        if bias is not None:
            scores = scores + bias.float()
        visible = mask.visible(self.query.shape[2], self.key.shape[2])
        self.scores = scores.masked_fill(~visible, float("-inf"))

    def forward(self) -> Attended:
        """Return the output and the log-sum-exp of the scores."""
        probabilities = torch.softmax(self.scores, -1).nan_to_num(0)  # a query that sees no key
        return Attended(probabilities @ self.value, torch.logsumexp(self.scores, -1))

    def backward(self, grad_BHTD: Tensor, attended: Attended) -> Gradients:
        """Return the gradients, by the formula of FlashAttention (arXiv:2205.14135, appendix B.2)."""
        queries = self.query.shape[2]
        log_sum_exp = attended.log_sum_exp_BHT[..., :queries, None]
        probabilities = torch.exp(self.scores - log_sum_exp).nan_to_num(0)

        grad = grad_BHTD.float()
        grad_value = probabilities.mT @ grad
        grad_probabilities = grad @ self.value.mT
        correction = (grad * attended.output_BHTD.float()).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - correction)
        grad_key = grad_scores.mT @ self.query * self.scale
        return Gradients(
            query=grad_scores @ self.key * self.scale,
            key=self._sum_of_groups(grad_key),
            value=self._sum_of_groups(grad_value),
            bias=grad_scores,
        )

    def _sum_of_groups(self, grad_BHSD: Tensor) -> Tensor:
        """Return [B, key heads, S, D]: what all queries of a group give to their common key."""
        return grad_BHSD.unflatten(1, (-1, self.groups)).sum(2)

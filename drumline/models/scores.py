"""Heads with one number for each token: the `score` of a reward or value model, and the value head of a policy.

A score model is transformers' sequence classifier with one label: a trunk and the linear layer `score`. If the files (a causal LM's) lack
its weight, the model's initialisation draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drumline.core.model import Head
from drumline.dist.seeds import drawing
from drumline.errors import ModelError
from drumline.models.classifier import head_weights, is_bidirectional, last_token_head

VALUE = "value_head"


class ValueHead(nn.Linear):
    """The value of each token, a linear function of the hidden states that the policy's head reads.

    It starts at zero: the first values are 0, and they send no gradient into the trunk. A random head would change the policy by noise.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with drawing(None, torch.device(device).type):
            super().__init__(width, 1, dtype=dtype, device=device)
        self._init_weights(self)

    def _init_weights(self, _module: nn.Module) -> None:
        """By transformers' functions, which `models.draw` patches."""
        from drumline.vendor.transformers import initialization

        initialization.zeros_(self.weight)
        initialization.zeros_(self.bias)


def score_parts(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """(trunk, score) of a score model; None for any other."""
    parts = last_token_head(model)
    return parts if parts is not None and parts[1].out_features == 1 else None


def score_head(model: Any) -> nn.Linear | None:
    """The head with one number for each token; None without one."""
    parts = score_parts(model)
    return parts[1] if parts else getattr(model, VALUE, None)


def with_head(model: Any, head: Head) -> Any:
    """A fresh model with the head that transformers has no class for. Raises ModelError for a model that cannot have `head`, such as a
    sequence classifier that does not score each token."""
    if head == "score" and (score_parts(model) is None or is_bidirectional(model)):
        what = f"{type(model).__name__} has no score of each token: its head reads the text as a whole"
        raise ModelError(what, where="model", fix="name a causal language model, or a reward model made of one")
    if head == "valued":
        if (output_head := model.get_output_embeddings()) is None:
            what = f"{type(model).__name__} has no output embedding to lay a value head beside"
            raise ModelError(what, where="algorithm.value", fix="use value: separate")
        setattr(model, VALUE, ValueHead(output_head.weight.shape[1], output_head.weight.dtype, output_head.weight.device))
    return model


def language_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a policy without those of its value head: sampling needs only the language model."""
    return ((name, tensor) for name, tensor in weights if not name.startswith(f"{VALUE}."))


def extra_heads(model: Any) -> frozenset[str]:
    """Names of the tensors of heads that no language model has: files may lack them, and beside an adapter they are fully trainable."""
    if model.get_output_embeddings() is None:
        return head_weights(model)
    return frozenset(name for name in model.state_dict() if name.startswith(f"{VALUE}."))

"""Heads that say one number a token: the `score` of a reward or value model, and the value beside a policy's own head.

A score model is transformers' sequence classifier with one label: a trunk and the linear layer `score`, whose weight is drawn by the
model's own rule where the files (a causal LM's) lack it, as transformers draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drumline.core.model import Head
from drumline.dist.seeds import drawing
from drumline.errors import ModelError
from drumline.models.classifier import head_weights, is_bidirectional

VALUE = "value_head"


class ValueHead(nn.Linear):
    """The value of each token, a linear function of the hidden states that the policy's own head reads.

    It starts at zero: the first values are 0 whatever the model, and nothing comes back through them into the trunk before the head has
    learned something. A drawn one would push the policy about by noise.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with drawing(None, torch.device(device).type):
            super().__init__(width, 1, dtype=dtype, device=device)
        self._init_weights(self)

    def _init_weights(self, _module: nn.Module) -> None:
        """In transformers' own words, which `models.draw` listens to."""
        from drumline.vendor.transformers import initialization

        initialization.zeros_(self.weight)
        initialization.zeros_(self.bias)


def score_parts(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """(trunk, score) of a score model; None for any other."""
    trunk, score = model.base_model, getattr(model, "score", None)
    return (trunk, score) if trunk is not model and isinstance(score, nn.Linear) and score.out_features == 1 else None


def score_head(model: Any) -> nn.Linear | None:
    """What says one number a token, where the model has such a head."""
    parts = score_parts(model)
    return parts[1] if parts else getattr(model, VALUE, None)


def with_head(model: Any, head: Head) -> Any:
    """A fresh model, with what transformers has no class for. Raises ModelError for one that cannot end in `head`, such as a sequence
    classifier that does not score each token by the hidden state of what comes up to it."""
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
    """Of a policy's weights those of the language model, which is what samples."""
    return ((name, tensor) for name, tensor in weights if not name.startswith(f"{VALUE}."))


def extra_heads(model: Any) -> frozenset[str]:
    """Names of the tensors of heads that no language model has: files may lack them, and beside an adapter they learn in full."""
    if model.get_output_embeddings() is None:
        return head_weights(model)
    return frozenset(name for name in model.state_dict() if name.startswith(f"{VALUE}."))

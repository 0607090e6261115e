"""Heads that no language model has: a number for each token (scores of reward and value models, the value head of a policy), and classes. A
score model is transformers' sequence classifier with one label: a trunk and the linear layer `score`. If the files (a causal LM's) lack its
weight, the model's initialisation draws it. B samples, C classes, T tokens, D the width of the trunk."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drumline.core.model import Head
from drumline.dist.seeds import drawing
from drumline.errors import ModelError
from drumline.models.attention import attending
from drumline.models.classes import reads_images
from drumline.models.sequence import SequencePart
from drumline.models.small import close, try_small

VALUE = "value_head"
TRIED_SIDE = 64  # pixels, of models that take any size


class ValueHead(nn.Linear):
    """The value of each token, a linear function of the hidden states that the policy's head reads. It starts at zero: the first values are
    0, and they send no gradient into the trunk. A random head would change the policy by noise."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with drawing(None, torch.device(device).type):
            super().__init__(width, 1, dtype=dtype, device=device)
        self._init_weights(self)

    def _init_weights(self, _module: nn.Module) -> None:
        """By transformers' functions, which `shards.Drawn` patches."""
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
    """A fresh model with the head that transformers has no class for. Raises ModelError for a model that cannot have `head`."""
    if head == "score" and (score_parts(model) is None or is_bidirectional(model)):
        what = (
            f"{type(model).__name__} has no score of each token: its head reads the text as a whole"
        )
        raise ModelError(
            what, where="model", fix="name a causal language model, or a reward model made of one"
        )
    if head == "valued":
        if (output_head := model.get_output_embeddings()) is None:
            what = f"{type(model).__name__} has no output embedding to lay a value head beside"
            raise ModelError(what, where="algorithm.value", fix="use value: separate")
        setattr(
            model,
            VALUE,
            ValueHead(
                output_head.weight.shape[1], output_head.weight.dtype, output_head.weight.device
            ),
        )
    return model


def language_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a policy without those of its value head: sampling needs only the language model."""
    return ((name, tensor) for name, tensor in weights if not name.startswith(f"{VALUE}."))


def extra_heads(model: Any) -> frozenset[str]:
    """Names of the tensors of heads that no language model has: files may lack them, and beside an adapter they are fully trainable."""
    if (
        model.get_output_embeddings() is None
    ):  # a classifier: all outside of the trunk, and a pooler, which masked language models lack
        return frozenset(
            name
            for name in model.state_dict()
            if not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name
        )
    return frozenset(name for name in model.state_dict() if name.startswith(f"{VALUE}."))


def last_token_head(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """(trunk, head) of a model with a linear layer on the last token's hidden state, as transformers' decoders have; None for others."""
    trunk, head = model.base_model, getattr(model, "score", None)
    return (trunk, head) if trunk is not model and isinstance(head, nn.Linear) else None


def class_logits(model: Any, batch: Any, sequence: SequencePart | None = None) -> torch.Tensor:
    """float[B, C] of a batch of texts or images; of sequences cut over ranks (`sequence`) the same on all of these. A text without
    attention mask is for a decoder, whose head reads the last token (`last_B`). That is found by its place and not by the padding id, so a
    text may end in that id."""
    parts = (
        None
        if reads_images(model) or getattr(batch, "attention_mask_BT", None) is not None
        else last_token_head(model)
    )
    if parts is None:
        with attending(model, batch, sequence) as inputs:
            logits_BC: torch.Tensor = model(**inputs).logits
        if sequence is None:
            return logits_BC
        # The head reads the first token.
        return sequence.total(logits_BC * float(sequence.index == 0))
    trunk, head = parts
    with attending(model, batch, sequence) as inputs:
        hidden_BTD = trunk(**inputs, use_cache=False).last_hidden_state
    if sequence is None:
        rows_B = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
        # A trial's rows are full.
        picked: torch.Tensor = head(hidden_BTD[rows_B, getattr(batch, "last_B", -1)])
        return picked
    places_BT = torch.arange(batch.input_ids_BT.shape[1], device=hidden_BTD.device).expand_as(
        batch.input_ids_BT
    )
    here_Bt1 = (sequence.cut(places_BT) == batch.last_B[:, None])[:, :, None].to(hidden_BTD.dtype)
    return sequence.total(head((hidden_BTD * here_Bt1).sum(1)) * here_Bt1.sum(1))


def side_of_model(config: Any) -> int | None:
    """The only side of images that a model takes, in pixels; None: any."""
    size = getattr(config, "image_size", None)
    return int(size[0] if isinstance(size, list | tuple) else size) if size else None


def grey_image(config: Any, device: Any, side: int | None = None) -> torch.Tensor:
    """float[1, C, H, W] zeros of a size that the model takes. `side`: that of the training images, if set."""
    side = side or side_of_model(config) or TRIED_SIDE
    return torch.zeros(1, int(getattr(config, "num_channels", 3)), side, side, device=device)


def is_bidirectional(model: Any) -> bool:
    """Whether a text classifier attends to later tokens, so that its batches need an attention mask. `model` may be on meta. Tried on a
    small copy. A bidirectional model must obey the mask; the head of any other must read the last token. Raises ModelError where it does
    not."""

    def trial(small: Any, ids_BT: torch.Tensor) -> tuple[bool, bool]:
        ids_BT = (
            ids_BT + 16
        ) % small.config.get_text_config().vocab_size  # low ids have special meanings
        changed_BT = ids_BT.clone()
        changed_BT[:, -1] = ids_BT[:, 0]
        first, other = (small.base_model(input_ids=ids)[0][:, 0] for ids in (ids_BT, changed_BT))
        ones_BT = torch.ones_like(ids_BT)
        logits = small(input_ids=ids_BT, attention_mask=ones_BT).logits
        if not close(first, other):
            pad = small.config.get_text_config().pad_token_id or 0
            padded_BT, mask_BT = (
                torch.nn.functional.pad(ids_BT, (0, 3), value=pad),
                torch.nn.functional.pad(ones_BT, (0, 3)),
            )
            return True, close(small(input_ids=padded_BT, attention_mask=mask_BT).logits, logits)
        parts = last_token_head(small)
        return False, parts is not None and close(
            parts[1](parts[0](input_ids=ids_BT).last_hidden_state[:, -1]), logits
        )

    ahead, works = try_small(model, "cpu", trial)
    if not works:
        what = (
            "its padding is seen through the attention mask"
            if ahead
            else "its class is not a linear layer on the last token"
        )
        raise ModelError(
            f"{type(model).__name__} cannot be trained as a classifier here: {what}",
            where="model",
            fix="name another model",
        )
    return ahead


def first_position(model: Any) -> int | None:
    """The position id that the model gives to the first token (RoBERTa: padding id + 1); None if it takes none. Found by trying."""

    def trial(small: Any, ids_BT: torch.Tensor) -> int | None:
        ids_BT = (ids_BT + 16) % small.config.get_text_config().vocab_size
        if "position_ids" not in inspect.signature(small.forward).parameters:
            return None
        by_itself = small(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits
        for first in (0, (small.config.get_text_config().pad_token_id or 0) + 1):
            positions_BT = torch.arange(first, first + ids_BT.shape[1])[None]
            if close(
                small(
                    input_ids=ids_BT,
                    attention_mask=torch.ones_like(ids_BT),
                    position_ids=positions_BT,
                ).logits,
                by_itself,
            ):
                return first
        return None

    return try_small(model, "cpu", trial)

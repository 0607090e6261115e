"""Heads that no language model has: scores and values of tokens, and classes.

A reward or value model has a score for each token, and a policy may have a value head beside its
logits. A score model is transformers' sequence classifier with one label: a trunk and the linear
layer `score`. Files of a causal LM lack the weight of `score`, and the model's initialisation draws
it.

B samples, C classes, T tokens, D the width of the trunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drumline.config.model import Head
from drumline.dist.seeds import use_seed
from drumline.errors import ModelError
from drumline.models.attention import model_inputs
from drumline.models.classes import ends_in_hidden_states, reads_images
from drumline.models.sequence import SequencePart
from drumline.models.small import is_close, try_small

VALUE = "value_head"
# Pixels of the side of a trial's image, for models that take any size.
TRIED_SIDE = 64
# Added to a trial's token ids, since low ids often have special meanings.
FIRST_PLAIN_ID = 16
# Tokens of padding in a trial.
PADDED = 3


class ValueHead(nn.Linear):
    """A linear layer that gives the value of each token from the hidden states of a policy.

    It starts at zero: the first values are 0, and they send no gradient into the trunk. A random
    head would change the policy by noise.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with use_seed(None, torch.device(device).type):
            super().__init__(width, 1, dtype=dtype, device=device)
        self._init_weights(self)

    def _init_weights(self, _module: nn.Module) -> None:
        """Set weight and bias to zero.

        It calls transformers' functions, which `shards.DrawnWeights` patches.
        """
        from drumline.vendor.transformers import initialization

        initialization.zeros_(self.weight)
        initialization.zeros_(self.bias)


def score_parts(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """Return (trunk, score) of a score model; None for any other."""
    parts = last_token_head(model)
    if parts is None:
        return None
    _, head = parts
    # A classifier has such a head too, with a number for each class.
    if head.out_features != 1:
        return None
    return parts


def score_head(model: Any) -> nn.Linear | None:
    """Return the head with one number for each token; None if the model has none."""
    parts = score_parts(model)
    if parts is None:
        return getattr(model, VALUE, None)
    _, score = parts
    return score


def add_head(model: Any, head: Head) -> Any:
    """Return a fresh model with a value head added, if `head` is one that transformers lacks.

    A trunk for embeddings loses the layer that transformers puts on the first token.

    Raises ModelError if it cannot have `head`.
    """
    if head == "embedding":
        remove_pooler(model)
    if head == "score" and (score_parts(model) is None or is_bidirectional(model)):
        what = (
            f"{type(model).__name__} has no score of each token: its head reads the text as a whole"
        )
        fix = "name a causal language model, or a reward model made of one"
        raise ModelError(what, where="model", fix=fix)
    if head == "valued":
        output_head = model.get_output_embeddings()
        if output_head is None:
            what = f"{type(model).__name__} has no output embedding to lay a value head beside"
            raise ModelError(what, where="algorithm.value", fix="use value: separate")
        weight = output_head.weight
        setattr(model, VALUE, ValueHead(weight.shape[1], weight.dtype, weight.device))
    return model


def remove_pooler(model: Any) -> None:
    """Remove the layer that transformers puts on the first token of an encoder, if it has one.

    No embedding is made of its output. Files of masked language models lack it.
    """
    if "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        model.pooler = None


def language_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a policy without its value head's.

    Sampling needs only the language model.
    """
    for name, tensor in weights:
        if not name.startswith(f"{VALUE}."):
            yield name, tensor


def extra_heads(model: Any) -> frozenset[str]:
    """Return the names of tensors of heads that no language model has.

    Files may lack them, and beside an adapter they are fully trainable.
    """
    if ends_in_hidden_states(model):
        return frozenset()
    names = list(model.state_dict())
    if model.get_output_embeddings() is not None:
        return frozenset(name for name in names if name.startswith(f"{VALUE}."))
    # A classifier: everything outside of the trunk, and a pooler, which masked language models
    # lack.
    trunk_prefix = f"{model.base_model_prefix}."
    found = set()
    for name in names:
        is_in_trunk = name.startswith(trunk_prefix)
        if not is_in_trunk or ".pooler." in name:
            found.add(name)
    return frozenset(found)


def last_token_head(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """Return (trunk, head) of a model whose head reads the last token's hidden state; else None.

    transformers' decoders that classify have such a head, a linear layer.
    """
    trunk = model.base_model
    # transformers' name for it.
    head = getattr(model, "score", None)
    if trunk is model or not isinstance(head, nn.Linear):
        return None
    return trunk, head


def class_logits(model: Any, batch: Any, sequence: SequencePart | None = None) -> torch.Tensor:
    """Return the logits of a batch of texts or images, float[B, C].

    `sequence`: this rank's part, if sequences are cut over ranks; all of these ranks get the same
    logits. A batch without attention mask is for a decoder, whose head reads the last token.
    `last_B` has the place of that token, so a text may end in the padding id.
    """
    parts = None
    has_mask = getattr(batch, "attention_mask_BT", None) is not None
    if not has_mask and not reads_images(model):
        parts = last_token_head(model)
    if parts is None:
        with model_inputs(model, batch, sequence) as inputs:
            logits_BC: torch.Tensor = model(**inputs).logits
        if sequence is None:
            return logits_BC
        # The head reads the first token, which is in the first part. The logits of other ranks are
        # of other tokens, and are multiplied by 0 in the sum.
        has_first_token = float(sequence.index == 0)
        return sequence.total(logits_BC * has_first_token)
    trunk, head = parts
    with model_inputs(model, batch, sequence) as inputs:
        hidden_BTD = trunk(**inputs, use_cache=False).last_hidden_state
    if sequence is None:
        rows_B = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
        # Batches of trials have no `last_B`, since their rows have no padding.
        last_B = getattr(batch, "last_B", -1)
        last_hidden_BD = hidden_BTD[rows_B, last_B]
        logits_of_last_BC: torch.Tensor = head(last_hidden_BD)
        return logits_of_last_BC
    places_T = torch.arange(batch.input_ids_BT.shape[1], device=hidden_BTD.device)
    places_Bt = sequence.cut(places_T.expand_as(batch.input_ids_BT))
    is_last_Bt = places_Bt == batch.last_B[:, None]
    is_last_Bt1 = is_last_Bt[:, :, None].to(hidden_BTD.dtype)
    # On ranks whose part lacks the last token these are zeros. Their logits are multiplied by 0, so
    # that a bias is added only once.
    last_hidden_BD = (hidden_BTD * is_last_Bt1).sum(1)
    has_last_B1 = is_last_Bt1.sum(1)
    return sequence.total(head(last_hidden_BD) * has_last_B1)


def side_of_model(config: Any) -> int | None:
    """Return the only side of images that a model takes, in pixels; None: any."""
    size = getattr(config, "image_size", None)
    if not size:
        return None
    if isinstance(size, list | tuple):
        return int(size[0])
    return int(size)


def grey_image(config: Any, device: Any, side: int | None = None) -> torch.Tensor:
    """Return one image of zeros of a size that the model takes, float[1, C, H, W].

    `side`: pixels of the side of the training images, if it is set.
    """
    pixels = side or side_of_model(config) or TRIED_SIDE
    channels = int(getattr(config, "num_channels", 3))
    return torch.zeros(1, channels, pixels, pixels, device=device)


def is_bidirectional(model: Any) -> bool:
    """Return whether a text classifier, or a trunk for embeddings, attends to later tokens.

    Then its batches need an attention mask. `model` may be on the meta device: a small copy is
    tried. Raises ModelError for a bidirectional model that ignores the mask, and for a classifier
    that is not, and whose head does not read the last token.
    """
    trial = _try_classifier
    purpose = "a classifier"
    if ends_in_hidden_states(model):
        trial = _try_trunk
        purpose = "an encoder of texts"
    sees_later_tokens, works = try_small(model, "cpu", trial)
    if works:
        return sees_later_tokens
    if sees_later_tokens:
        reason = "its padding is seen through the attention mask"
    else:
        reason = "its class is not a linear layer on the last token"
    what = f"{type(model).__name__} cannot be trained as {purpose} here: {reason}"
    raise ModelError(what, where="model", fix="name another model")


def _try_classifier(small: Any, ids_BT: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a small classifier attends to later tokens, and whether it can be trained.

    `ids_BT`: one row of tokens. If another last token changes the hidden state of the first, the
    model attends to later tokens.
    """
    plain_ids_BT = _plain_ids(small, ids_BT)
    ones_BT = torch.ones_like(plain_ids_BT)
    logits = small(input_ids=plain_ids_BT, attention_mask=ones_BT).logits
    if _first_sees_last(small, plain_ids_BT):
        logits_of_padded = small(**_pad_inputs(small, plain_ids_BT)).logits
        return True, is_close(logits_of_padded, logits)
    parts = last_token_head(small)
    if parts is None:
        return False, False
    trunk, head = parts
    last_hidden = trunk(input_ids=plain_ids_BT).last_hidden_state[:, -1]
    logits_of_last = head(last_hidden)
    return False, is_close(logits_of_last, logits)


def _try_trunk(small: Any, ids_BT: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a small trunk attends to later tokens, and whether its mask hides padding.

    `ids_BT`: one row of tokens.
    """
    plain_ids_BT = _plain_ids(small, ids_BT)
    if not _first_sees_last(small, plain_ids_BT):
        return False, True
    ones_BT = torch.ones_like(plain_ids_BT)
    hidden_BTD = small(input_ids=plain_ids_BT, attention_mask=ones_BT)[0]
    hidden_of_padded = small(**_pad_inputs(small, plain_ids_BT))[0]
    return True, is_close(hidden_of_padded[:, : plain_ids_BT.shape[1]], hidden_BTD)


def _first_sees_last(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether another last token changes the hidden state of the first one."""
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = ids_BT[:, 0]
    first = small.base_model(input_ids=ids_BT)[0][:, 0]
    first_of_changed = small.base_model(input_ids=changed_BT)[0][:, 0]
    return not is_close(first, first_of_changed)


def _pad_inputs(small: Any, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a small model for tokens with padding behind them, and a mask."""
    padding_id = small.config.get_text_config().pad_token_id or 0
    pad = torch.nn.functional.pad
    return {
        "input_ids": pad(ids_BT, (0, PADDED), value=padding_id),
        "attention_mask": pad(torch.ones_like(ids_BT), (0, PADDED)),
    }


def _plain_ids(small: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return a trial's token ids without the lowest ones, which have special meanings."""
    vocab_size = small.config.get_text_config().vocab_size
    return (ids_BT + FIRST_PLAIN_ID) % vocab_size


def first_position(model: Any) -> int | None:
    """Return the position id of a text's first token, 0 or as in RoBERTa the padding id + 1.

    It is found by a trial. None if the model takes no positions, or counts them in another way;
    then it is given none.
    """
    return try_small(model, "cpu", _try_first_position)


def _try_first_position(small: Any, ids_BT: torch.Tensor) -> int | None:
    """Return the first position id with which a small model gives the output of no positions."""
    plain_ids_BT = _plain_ids(small, ids_BT)
    if "position_ids" not in inspect.signature(small.forward).parameters:
        return None
    ones_BT = torch.ones_like(plain_ids_BT)
    # The first item is the logits, or the hidden states of a trunk.
    without_positions = small(input_ids=plain_ids_BT, attention_mask=ones_BT)[0]
    padding_id = small.config.get_text_config().pad_token_id or 0
    for first in (0, padding_id + 1):
        positions_BT = torch.arange(first, first + plain_ids_BT.shape[1])[None]
        with_positions = small(
            input_ids=plain_ids_BT, attention_mask=ones_BT, position_ids=positions_BT
        )[0]
        if is_close(with_positions, without_positions):
            return first
    return None

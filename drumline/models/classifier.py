"""Classifiers: where their head is, which token of a text it reads, and properties that are found by trying.

B samples, C classes, T tokens, D the width of the trunk.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drumline.core.facts import ModelFacts
from drumline.errors import ModelError
from drumline.foreign import first_line
from drumline.models.classes import reads_images
from drumline.models.sequence import SequencePart
from drumline.models.small import close, try_small
from drumline.models.weights import counted

TRIED_SIDE = 64  # pixels, of models that take any size


def head_weights(model: Any) -> frozenset[str]:
    """Names of the tensors that files of another task may lack: all outside of the trunk, and a pooler (masked LMs have none)."""
    trunk = f"{model.base_model_prefix}."
    return frozenset(name for name in model.state_dict() if not name.startswith(trunk) or ".pooler." in name)


def last_token_head(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """(trunk, head) of a model with a linear layer on the last token's hidden state, as transformers' decoders have; None for others."""
    trunk, head = model.base_model, getattr(model, "score", None)
    return (trunk, head) if trunk is not model and isinstance(head, nn.Linear) else None


def class_logits(model: Any, batch: Any, sequence: SequencePart | None = None) -> torch.Tensor:
    """float[B, C] of a batch of texts or images; of sequences cut over ranks (`sequence`) the same on all of these.

    A text without attention mask is for a decoder, whose head reads the last token (`last_B`). That is found by its place and not by the
    padding id, so a text may end in that id.
    """
    inputs = batch.inputs() if sequence is None else sequence.inputs(batch)
    parts = None if reads_images(model) or getattr(batch, "attention_mask_BT", None) is not None else last_token_head(model)
    if parts is None:
        logits_BC: torch.Tensor = model(**inputs).logits
        if sequence is None:
            return logits_BC
        return sequence.total(logits_BC * float(sequence.index == 0))  # the head reads the first token
    trunk, head = parts
    hidden_BTD = trunk(**inputs, use_cache=False).last_hidden_state
    if sequence is None:
        rows_B = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
        picked: torch.Tensor = head(hidden_BTD[rows_B, getattr(batch, "last_B", -1)])  # a trial's rows are full
        return picked
    places_BT = torch.arange(batch.input_ids_BT.shape[1], device=hidden_BTD.device).expand_as(batch.input_ids_BT)
    here_Bt1 = (sequence.cut(places_BT) == batch.last_B[:, None])[:, :, None].to(hidden_BTD.dtype)
    return sequence.total(head((hidden_BTD * here_Bt1).sum(1)) * here_Bt1.sum(1))


@dataclass(frozen=True)
class Image:
    """A batch of one grey image, for trials."""

    pixels_BCHW: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels_BCHW}


def side_of_model(config: Any) -> int | None:
    """The only side of images that a model takes, in pixels; None: any."""
    size = getattr(config, "image_size", None)
    return int(size[0] if isinstance(size, list | tuple) else size) if size else None


def grey_image(config: Any, device: Any, side: int | None = None) -> Image:
    """float[1, C, H, W] zeros of a size that the model takes. `side`: that of the training images, if set."""
    side = side or side_of_model(config) or TRIED_SIDE
    return Image(torch.zeros(1, int(getattr(config, "num_channels", 3)), side, side, device=device))


def is_bidirectional(model: Any) -> bool:
    """Whether a text classifier attends to later tokens, so that its batches need an attention mask. `model` may be on meta.

    Tried on a small copy. A bidirectional model must obey the mask; the head of any other must read the last token. Raises ModelError for
    others.
    """
    found: list[bool] = []

    def trial(small: Any, ids_BT: torch.Tensor) -> bool:
        ids_BT = (ids_BT + 16) % small.config.get_text_config().vocab_size  # low ids have special meanings
        changed_BT = ids_BT.clone()
        changed_BT[:, -1] = ids_BT[:, 0]
        first, other = (small.base_model(input_ids=ids)[0][:, 0] for ids in (ids_BT, changed_BT))
        found.append(not close(first, other))
        ones_BT = torch.ones_like(ids_BT)
        logits = small(input_ids=ids_BT, attention_mask=ones_BT).logits
        if found[0]:
            pad = small.config.get_text_config().pad_token_id or 0
            padded_BT, mask_BT = torch.nn.functional.pad(ids_BT, (0, 3), value=pad), torch.nn.functional.pad(ones_BT, (0, 3))
            return close(small(input_ids=padded_BT, attention_mask=mask_BT).logits, logits)
        parts = last_token_head(small)
        return parts is not None and close(parts[1](parts[0](input_ids=ids_BT).last_hidden_state[:, -1]), logits)

    if not try_small(model, "cpu", trial):
        what = "its padding is seen through the attention mask" if found[0] else "its class is not a linear layer on the last token"
        raise ModelError(f"{type(model).__name__} cannot be trained as a classifier here: {what}", where="model", fix="name another model")
    return found[0]


def first_position(model: Any) -> int | None:
    """The position id that the model itself gives to the first token: 0, in RoBERTa one more than the padding id; None if it takes no
    position ids. Found by trying."""
    found: list[int] = []

    def trial(small: Any, ids_BT: torch.Tensor) -> bool:
        ids_BT = (ids_BT + 16) % small.config.get_text_config().vocab_size
        if "position_ids" not in inspect.signature(small.forward).parameters:
            return False
        by_itself = small(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits
        for first in (0, (small.config.get_text_config().pad_token_id or 0) + 1):
            positions_BT = torch.arange(first, first + ids_BT.shape[1])[None]
            if close(small(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), position_ids=positions_BT).logits, by_itself):
                found.append(first)
                return True
        return False

    return found[0] if try_small(model, "cpu", trial) else None


def image_facts(model: Any, side: int) -> ModelFacts:
    """Sizes of an image classifier on the meta device. A training row is one token, so `flops_per_token` is of one image.

    torch's FlopCounterMode counts the forward pass (matrix products and convolutions, with attention) of one image of `side` × `side`;
    backward costs twice that, once for the inputs and once for the trainable weights. Raises ModelError if the model does not take images
    of that size.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    pixels = torch.empty(1, int(getattr(model.config, "num_channels", 3)), side, side, device="meta")
    try:
        with counter, torch.no_grad():
            model.eval()(pixel_values=pixels)
    except (RuntimeError, ValueError) as error:
        what = f"{type(model).__name__} does not take images of {side} × {side}: {first_line(error)}"
        raise ModelError(what, where="algorithm.image_size", fix="use the size that the model was made for") from None
    counts = counted(model)
    sizes = getattr(model.config, "hidden_sizes", None)
    return ModelFacts(
        **counts,
        name=str(model.config.model_type),
        flops_per_token=counter.get_total_flops() * (3.0 - counts["frozen"] / counts["parameters"]),
        vocab_size=0,
        max_positions=None,
        layers=len(counts["block_parameters"]) or int(sum(getattr(model.config, "depths", ()))),
        hidden=int(sizes[-1] if sizes else getattr(model.config, "hidden_size", 0)),
    )

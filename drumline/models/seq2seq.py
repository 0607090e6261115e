"""Models with an encoder and a decoder: their parts, trials and sizes.

Names of tensors end in the letters of their dimensions: B rows, S tokens of the encoder, T tokens
of the decoder, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from drumline.errors import ModelError
from drumline.models.blocks import blocks
from drumline.models.classes import decoder_start
from drumline.models.router import trains_router
from drumline.models.small import is_close, try_small
from drumline.plan.facts import ModelFacts

# Why ranks cannot cut such a model.
UNCUT = "it has an encoder and a decoder"


class Headless:
    """Runs a model without its head, and returns the head's input as `last_hidden_state`.

    T5 scales this input in the forward of the whole model, so its stacks alone are not enough.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.model = model
        self.head = head

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        """Return the input of the head for these arguments of the model, [B, T, D]."""
        (name,) = [name for name, child in self.model.named_children() if child is self.head]
        children = self.model._modules
        children[name] = nn.Identity()
        try:
            hidden_BTD = self.model(**inputs).logits
        finally:
            children[name] = self.head
        return SimpleNamespace(last_hidden_state=hidden_BTD)


def seq2seq_parts(model: Any) -> tuple[Callable[..., Any], nn.Linear] | None:
    """Return what computes the head's input, and the head; None if the head is no linear layer."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    trunk = model.base_model
    if trunk is not model:
        return trunk, head
    if head not in model.children():
        return None
    return Headless(model, head), head


def head_bias(model: Any, head: nn.Linear) -> torch.Tensor | None:
    """Return the bias of the logits, [V]: that of the head, or the one that BART keeps beside it.

    None if there is neither. The model may be of any kind.
    """
    beside_1V = getattr(model, "final_logits_bias", None)
    if beside_1V is None:
        return head.bias
    bias_V: torch.Tensor = beside_1V[0]
    return bias_V


def seq2seq_inputs(ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for a trial: the same tokens on both sides, without padding."""
    return {
        "input_ids": ids_BT,
        "attention_mask": torch.ones_like(ids_BT),
        "decoder_input_ids": ids_BT,
    }


def is_head_of_seq2seq(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether the logits of a small model are its head over its trunk.

    `ids_BT`: the tokens of both sides.
    """
    parts = seq2seq_parts(small)
    if parts is None:
        return False
    trunk, head = parts
    # Soft-capping hardly changes the small logits of a fresh model: this makes them large.
    head.weight.mul_(50)
    beside_1V = getattr(small, "final_logits_bias", None)
    if beside_1V is not None:
        beside_1V.copy_(torch.linspace(-1, 1, beside_1V.numel())[None])
    inputs = seq2seq_inputs(ids_BT)
    logits = small(**inputs, use_cache=False).logits
    hidden = trunk(**inputs, use_cache=False).last_hidden_state
    if hidden.shape[-1] != head.in_features:
        return False
    return is_close(logits, functional.linear(hidden, head.weight, head_bias(small, head)))


def require_seq2seq(model: Any, device: str) -> None:
    """Raise ModelError for an encoder-decoder model whose losses would not be what they should.

    Trials with eight tokens on `device` find that out. The decoder must not see later tokens, and
    padding of the encoder must not change the logits. The class must begin the decoder with
    `decoder_start_token_id` and shift the targets behind it, as our batches do.
    """
    if trains_router(model):
        raise ModelError(
            f"the router loss of {type(model).__name__} is not written for two stacks",
            where="model.config.output_router_logits",
            fix="set it to false",
        )

    def trial(small: Any, ids_BT: torch.Tensor) -> str:
        """Return what the model does otherwise; empty if nothing."""
        # Other tokens than the padding token, which T5Gemma leaves out of its decoder's attention.
        vocab_size = small.config.get_text_config().vocab_size
        ids_BT = (ids_BT + 8) % vocab_size
        inputs = seq2seq_inputs(ids_BT)
        logits = small(**inputs, use_cache=False).logits
        if not torch.isfinite(logits).all():
            return "computes no finite numbers with this configuration"
        changed_BT = ids_BT.clone()
        changed_BT[:, -1] = ids_BT[:, 0]
        changed = small(**inputs | {"decoder_input_ids": changed_BT}, use_cache=False).logits
        if not is_close(logits[:, :-1], changed[:, :-1]):
            return "has a decoder that sees the tokens that it is to predict"
        padding_BS = torch.zeros_like(ids_BT[:, :3])
        padded = {
            "input_ids": torch.cat([ids_BT, padding_BS], 1),
            "attention_mask": torch.cat([torch.ones_like(ids_BT), padding_BS], 1),
        }
        with_padding = small(**inputs | padded, use_cache=False).logits
        if not is_close(logits, with_padding):
            return "gives other logits if its encoder's rows are padded"
        if not _shifts_targets(small, ids_BT):
            return "does not begin its decoder with decoder_start_token_id"
        return ""

    reason = try_small(model, device, trial)
    if reason:
        what = f"{type(model).__name__} {reason}"
        raise ModelError(what, where="model", fix="name another model, such as a T5 or a BART")


def _shifts_targets(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether the class makes the decoder's tokens of targets as our batches have them."""
    prepare = getattr(small, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:
        # transformers shifts the targets of these classes by one function for all.
        return True
    start = decoder_start(small.config)
    start_B1 = torch.full_like(ids_BT[:, :1], start or 0)
    expected_BT = torch.cat([start_B1, ids_BT[:, :-1]], 1)
    return start is not None and torch.equal(prepare(ids_BT), expected_BT)


def of_both_stacks(model: Any, facts: ModelFacts, length: int) -> ModelFacts:
    """Return the facts of an encoder-decoder model, from those of a decoder of all its weights.

    A sample has two rows of `length` tokens, one for each stack, so a token passes half of the
    blocks and half of the weights. In a decoder's block it attends twice: to its row, and to that
    of the encoder.
    """
    encoder = len(blocks(model.get_encoder()))
    decoder = len(blocks(model.get_decoder()))
    both = encoder + decoder
    width = facts.heads * facts.head_dim
    layers = max(1, (both + 1) // 2)
    attention_of_token = 12 * width * length * (encoder + 2 * decoder) / 2
    attention_before = facts.layers * facts.attention_flops
    products = facts.flops_per_token - attention_before
    has_bias = any(
        getattr(module, "has_relative_attention_bias", False) for module in model.modules()
    )
    return replace(
        facts,
        layers=layers,
        attention_flops=attention_of_token / layers,
        flops_per_token=products / 2 + attention_of_token,
        encoder_decoder=True,
        # A bias that is trained is added to all scores, which kernels in tiles cannot do.
        keeps_scores=facts.keeps_scores or has_bias,
        tp_failure=UNCUT,
        whole_sequences=UNCUT,
        uncut=UNCUT,
        whole_stream=UNCUT,
    )

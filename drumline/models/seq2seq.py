"""Models with an encoder and a decoder: split off their head, try them out, and count their sizes.

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

# The reasons in refusals of strategies that cut a model over ranks.
WHOLE_HEADS = "the keys of its cross-attention are of the encoder, and only self-attention is cut"
WHOLE_ROWS = "its decoder attends to the encoder's whole text, of which other ranks have parts"
WHOLE_STACKS = "each block of its decoder reads the encoder's result, and stages pass on one tensor"
TWO_STREAMS = "it has two residual streams, of the encoder and of the decoder"


class Headless:
    """Runs a model without its head, and returns the head's input as `last_hidden_state`.

    Calling the stacks of the model would not do: T5 scales the head's input in the forward of the
    whole model.
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
    """Return a callable that computes the head's input, and the head.

    None if the head is no linear layer, or no direct child of a model that has no trunk.
    """
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
    """Return the bias of the logits, [V]; None if there is none. The model may be of any kind.

    BART keeps it as a buffer of the model, all others as the bias of the head.
    """
    beside_1V = getattr(model, "final_logits_bias", None)
    if beside_1V is None:
        return head.bias
    bias_V: torch.Tensor = beside_1V[0]
    return bias_V


def seq2seq_inputs(ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for a trial: both stacks read the same tokens, no padding."""
    return {
        "input_ids": ids_BT,
        "attention_mask": torch.ones_like(ids_BT),
        "decoder_input_ids": ids_BT,
    }


def is_head_of_seq2seq(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether the logits of a small model are its head applied to its trunk's output.

    `ids_BT`: the tokens that both stacks read.
    """
    parts = seq2seq_parts(small)
    if parts is None:
        return False
    trunk, head = parts
    # Soft-capping would go unnoticed, because it hardly changes the small logits of a fresh model.
    # So make them large.
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
    """Check by trials with eight tokens on `device` that an encoder-decoder model can be trained.

    The decoder must not see later tokens, and padding of the encoder must not change the logits.
    The class must begin the decoder with `decoder_start_token_id` and shift the targets behind it,
    as our batches do.

    Raises:
        ModelError: A trial failed, or the model has a router loss.
    """
    if trains_router(model):
        raise ModelError(
            f"the router loss of {type(model).__name__} is not written for two stacks",
            where="model.config.output_router_logits",
            fix="set it to false",
        )

    def trial(small: Any, ids_BT: torch.Tensor) -> str:
        """Return what is wrong with the model; empty if nothing is."""
        # No token may be the padding token, which T5Gemma leaves out of its decoder's attention.
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
    """Return whether the class derives the decoder's input from targets as our batches do."""
    prepare = getattr(small, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:
        # transformers shifts the targets of all these classes by one function, which does.
        return True
    start = decoder_start(small.config)
    start_B1 = torch.full_like(ids_BT[:, :1], start or 0)
    expected_BT = torch.cat([start_B1, ids_BT[:, :-1]], 1)
    return start is not None and torch.equal(prepare(ids_BT), expected_BT)


def encoder_decoder_facts(model: Any, facts: ModelFacts, length: int) -> ModelFacts:
    """Return the facts of an encoder-decoder model.

    A sample has two rows of `length` tokens, one for each stack, so a token passes half of the
    blocks and half of the weights. In a decoder's block it attends twice: to its own row, and to
    the encoder's.

    Args:
        model: The model, of which the blocks of each stack are counted.
        facts: What was counted as if all its weights were those of one decoder.
        length: Tokens of a row.
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
        tp_failure=WHOLE_HEADS,
        whole_sequences=WHOLE_ROWS,
        uncut=WHOLE_STACKS,
        whole_stream=TWO_STREAMS,
    )

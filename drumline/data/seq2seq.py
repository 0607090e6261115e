"""Samples and batches of encoder-decoder models: the encoder reads a prompt, the decoder learns.

A sample has two segments. The first has the tokens of the encoder. The second has the decoder's
first token and the completion, so that each token is predicted from those before it.

Names of tensors end in the letters of their dimensions: B rows, S tokens of the encoder, T tokens
of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from drumline.config.data import DataConfig
from drumline.data.batches import TokenBatch, collate, learned_segment, split_sides
from drumline.data.cache import Segment
from drumline.data.encode import cut_text, refuse_images, without_targets
from drumline.data.sources import Row
from drumline.data.targets import EncodedSample, Encoder, TokenSegment, truncate
from drumline.data.thoughts import without_thoughts
from drumline.data.turns import as_messages
from drumline.errors import ConfigError, DataError


class _Sides(NamedTuple):
    """The tokens of the encoder, and those that the decoder learns, each with its flag."""

    source: TokenSegment
    target: TokenSegment


class Seq2SeqRowEncoder:
    """Encodes a prompt for the encoder and a completion for the decoder.

    With a chat template the encoder gets the conversation before its last answer, as the template
    renders it. Without one prompt and completion are texts, and each gets the special tokens that
    the tokenizer puts around a text: T5's `</s>`, BART's `<s>` and `</s>`.

    Each side may have data.max_length tokens. data.truncation decides what is done with a longer
    one; a completion is always cut at its end.
    """

    def __init__(self, tokenizer: Any, decoder_start: int, data: DataConfig) -> None:
        """Store the settings. `decoder_start`: the id of the decoder's first token."""
        if data.learn_on != "assistant":
            raise ConfigError(
                "the decoder learns the completion alone", where="data.learn_on", fix="leave it out"
            )
        if data.reasoning == "mask":
            raise ConfigError(
                "the decoder learns a completion from its first token on",
                where="data.reasoning",
                fix="use keep or drop",
            )
        self.encoder = Encoder(tokenizer, False, data)
        self.tokenizer = tokenizer
        self.decoder_start = decoder_start
        self.data = data

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a row as two segments; None if it is dropped. Raises DataError."""
        refuse_images(row)
        row = _with_prompt(row)
        if self.encoder.has_template:
            sides = self._render(row)
        else:
            sides = self._tokenise(row)
        limit = self.data.max_length
        policy = self.data.truncation
        source = truncate(sides.source, limit, policy, row.origin, "tokens of the prompt")
        end_policy = policy
        if policy == "left":
            # The start has the decoder's first token.
            end_policy = "right"
        unit = "tokens of the completion"
        target = truncate(sides.target, limit, end_policy, row.origin, unit)
        if source is None or target is None or not target.target_count:
            return None
        if not self.encoder.has_template and len(sides.source.tokens) > limit:
            source = without_targets(cut_text(self.tokenizer, row.values["prompt"], self.data))
        sizes = len(sides.source.tokens) + len(sides.target.tokens)
        is_cut = len(source.tokens) + len(target.tokens) < sizes
        return EncodedSample(
            [source, target], truncated=is_cut, hides_reasoning=sides.target.hides_reasoning
        )

    def _render(self, row: Row) -> _Sides:
        """Return the sides of a conversation that the chat template renders."""
        whole = self.encoder.encode(row)
        first_target = int(np.argmax(whole.learn))
        if not first_target or not whole.learn.any():
            raise DataError("the row has no answer behind a prompt", where=row.origin)
        source = without_targets(whole.tokens[:first_target])
        completion = whole.tokens[first_target:]
        learn = whole.learn[first_target:]
        return _Sides(source, self._target(completion, learn, whole.hides_reasoning))

    def _tokenise(self, row: Row) -> _Sides:
        """Return the sides of two texts."""
        prompt = row.values["prompt"]
        completion = row.values["completion"]
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            self.encoder.require_template("`prompt` and `completion` hold messages", row)
        if self.data.reasoning == "drop":
            completion = without_thoughts(completion, "the answer", row.origin)
        # Special tokens would hide that.
        if not prompt.strip():
            raise DataError("the prompt is empty", where=row.origin, fix="take the row out")
        source = self._ids(prompt)
        target = self._ids(completion, is_target=True)
        if target[:1] == [self.decoder_start]:
            # The decoder begins with it in any case.
            target = target[1:]
        eos = self.tokenizer.eos_token_id
        if eos is None:
            what = "this tokenizer has no end-of-sequence token to close a text with"
            raise DataError(what, where=row.origin, fix="set model.tokenizer to one that has")
        if not target or target[-1] != eos:
            target.append(eos)
        ids = np.asarray(target, np.int32)
        learn = np.ones(len(ids), np.uint8)
        return _Sides(without_targets(source), self._target(ids, learn))

    def _ids(self, text: str, is_target: bool = False) -> list[int]:
        """Return the tokens of a text, with the special tokens of its side."""
        # Tokenizers of translation models have other special tokens for targets.
        name = "text"
        if is_target:
            name = "text_target"
        encoded = self.tokenizer(**{name: text}, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def _target(self, ids: Any, learn: Any, hides_reasoning: bool = False) -> TokenSegment:
        """Return a completion behind the decoder's first token."""
        first = np.asarray([self.decoder_start], np.int32)
        tokens = np.concatenate((first, ids)).astype(np.int32)
        flags = np.concatenate((np.zeros(1, np.uint8), learn)).astype(np.uint8)
        return TokenSegment(tokens, flags, hides_reasoning)


def _with_prompt(row: Row) -> Row:
    """Return a row of messages as one of prompt and completion, its last answer.

    Raises DataError for a row without a prompt.
    """
    values = row.values
    if "text" in values:
        raise DataError(
            "a text alone has no prompt for the encoder",
            where=row.origin,
            fix="map columns to prompt and completion",
        )
    if "messages" not in values:
        return row
    messages = as_messages(values["messages"], "user")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            "`messages` have no answer of the assistant at their end",
            where=row.origin,
            fix="take the row out",
        )
    parts = {"prompt": messages[:-1], "completion": messages[-1:], "tools": values.get("tools")}
    return Row(row.origin, parts)


@dataclass(frozen=True)
class Seq2SeqBatch(TokenBatch):
    """A TokenBatch of decoders, with what their encoders read.

    Attributes:
        encoder_ids_BS: int64, the tokens of the encoder, padding included.
        encoder_mask_BS: int64, 1 for tokens and 0 for padding. The first token of a filler is in
            the mask, since attention to no token is NaN.
    """

    encoder_ids_BS: torch.Tensor
    encoder_mask_BS: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model. Causal attention hides the decoder's padding."""
        return {
            "input_ids": self.encoder_ids_BS,
            "attention_mask": self.encoder_mask_BS,
            "decoder_input_ids": self.input_ids_BT,
        }


def collate_seq2seq(
    rows: Sequence[Sequence[Segment] | None], pad_id: int, width: int | None
) -> Seq2SeqBatch:
    """Return a batch of the two segments of each row; None is a filler.

    `width`: tokens of both sides; None: those of the longest row of each side.
    """
    sources, targets = split_sides(rows)
    encoder = collate(sources, pad_id, width)
    fields: dict[str, Any] = vars(collate(targets, pad_id, width))
    sizes_B1 = encoder.lengths_B.clamp(min=1)[:, None]
    mask_BS = encoder.position_ids_BT < sizes_B1
    return Seq2SeqBatch(
        **fields, encoder_ids_BS=encoder.input_ids_BT, encoder_mask_BS=mask_BS.long()
    )


def placeholder_seq2seq(rows: int, length: int) -> Seq2SeqBatch:
    """Return a placeholder batch for measurements of memory and speed.

    Half of the `rows` are of encoders, and half of decoders. Each has `length` tokens, and those of
    decoders are targets.
    """
    segment = learned_segment(length)
    return collate_seq2seq([[segment, segment]] * (rows // 2), 0, length)

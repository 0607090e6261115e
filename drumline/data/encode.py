"""From a row to what a sample is made of: an encoder for each kind of algorithm, behind one verb."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from drumline.core.data import DataConfig
from drumline.data.sources import Row, holds_images
from drumline.data.tasks import as_json
from drumline.data.templates import Encoded, Encoder, Example, truncate
from drumline.errors import DataError


class RowEncoder(Protocol):
    def encode(self, row: Row) -> Encoded | None:
        """A row as tokens, cut to size; None where it is too long and to be dropped. Raises DataError that names the row."""
        ...


class TextRows:
    """Conversations, completions and documents. Rows of a packed pretraining run stay whole: the packs are cut instead."""

    def __init__(self, tokenizer: Any, documents: bool, data: DataConfig) -> None:
        self.encoder, self.data = Encoder(tokenizer, documents, data), data
        self.whole = documents and data.packing

    def encode(self, row: Row) -> Encoded | None:
        if holds_images(row):
            fix = "name a vision-language model, with algorithm sft"
            raise DataError("this row holds images, and text alone is read here", where=row.origin, fix=fix)
        full = self.encoder.encode(row)
        example = full if self.whole else truncate(full, self.data.max_length, self.data.truncation, row.origin)
        return None if example is None else Encoded([example], truncated=len(example.tokens) < len(full.tokens))


class PromptRows:
    """Prompts that are rolled out: a sample is one segment, the tokens that an answer goes on from. Its meta: `prompt` (the text of it),
    `domain`, and the row's other columns under their names, all that a reward may want to know.

    A prompt leaves room for max_new_tokens within data.max_length. One that does not is dropped or cut at its start, as data.truncation
    says; at its end, where the question and the turn of the answer stand, it is never cut.
    """

    def __init__(self, tokenizer: Any, new: int, data: DataConfig) -> None:
        self.encoder, self.policy, self.new = Encoder(tokenizer, everything=False, data=data), data.truncation, new
        self.room = data.max_length - self.new
        if self.room < 1:
            what = f"data.max_length {data.max_length} leaves no room for a prompt before max_new_tokens {self.new}"
            raise DataError(what, where="data.max_length", fix="raise it, or lower algorithm.generator.max_new_tokens")

    def encode(self, row: Row) -> Encoded | None:
        prompt = row.values["prompt"] if "prompt" in row.values else row.values["messages"]
        text, ids = self.encoder.prompt(prompt, row.origin, row.values.get("tools"))
        if not ids:
            raise DataError("the prompt is empty", where=row.origin, fix="a completion goes on from one token at least")
        size = len(ids)
        if size > self.room and self.policy == "drop":
            return None
        if size > self.room and self.policy != "left":
            what = f"the prompt has {size} tokens, and data.max_length less max_new_tokens {self.new} leaves {self.room}"
            raise DataError(what, where=row.origin, fix="raise data.max_length, or set data.truncation to drop or left")
        kept = np.asarray(ids[-self.room :], np.int32)
        meta = {**as_json(row.extra), "prompt": text, "domain": row.domain}
        return Encoded([Example(kept, np.zeros(len(kept), np.uint8))], meta, truncated=size > self.room)

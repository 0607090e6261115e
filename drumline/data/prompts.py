"""Prompts that are rolled out: a row as the tokens an answer goes on from, and all that a reward may want to know of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from drumline.config.algorithms import GRPOConfig, PPOConfig
from drumline.config.data import DataConfig
from drumline.data.sources import Row, as_json
from drumline.data.templates import Encoded, Encoder, Example
from drumline.errors import DataError


class PromptRows:
    """A sample is one segment, the prompt; its meta: `prompt` (the text of it), `domain`, and the row's other columns under their names.

    A prompt leaves room for max_new_tokens within data.max_length. One that does not is dropped or cut at its start, as data.truncation
    says; at its end, where the question and the turn of the answer stand, it is never cut.
    """

    def __init__(self, tokenizer: Any, algorithm: PPOConfig | GRPOConfig, data: DataConfig) -> None:
        self.encoder, self.policy = Encoder(tokenizer, everything=False, data=data), data.truncation
        self.new = algorithm.generator.max_new_tokens
        self.room = data.max_length - self.new
        if self.room < 1:
            what = f"data.max_length {data.max_length} leaves no room for a prompt before max_new_tokens {self.new}"
            raise DataError(what, where="data.max_length", fix="raise it, or lower algorithm.generator.max_new_tokens")

    def encode(self, row: Row) -> Encoded | None:
        said = row.values["prompt"] if "prompt" in row.values else row.values["messages"]
        text, ids = self.encoder.prompt(said, row.origin, row.values.get("tools"))
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

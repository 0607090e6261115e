"""A rendered text as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.errors import DataError


class Tokens:
    """The tokens of a rendered text, and the characters at which they start."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        options = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
        encoded = tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False, **options
        )
        self.ids: list[int] = list(encoded["input_ids"])
        self.starts: npt.NDArray[np.int64] | None = None
        if tokenizer.is_fast:
            spans = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
            # Some tokenizers leave blanks out of their offsets: a token starts no later than the end of the one before it.
            before = np.concatenate((np.zeros(1, np.int64), spans[:-1, 1]))[: len(spans)]
            self.starts = (
                np.maximum.accumulate(np.minimum(spans[:, 0], before)) if len(spans) else before
            )

    def at(self, char: int, origin: str) -> int:
        """The index of the first token with a character from `char` on."""
        if self.starts is not None:
            index = int(np.searchsorted(self.starts, char))
            straddles = (
                index > 0
                and char < len(self.text)
                and (index == len(self.ids) or self.starts[index] > char)
            )
            return index - straddles
        head = list(self.tokenizer(self.text[:char], add_special_tokens=False)["input_ids"])
        if self.ids[: len(head)] != head:
            fix = "use a model whose tokenizer has a fast version, or set data.learn_on: all"
            raise DataError(
                "this tokenizer joins a turn's header to its content, and gives no offsets to part them",
                where=origin,
                fix=fix,
            )
        return len(head)

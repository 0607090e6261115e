"""A rendered text as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.errors import DataError


class Tokens:
    """The tokens of a rendered text, and the characters at which they start.

    Attributes:
        tokenizer: the tokenizer.
        text: the text. Its special tokens are written in it, and none are added.
        ids: the tokens.
        starts: int64[tokens], the character at which each token starts; None if the tokenizer
            gives no offsets.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        options = {}
        if tokenizer.is_fast:
            options["return_offsets_mapping"] = True
        encoded = tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False, **options
        )
        self.ids: list[int] = list(encoded["input_ids"])
        # Only fast tokenizers give offsets.
        self.starts: npt.NDArray[np.int64] | None = None
        if tokenizer.is_fast:
            self.starts = _starts(encoded["offset_mapping"])

    def token_at(self, char: int, origin: str) -> int:
        """Return the index of the first token with a character from `char` on.

        Raises DataError, with the row's `origin`, if the tokenizer gives no offsets and joins
        characters before and behind `char` to one token.
        """
        if self.starts is not None:
            return _find_token(self.starts, char, len(self.text))
        # Without offsets: the tokens of the text before `char`, if they begin those of the whole.
        encoded_head = self.tokenizer(self.text[:char], add_special_tokens=False)
        head = list(encoded_head["input_ids"])
        if self.ids[: len(head)] != head:
            raise DataError(
                "this tokenizer joins a turn's header to its content, and gives no offsets to part "
                "them",
                where=origin,
                fix="use a model whose tokenizer has a fast version, or set data.learn_on: all",
            )
        return len(head)


def _starts(spans: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return the character at which each token starts, by a tokenizer's offsets [start, stop)."""
    spans_N2 = np.asarray(spans, np.int64).reshape(-1, 2)
    if not len(spans_N2):
        return np.zeros(0, np.int64)
    # Some tokenizers leave blanks out of their offsets: a token starts no later than the end of the
    # token before it.
    ends_before = np.concatenate((np.zeros(1, np.int64), spans_N2[:-1, 1]))
    starts = np.minimum(spans_N2[:, 0], ends_before)
    # Ascending, as a binary search needs them.
    return np.maximum.accumulate(starts)


def _find_token(starts: npt.NDArray[np.int64], char: int, size: int) -> int:
    """Return the index of the first token with a character from `char` on, in a text of `size`."""
    index = int(np.searchsorted(starts, char))
    if index == 0 or char >= size:
        return index
    # The token before also has characters from `char` on.
    is_inside_token = index == len(starts) or starts[index] > char
    if is_inside_token:
        return index - 1
    return index

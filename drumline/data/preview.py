"""What `drumline preview` shows, as facts: rows by the encoder that `prepare` runs, what was cut off them, and their tokens as pieces of
text. Nothing here renders a row again: a row is encoded as it is prepared, and once more without a limit of its length."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from drumline.core.config import Config
from drumline.data.make import Task, rows_of
from drumline.data.sources import Row
from drumline.data.stage import Stage
from drumline.data.templates import Encoded, Example, special_ids
from drumline.data.workers import Job
from drumline.errors import DataError
from drumline.models.vision import Vision

State = Literal["learned", "context", "cut"]
NO_LIMIT = 10**8  # the largest data.max_length
LONGEST_CHARACTER = 8  # tokens; a byte has one each, and four bytes make a character
BEFORE = 4  # tokens in front of one that is decoded: some tokenizers drop the blank of a first word
# Of control and format characters: joiners are parts of emoji and of words.
KEPT = {
    "\n",
    "\u200c",
    "\u200d",
}


@dataclass(frozen=True)
class Piece:
    """A text that stands for one token, or for several that make a character or an image together."""

    text: str
    state: State
    special: bool = False


@dataclass(frozen=True)
class Seen:
    """A row and what becomes of it. `number`: from 1 over all sources. `kept`: its sample; `full`: without a limit of its length; `error`:
    why it cannot be used."""

    number: int
    row: Row
    kept: Encoded | None
    full: Encoded | None
    error: DataError | None = None

    @property
    def tokens(self) -> int:
        """Those of its longest segment, before it was cut."""
        return (
            max((len(segment.tokens) for segment in self.full.segments), default=0)
            if self.full
            else 0
        )

    @property
    def fate(self) -> Literal["refused", "dropped", "unlearned", "cut", "whole"]:
        if self.error is not None:
            return "refused"
        if self.kept is None:
            return "dropped"
        if self.kept.meta is None and not any(segment.learned for segment in self.kept.segments):
            return "unlearned"
        return "cut" if self.kept.truncated else "whole"


class Reader:
    """Reads and encodes the rows of `config.data.train` in order. `most`: tokens of a segment that become text; its middle is left out."""

    def __init__(
        self,
        config: Config,
        tokenizer_path: str,
        base_dir: Path,
        vision: Vision | None,
        most: int = NO_LIMIT,
    ) -> None:
        self.config, self.base_dir, self.vision, self.half = config, base_dir, vision, most // 2
        self.job = Job(tokenizer_path, config.model, config.algorithm, config.data, vision)
        wide = config.data.model_copy(update={"max_length": NO_LIMIT, "truncation": "right"})
        self.full = replace(self.job, data=wide)
        # Its counts alone: of rows that conditions left out.
        self.outcomes = Stage(Path(), np.dtype(np.uint16))
        self.special = special_ids(self.job.tokenizer) if self.job.tokenizer is not None else set()

    def rows(self, wanted: int | None, first: int) -> Iterator[tuple[int, Row | DataError]]:
        """The `first` rows of each source, numbered from 1; or the `wanted` one alone, wherever it is. The last of a source may be why it
        cannot be read on. Raises DataError where there is no such row."""
        number, task = 0, Task(self.config, self.config.data.train, Path(), None)
        for place in range(len(task.sources)):
            try:
                rows = rows_of(task, place, self.base_dir, self.outcomes, faulty=True)
                for row in islice(rows, None if wanted else first):
                    number += 1
                    if wanted in (None, number):
                        yield number, row
                    if number == wanted:
                        return
            except DataError as error:
                number += 1
                yield number, error
                if wanted:  # which row that is nobody knows
                    return
        if wanted:
            raise DataError(
                f"data.train has {number} rows, no row {wanted}",
                where="--row",
                fix=f"count from 1 to {number}",
            )

    def seen(self, number: int, row: Row | DataError) -> Seen:
        if isinstance(row, DataError):
            row = Row(row.where or "", {}, error=row)
        if row.error is not None:
            return Seen(number, row, None, None, row.error)
        full: Encoded | None = None
        try:
            full = self.full.encode_row(row)
            return Seen(number, row, self.job.encode_row(row), full)
        except DataError as error:
            return Seen(number, row, None, full, error)

    def empty(self, seen: Seen) -> bool:
        """Whether all that a row teaches is the end of an answer: the answer has no text."""
        learned = [
            token
            for segment in (seen.kept.segments if seen.kept else ())
            for token in segment.tokens[1:][segment.learn[1:] > 0]
        ]
        return bool(learned) and all(int(token) in self.special for token in learned)

    def segments(self, seen: Seen) -> list[list[Piece]]:
        """The pieces of each segment of a row; what was cut off, or a whole row that was left out, among them."""
        if seen.full is None:
            return []
        images = iter(_images(seen.full.meta or {}, self.vision))
        kept: list[Example | None] = (
            [*seen.kept.segments] if seen.kept is not None else [None] * len(seen.full.segments)
        )
        made = []
        for full, short in zip(seen.full.segments, kept, strict=True):
            start, stop = removed(
                full.tokens,
                short.tokens if short else full.tokens[:0],
                self.config.data.truncation == "left",
            )
            states: list[State] = ["cut"] * len(full.tokens)
            if short is not None:
                states[:start], states[stop:] = _states(short)[:start], _states(short)[start:]
            made.append(self.pieces(full.tokens, states, images))
        return made

    def sample(self, segments: list[tuple[Any, Any]], meta: dict[str, Any]) -> list[list[Piece]]:
        """The pieces of each segment of a sample of the token cache."""
        images = iter(_images(meta, self.vision))
        return [
            self.pieces(tokens, _states(Example(tokens, learn)), images)
            for tokens, learn in segments
        ]

    def pieces(
        self, tokens: npt.NDArray[Any], states: list[State], images: Iterator[tuple[str, int]]
    ) -> list[Piece]:
        """A segment's tokens as text. An image stands as one piece."""
        if self.job.tokenizer is None:
            return []
        made: list[Piece] = []
        ids, at = [int(token) for token in tokens], 0
        while at < len(ids):
            if at == self.half and (stop := len(ids) - self.half) > at:
                made.append(Piece(f"\n… {stop - at:,} tokens, which --all shows …\n", "context"))
                hidden = (
                    sum(token == self.vision.token_id for token in ids[at:stop])
                    if self.vision
                    else 0
                )
                while hidden > 0:
                    hidden -= next(images, ("", hidden))[1]
            elif self.vision is not None and ids[at] == self.vision.token_id:
                name, size = next(images, ("", 1))
                stop = min(at + size, len(ids) if at >= self.half else self.half)
                made.append(Piece(f"[image {name}: {size} tokens]", states[at], special=True))
            elif ids[at] in self.special:
                stop = at + 1
                made.append(
                    Piece(
                        str(self.job.tokenizer.convert_ids_to_tokens(ids[at])),
                        states[at],
                        special=True,
                    )
                )
            else:
                stop, text = self._character(ids, at, states)
                made.append(Piece(text, states[at]))
            at = stop
        return made

    def _character(self, ids: list[int], at: int, states: list[State]) -> tuple[int, str]:
        """Where the tokens of the whole characters that begin at `at` stop, and their text."""
        first = max(0, at - BEFORE)
        head = self._decode(ids[first:at])
        most = min(at + LONGEST_CHARACTER, len(ids) if at >= self.half else self.half)
        for stop in range(at + 1, most + 1):
            if stop > at + 1 and (ids[stop - 1] in self.special or states[stop - 1] != states[at]):
                break
            text = self._decode(ids[first:stop])[len(head) :]
            if text and not text.endswith("\ufffd"):
                return stop, text
        return at + 1, self._decode(ids[at : at + 1])

    def _decode(self, ids: list[int]) -> str:
        return str(
            self.job.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def removed(full: npt.NDArray[Any], kept: npt.NDArray[Any], left: bool) -> tuple[int, int]:
    """The range [start, stop) of `full` that `kept` lacks: at its start (`left`), else behind what both begin with; special tokens of the
    end may have stayed."""
    size, over = len(kept), len(full) - len(kept)
    if left and np.array_equal(full[over:], kept):
        return 0, over
    differs = np.flatnonzero(full[:size] != kept)
    start = int(differs[0]) if len(differs) else size
    return start, start + over


def visible(text: str, marks: str = "") -> str:
    """The text without what a terminal obeys: control and format characters, lone halves of a pair, and `marks`, are escaped."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return "".join(
        c.encode("unicode_escape").decode()
        if c in marks or (c not in KEPT and unicodedata.category(c) in hidden)
        else c
        for c in text
    )


def _states(example: Example) -> list[State]:
    """The first token of a segment never counts: nothing predicts it."""
    return [
        "learned" if index and flag else "context"
        for index, flag in enumerate(example.learn.tolist())
    ]


def _images(meta: dict[str, Any], vision: Vision | None) -> list[tuple[str, int]]:
    """Path and tokens of each image of a sample."""
    if vision is None:
        return []
    return [
        (path, vision.tokens(tuple(grid)))
        for path, grid in zip(meta.get("images", ()), meta.get("grid", ()), strict=True)
    ]

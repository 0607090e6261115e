"""Collects what `drumline preview` shows: what becomes of each row, and its tokens as text.

A row is encoded twice: as `prepare` encodes it, and without a limit of its length. The difference
is what was cut off. The tokens of both are then decoded to pieces of text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.config.config import Config
from drumline.data.make import CacheBuild, read_matching_rows
from drumline.data.row_store import RowCounts
from drumline.data.sources import Row
from drumline.data.targets import EncodedSample, TokenSegment
from drumline.data.workers import ChunkEncoder
from drumline.errors import DataError
from drumline.models.image_tokens import Vision
from drumline.models.templates import special_ids

# What becomes of a token: it is a loss target (learned), it has no loss, or it is cut off.
State = Literal["learned", "context", "cut"]
NO_LIMIT = 10**8  # the largest data.max_length
LONGEST_CHARACTER = 8  # tokens; a byte has one each, and four bytes make a character
# Tokens that are decoded before the wanted ones: some tokenizers drop the blank of a first word.
TOKENS_BEFORE = 4
REPLACEMENT = "\ufffd"  # stands for the bytes of an incomplete character
# Control and format characters that stay: joiners are parts of emoji and of words.
KEPT = {"\n", "\u200c", "\u200d"}
# Unicode categories that a terminal obeys or cannot show.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


@dataclass(frozen=True)
class Piece:
    """The text of one token, or of several tokens that are one character or one image.

    `special`: whether it is a special token of the tokenizer, or an image.
    """

    text: str
    state: State
    special: bool = False


class Image(NamedTuple):
    """An image of a sample: its path, and the number of its tokens."""

    path: str
    tokens: int


class Span(NamedTuple):
    """A piece of text, and the index at which its tokens stop."""

    stop: int
    piece: Piece


@dataclass(frozen=True)
class PreviewedRow:
    """A row, and what `prepare` makes of it.

    Attributes:
        number: the row's number, from 1 over all sources.
        row: the row.
        kept: the row's sample, perhaps cut; None if the row is dropped or refused.
        full: the row encoded without a limit of its length; None if that fails.
        error: why the row cannot be used.
    """

    number: int
    row: Row
    kept: EncodedSample | None
    full: EncodedSample | None
    error: DataError | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of the row's longest segment, before it was cut."""
        if self.full is None:
            return 0
        sizes = [len(segment.tokens) for segment in self.full.segments]
        return max(sizes, default=0)

    @property
    def fate(self) -> Literal["refused", "dropped", "unlearned", "cut", "whole"]:
        """What becomes of the row."""
        if self.error is not None:
            return "refused"
        if self.kept is None:
            return "dropped"
        # As `workers.ChunkEncoder.encode` decides it.
        has_targets = any(segment.target_count for segment in self.kept.segments)
        if self.kept.meta is None and not has_targets:
            return "unlearned"
        if self.kept.truncated:
            return "cut"
        return "whole"


class Reader:
    """Reads and encodes the rows of `config.data.train` in order.

    Args:
        config: the config of the run.
        tokenizer_path: the folder of the tokenizer.
        base_dir: the folder that paths of the config are relative to.
        vision: the images of a vision-language model.
        most: how many tokens of a segment become text. If it has more its middle is left out.
    """

    def __init__(
        self,
        config: Config,
        tokenizer_path: str,
        base_dir: Path,
        vision: Vision | None,
        most: int = NO_LIMIT,
    ) -> None:
        self.config = config
        self.base_dir = base_dir
        self.vision = vision
        # How many tokens are shown on each side of the middle that is left out.
        self.half = most // 2
        self.chunk_encoder = ChunkEncoder(
            tokenizer_path, config.model, config.algorithm, config.data, vision
        )
        unlimited = config.data.model_copy(update={"max_length": NO_LIMIT, "truncation": "right"})
        self.unlimited_encoder = replace(self.chunk_encoder, data=unlimited)
        # Of these `drumline preview` reads how many rows conditions have left out.
        self.counts = RowCounts()
        self.special: set[int] = set()
        if self.chunk_encoder.tokenizer is not None:
            self.special = special_ids(self.chunk_encoder.tokenizer)

    def rows(self, wanted: int | None, first: int) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (number, row); the numbers count from 1 over all sources.

        If a source cannot be read on, its last item has the error in place of a row.

        Args:
            wanted: the number of the one row to yield; None: the first rows of each source.
            first: how many rows of each source are yielded if `wanted` is None.

        Raises DataError if there is no `wanted` row.
        """
        number = 0
        limit = None if wanted else first
        build = CacheBuild(self.config, self.config.data.train, Path(), None)
        for index in range(len(build.sources)):
            try:
                rows = read_matching_rows(
                    build, index, self.base_dir, self.counts, with_faulty=True
                )
                for row in islice(rows, limit):
                    number += 1
                    if wanted is None or number == wanted:
                        yield number, row
                    if number == wanted:
                        return
            except DataError as error:
                number += 1
                yield number, error
                # Nobody knows the numbers of the rows behind this one.
                if wanted:
                    return
        if wanted:
            what = f"data.train has {number} rows, no row {wanted}"
            raise DataError(what, where="--row", fix=f"count from 1 to {number}")

    def encode(self, number: int, row: Row | DataError) -> PreviewedRow:
        """Encode a row of `rows`, or an error in its place, and return what becomes of it."""
        if isinstance(row, DataError):
            row = Row(row.where or "", {}, error=row)
        if row.error is not None:
            return PreviewedRow(number, row, kept=None, full=None, error=row.error)
        full: EncodedSample | None = None
        try:
            # First, so that a row that is refused for its length still has its tokens.
            full = self.unlimited_encoder.encode_row(row)
            kept = self.chunk_encoder.encode_row(row)
        except DataError as error:
            return PreviewedRow(number, row, kept=None, full=full, error=error)
        return PreviewedRow(number, row, kept, full)

    def has_empty_answer(self, seen: PreviewedRow) -> bool:
        """Return whether all targets of a row are special tokens: its answer has no text."""
        if seen.kept is None:
            return False
        has_learned = False
        for segment in seen.kept.segments:
            # The first token never counts: nothing predicts it.
            is_target = segment.learn[1:] > 0
            targets = segment.tokens[1:][is_target]
            for token in targets:
                has_learned = True
                if int(token) not in self.special:
                    return False
        return has_learned

    def segments(self, seen: PreviewedRow) -> list[list[Piece]]:
        """Return the pieces of each segment of a row, also of tokens that are cut off or dropped."""
        if seen.full is None:
            return []
        # All segments take their images from this one iterator. Both sides of a pair have all.
        images = cycle(_images(seen.full.meta or {}, self.vision))
        kept: list[TokenSegment | None] = [None] * len(seen.full.segments)
        if seen.kept is not None:
            kept = list(seen.kept.segments)
        segments = []
        for full, short in zip(seen.full.segments, kept, strict=True):
            states = self._states_of_full(full, short)
            segments.append(self.pieces(full.tokens, states, images))
        return segments

    def _states_of_full(self, full: TokenSegment, short: TokenSegment | None) -> list[State]:
        """Return the state of each token of a segment. `short`: what was kept of it; None: nothing."""
        states: list[State] = ["cut"] * len(full.tokens)
        if short is None:
            return states
        is_cut_left = self.config.data.truncation == "left"
        start, stop = find_cut(full.tokens, short.tokens, is_cut_left)
        kept_states = _states(short)
        # What stands between `start` and `stop` stays cut.
        states[:start] = kept_states[:start]
        states[stop:] = kept_states[start:]
        return states

    def sample(self, segments: list[tuple[Any, Any]], meta: dict[str, Any]) -> list[list[Piece]]:
        """Return the pieces of each segment of a sample of the token cache.

        Args:
            segments: (tokens, learn flags) of each segment.
            meta: the further values of the sample.
        """
        images = cycle(_images(meta, self.vision))
        pieces = []
        for tokens, learn in segments:
            states = _states(TokenSegment(tokens, learn))
            pieces.append(self.pieces(tokens, states, images))
        return pieces

    def pieces(
        self, tokens: npt.NDArray[Any], states: list[State], images: Iterator[Image]
    ) -> list[Piece]:
        """Return a segment's tokens as text. An image stands as one piece.

        Args:
            tokens: the tokens of the segment.
            states: what becomes of each of them.
            images: the images that are still to come. Those of the segment are taken from it.
        """
        if self.chunk_encoder.tokenizer is None:
            return []
        pieces: list[Piece] = []
        ids = [int(token) for token in tokens]
        index = 0
        while index < len(ids):
            span = self._next_span(ids, index, states, images)
            pieces.append(span.piece)
            index = span.stop
        return pieces

    def _next_span(
        self, ids: list[int], index: int, states: list[State], images: Iterator[Image]
    ) -> Span:
        """Return the piece that begins at `index`: a gap, an image, a special token or a character."""
        gap_stop = len(ids) - self.half
        if index == self.half and gap_stop > index:
            hidden = ids[index:gap_stop]
            self._skip_images(hidden, images)
            text = f"\n… {len(hidden):,} tokens, which --all shows …\n"
            return Span(gap_stop, Piece(text, "context"))
        if self.vision is not None and ids[index] == self.vision.token_id:
            image = next(images, Image("", 1))
            stop = min(index + image.tokens, self._part_stop(ids, index))
            text = f"[image {image.path}: {image.tokens} tokens]"
            return Span(stop, Piece(text, states[index], special=True))
        if ids[index] in self.special:
            text = str(self.chunk_encoder.tokenizer.convert_ids_to_tokens(ids[index]))
            return Span(index + 1, Piece(text, states[index], special=True))
        return self._character(ids, index, states)

    def _skip_images(self, ids: list[int], images: Iterator[Image]) -> None:
        """Take the images of tokens that are not shown from `images`."""
        if self.vision is None:
            return
        hidden = ids.count(self.vision.token_id)
        while hidden > 0:
            image = next(images, Image("", hidden))
            hidden -= image.tokens

    def _part_stop(self, ids: list[int], index: int) -> int:
        """Return the index at which the part of a segment that is shown around `index` stops.

        A piece must not reach into the middle that is left out.
        """
        if index >= self.half:
            return len(ids)
        return self.half

    def _character(self, ids: list[int], index: int, states: list[State]) -> Span:
        """Return the whole characters that begin at `index`, of as few tokens as possible."""
        first = max(0, index - TOKENS_BEFORE)
        head = self._decode(ids[first:index])
        last_stop = min(index + LONGEST_CHARACTER, self._part_stop(ids, index))
        for stop in range(index + 1, last_stop + 1):
            last = stop - 1
            is_other_piece = ids[last] in self.special or states[last] != states[index]
            if last > index and is_other_piece:
                break
            decoded = self._decode(ids[first:stop])
            text = decoded[len(head) :]
            # Bytes of a character are decoded as `REPLACEMENT` until the last of them is there.
            if text and not text.endswith(REPLACEMENT):
                return Span(stop, Piece(text, states[index]))
        # The bytes make no character: show what this token alone is decoded as.
        text = self._decode(ids[index : index + 1])
        return Span(index + 1, Piece(text, states[index]))

    def _decode(self, ids: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        text = self.chunk_encoder.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def find_cut(full: npt.NDArray[Any], kept: npt.NDArray[Any], left: bool) -> tuple[int, int]:
    """Return the range [start, stop) of a segment's tokens that were cut off.

    It need not reach the end: special tokens there may have been kept.

    Args:
        full: the tokens of the segment.
        kept: those that were kept.
        left: the policy cuts at the start.
    """
    size = len(kept)
    excess = len(full) - size
    # Also under `left` the cut may be elsewhere: a text with a class keeps its [CLS] at the start.
    if left and np.array_equal(full[excess:], kept):
        return 0, excess
    start = size
    differs = np.flatnonzero(full[:size] != kept)
    if len(differs):
        start = int(differs[0])
    return start, start + excess


def escape(text: str, marks: str = "") -> str:
    """Return a text that is safe to print: characters that a terminal obeys are escaped.

    These are control and format characters and lone halves of a surrogate pair. `marks`: further
    characters to escape, which the caller prints with a meaning of its own.
    """
    characters = []
    for character in text:
        category = unicodedata.category(character)
        is_hidden = category in HIDDEN and character not in KEPT
        if is_hidden or character in marks:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def _states(example: TokenSegment) -> list[State]:
    """Return the state of each token of a segment."""
    states: list[State] = []
    for index, flag in enumerate(example.learn.tolist()):
        # The first token never counts: nothing predicts it.
        if index > 0 and flag:
            states.append("learned")
        else:
            states.append("context")
    return states


def _images(meta: dict[str, Any], vision: Vision | None) -> list[Image]:
    """Return the images of a sample; one of several tiles once for each of them."""
    if vision is None:
        return []
    images = []
    paths = meta.get("images", ())
    grids = meta.get("grid", ())
    for path, grid in zip(paths, grids, strict=True):
        # JSON made a list of the tuple.
        for tokens in vision.runs(tuple(grid)):
            images.append(Image(path, tokens))
    return images

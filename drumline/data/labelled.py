"""Rows with a class: texts or images, their encoders, and the batches that a classifier is trained on.

A label is the name of a class, or a number: of a class that is so named, else the place in `algorithm.labels`. A sample of the token
cache keeps the name, so the order of the classes is settled when all rows are known.

B samples, T tokens, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.core.data import DataConfig
from drumline.core.plan import Plan
from drumline.data.batches import FILLER_WIDTH, IGNORE, Batch
from drumline.data.cache import TokenCache
from drumline.data.sources import Row
from drumline.data.templates import Encoded, Example
from drumline.errors import DataError
from drumline.models.vision import pixels, read_image


def label_of(row: Row, labels: list[str] | None) -> str:
    """The name of the row's class. Raises DataError for one that is not among `labels`."""
    given = row.values["label"]
    if isinstance(given, bool):
        raise DataError("the label is bool, not the name or number of a class", where=row.origin)
    name = str(given)
    if labels is None or name in labels:
        return name
    if isinstance(given, int) and 0 <= given < len(labels):
        return labels[given]
    what = f"label {name!r} is none of algorithm.labels: {_few(labels)}"
    raise DataError(what, where=row.origin, fix="add it there, or leave labels out")


def classes(train: TokenCache, held_out: TokenCache | None, labels: list[str] | None) -> tuple[str, ...]:
    """The classes in order: `labels`, or those of the training samples, numbers by value and names by the alphabet.

    Raises DataError where there is one class alone, or a held-out sample has a class that the training samples have not.
    """
    found = set(labels or (train.meta(sample)["label"] for sample in range(len(train))))
    if len(found) < 2:
        what = f"all {len(train)} training rows have one class, {min(found)!r}: there is nothing to tell apart"
        raise DataError(what, where="data.train")
    for meta in map(held_out.meta, range(len(held_out))) if held_out else ():
        if meta["label"] not in found:
            what = f"label {meta['label']!r} is on no training row; those have {_few(sorted(found))}"
            raise DataError(what, where=meta["origin"], fix="add training rows of it, or take the row out")
    if labels:
        return tuple(labels)
    return tuple(sorted(found, key=lambda name: (int(name) if name.removeprefix("-").isdecimal() else 2**63, name)))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# ------------------------------------------------------------------------------------------------------------- encoders


class LabelledTexts:
    """Texts with the special tokens that the tokenizer puts around one (BERT's [CLS] and [SEP]); a cut keeps those."""

    def __init__(self, tokenizer: Any, labels: list[str] | None, data: DataConfig) -> None:
        self.tokenizer, self.labels, self.data = tokenizer, labels, data

    def encode(self, row: Row) -> Encoded | None:
        label = label_of(row, self.labels)
        tokens = self.tokenizer(row.values["text"], verbose=False)["input_ids"]
        limit, policy, cut = self.data.max_length, self.data.truncation, False
        if len(tokens) > limit:
            if policy == "drop":
                return None
            if policy == "error":
                what = f"{len(tokens)} tokens, more than data.max_length {limit}"
                raise DataError(what, where=row.origin, fix="set data.truncation: right")
            self.tokenizer.truncation_side = policy
            tokens, cut = self.tokenizer(row.values["text"], truncation=True, max_length=limit)["input_ids"], True
        if not tokens:
            raise DataError("the text is empty", where=row.origin, fix="take the row out")
        return Encoded([_unlearned(tokens)], {"label": label, "origin": row.origin}, cut)


class LabelledImages:
    """Images by path, each opened once to see that it can be; its pixels are read when a batch is made. One token stands for an image."""

    def __init__(self, labels: list[str] | None) -> None:
        self.labels = labels

    def encode(self, row: Row) -> Encoded | None:
        path = str((row.folder / Path(row.values["image"]).expanduser()).absolute())
        read_image(path, row.origin)
        return Encoded([_unlearned([0])], {"label": label_of(row, self.labels), "origin": row.origin, "path": path})


def _unlearned(tokens: list[int]) -> Example:
    return Example(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.uint8))


# -------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Texts, padded on the right. `labels_B` int64, IGNORE for a filler; `last_B` int64: place of each row's last token.

    `attention_mask_BT` int64 is there for models whose tokens look ahead; a filler's first token is in it, since attention to nothing
    at all is not a number. Others need none, and get positions instead. `position_ids_BT` count from the model's first one on, padding too.
    `weight`: how many rows have a class.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor | None
    last_B: torch.Tensor
    labels_B: torch.Tensor
    weight: int

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model is called with. Who looks ahead counts positions by itself (RoBERTa from another number than 0)."""
        if self.attention_mask_BT is not None:
            return {"input_ids": self.input_ids_BT, "attention_mask": self.attention_mask_BT}
        return {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT}


@dataclass(frozen=True)
class ImageBatch(Batch):
    """`pixels_BCHW` float32, zero for a filler; `labels_B` int64, IGNORE for a filler. `weight`: how many are images."""

    pixels_BCHW: torch.Tensor
    labels_B: torch.Tensor
    weight: int

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model is called with."""
        return {"pixel_values": self.pixels_BCHW}


@dataclass(frozen=True)
class TextCollator:
    """Makes batches of sample ids (-1: a filler). `width` None: as wide as the longest row."""

    cache: TokenCache
    labels: tuple[str, ...]
    pad_id: int
    bidirectional: bool
    first_position: int
    width: int | None

    def __call__(self, ids: list[int]) -> LabelledBatch:
        rows = [self.cache.segments(sample)[0][0] if sample >= 0 else np.full(1, self.pad_id, np.int64) for sample in ids]
        lengths = np.asarray([len(row) for row in rows])
        width = self.width or max(FILLER_WIDTH, int(lengths.max()))
        tokens = np.full((len(rows), width), self.pad_id, np.int64)
        for place, row in zip(tokens, rows, strict=True):
            place[: len(row)] = row
        mask = np.arange(width) < lengths[:, None]
        return LabelledBatch(
            torch.from_numpy(tokens),
            torch.arange(self.first_position, self.first_position + width).repeat(len(rows), 1),
            torch.from_numpy(mask.astype(np.int64)) if self.bidirectional else None,
            torch.from_numpy(lengths - 1),
            *_labels(self.cache, ids, self.labels),
        )


@dataclass(frozen=True)
class ImageCollator:
    """Reads images and makes batches of them. Runs in the thread that fetches batches ahead."""

    cache: TokenCache
    labels: tuple[str, ...]
    processor: Any
    side: int
    channels: int = 3

    def __call__(self, ids: list[int]) -> ImageBatch:
        tensor_BCHW = torch.zeros(len(ids), self.channels, self.side, self.side)
        metas = [(place, self.cache.meta(sample)) for place, sample in enumerate(ids) if sample >= 0]
        if metas:
            images = [read_image(meta["path"], meta["origin"]) for _, meta in metas]
            tensor_BCHW[[place for place, _ in metas]] = torch.from_numpy(pixels(self.processor, images, self.channels))
        return ImageBatch(tensor_BCHW, *_labels(self.cache, ids, self.labels))


def _labels(cache: TokenCache, ids: Iterable[int], labels: tuple[str, ...]) -> tuple[torch.Tensor, int]:
    """int64[B], and how many of them are no fillers."""
    numbers = [labels.index(cache.meta(sample)["label"]) if sample >= 0 else IGNORE for sample in ids]
    return torch.tensor(numbers), sum(number != IGNORE for number in numbers)


def labelled_texts(plan: Plan, rows: int, length: int) -> LabelledBatch:
    """Texts of `length` tokens, all of the first class."""
    ids_BT, first = torch.zeros(rows, length, dtype=torch.int64), plan.first_position
    positions_BT, last_B = torch.arange(first, first + length).repeat(rows, 1), torch.full((rows,), length - 1)
    mask_BT = torch.ones_like(ids_BT) if plan.bidirectional else None
    return LabelledBatch(ids_BT, positions_BT, mask_BT, last_B, torch.zeros(rows, dtype=torch.int64), rows)


def labelled_images(rows: int, side: int, channels: int) -> ImageBatch:
    """Square images of `side` pixels, all of the first class."""
    return ImageBatch(torch.zeros(rows, channels, side, side), torch.zeros(rows, dtype=torch.int64), rows)

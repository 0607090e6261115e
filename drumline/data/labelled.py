"""Rows with a class: texts or images, their encoders, and the batches of a classifier.

A label is the name of a class, or a number: the name of a class, else an index of `algorithm.labels`. A sample of the token cache keeps
the name: the order of the classes follows from all rows.

B samples, T tokens, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.core.data import DataConfig
from drumline.core.plan import Plan
from drumline.data.batches import IGNORE, Batch, TokenBatch, collate, learned_segment
from drumline.data.cache import Segment, TokenCache
from drumline.data.sources import Row
from drumline.data.templates import Encoded, Example, truncate
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
    """The classes in order: `labels`, or those of the training samples, numbers by value and then names by the alphabet. Raises DataError
    if there is only one class, or a held-out sample has a class that no training sample has."""
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


class LabelledTexts:
    """Encodes texts, with the tokenizer's special tokens around each (BERT's [CLS] and [SEP]), which truncation keeps."""

    def __init__(self, tokenizer: Any, labels: list[str] | None, data: DataConfig) -> None:
        self.tokenizer, self.labels, self.data = tokenizer, labels, data

    def encode(self, row: Row) -> Encoded | None:
        label = label_of(row, self.labels)
        tokens = self.tokenizer(row.values["text"], verbose=False)["input_ids"]
        if not tokens:
            raise DataError("the text is empty", where=row.origin, fix="take the row out")
        limit, policy = self.data.max_length, self.data.truncation
        if truncate(_unlearned(tokens), limit, policy, row.origin) is None:
            return None
        if cut := len(tokens) > limit:
            self.tokenizer.truncation_side = policy
            tokens = self.tokenizer(row.values["text"], truncation=True, max_length=limit)["input_ids"]
        return Encoded([_unlearned(tokens)], {"label": label, "origin": row.origin}, cut)


class LabelledImages:
    """Encodes images by path, as one token each. Reads each image once, to find damaged ones; its pixels are read again for a batch."""

    def __init__(self, labels: list[str] | None) -> None:
        self.labels = labels

    def encode(self, row: Row) -> Encoded | None:
        path = str((row.folder / Path(row.values["image"]).expanduser()).absolute())
        read_image(path, row.origin)
        return Encoded([_unlearned([0])], {"label": label_of(row, self.labels), "origin": row.origin, "path": path})


def _unlearned(tokens: list[int]) -> Example:
    return Example(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.uint8))


@dataclass(frozen=True)
class LabelledBatch(TokenBatch):
    """A TokenBatch of texts, without targets. `labels_B` int64, IGNORE for a filler, which counts as one token. `attention_mask_BT` int64
    is for bidirectional models; it has a filler's first token, since attention to no token is NaN. Other models get positions instead.
    `position_ids_BT` count from the model's first position on, padding included. `weight`: rows with a class."""

    labels_B: torch.Tensor
    attention_mask_BT: torch.Tensor | None

    weigh = staticmethod(Batch.weigh)

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a model. A bidirectional one counts positions by itself (RoBERTa does not start at 0)."""
        if self.attention_mask_BT is None:
            return super().inputs()
        return {"input_ids": self.input_ids_BT, "attention_mask": self.attention_mask_BT}


@dataclass(frozen=True)
class ImageBatch(Batch):
    """`pixels_BCHW` float32, zero for a filler; `labels_B` int64, IGNORE for a filler. `weight`: the number of images."""

    pixels_BCHW: torch.Tensor
    labels_B: torch.Tensor
    weight: int

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels_BCHW}


def collate_texts(plan: Plan, cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None) -> LabelledBatch:
    """The texts of sample ids (-1: a filler), padded to `width` tokens; None: to the longest text."""
    rows = [cache.segments(sample) if sample >= 0 else None for sample in ids]
    return _texts(plan, rows, _labels(cache, ids, plan.labels), pad_id, width)


def collate_images(cache: TokenCache, ids: Sequence[int], labels: tuple[str, ...], processor: Any, side: int, channels: int) -> ImageBatch:
    """The images of sample ids (-1: a filler), read from their files."""
    tensor_BCHW = torch.zeros(len(ids), channels, side, side)
    metas = [(place, cache.meta(sample)) for place, sample in enumerate(ids) if sample >= 0]
    if metas:
        images = [read_image(meta["path"], meta["origin"]) for _, meta in metas]
        tensor_BCHW[[place for place, _ in metas]] = torch.from_numpy(pixels(processor, images, channels))
    return ImageBatch(tensor_BCHW, torch.tensor(_labels(cache, ids, labels)), len(metas))


def _labels(cache: TokenCache, ids: Sequence[int], labels: tuple[str, ...]) -> list[int]:
    return [labels.index(cache.meta(sample)["label"]) if sample >= 0 else IGNORE for sample in ids]


def _texts(plan: Plan, rows: Sequence[Sequence[Segment] | None], labels: list[int], pad_id: int, width: int | None) -> LabelledBatch:
    fields: dict[str, Any] = vars(collate(rows, pad_id, width))
    lengths_B, places_BT = fields["lengths_B"].clamp(min=1), fields["position_ids_BT"]
    mask_BT = (places_BT < lengths_B[:, None]).long() if plan.bidirectional else None
    fields |= {"lengths_B": lengths_B, "position_ids_BT": places_BT + plan.first_position}
    fields["weight"] = sum(label != IGNORE for label in labels)
    return LabelledBatch(**fields, labels_B=torch.tensor(labels), attention_mask_BT=mask_BT)


def labelled_texts(plan: Plan, rows: int, length: int) -> LabelledBatch:
    """Texts of `length` tokens, all of the first class."""
    return _texts(plan, [[learned_segment(length)]] * rows, [0] * rows, 0, length)


def labelled_images(rows: int, side: int, channels: int) -> ImageBatch:
    """Square images of `side` pixels, all of the first class."""
    return ImageBatch(torch.zeros(rows, channels, side, side), torch.zeros(rows, dtype=torch.int64), rows)

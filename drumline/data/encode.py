"""From a row to what a sample is made of: an encoder for each kind of algorithm, behind one verb."""

from __future__ import annotations

from typing import Any, Protocol

from drumline.config.algorithms import ROLLOUT, Algorithm, ClassifyConfig
from drumline.config.data import DataConfig
from drumline.data.images import ImageRows
from drumline.data.labelled import LabelledImages, LabelledTexts
from drumline.data.pairs import PairRows
from drumline.data.prompts import PromptRows
from drumline.data.sources import Row, holds_images
from drumline.data.templates import Encoded, Encoder, truncate
from drumline.errors import DataError
from drumline.models.vision import Vision


class RowEncoder(Protocol):
    def encode(self, row: Row) -> Encoded | None:
        """A row as tokens, cut to size; None where it is too long and to be dropped. Raises DataError that names the row."""
        ...


def row_encoder(algorithm: Algorithm, tokenizer: Any, data: DataConfig, vision: Vision | None = None) -> RowEncoder:
    """`vision`: of a model that sees. Raises DataError where the tokenizer lacks what the algorithm needs, ConfigError for settings
    that mean nothing to it."""
    if algorithm.kind in ("reward", "dpo"):
        return PairRows(tokenizer, data)
    if vision is not None and algorithm.kind == "sft":
        return ImageRows(tokenizer, data, vision)
    if isinstance(algorithm, ROLLOUT):
        return PromptRows(tokenizer, algorithm, data)
    if isinstance(algorithm, ClassifyConfig):
        return LabelledTexts(tokenizer, algorithm, data) if algorithm.modality == "text" else LabelledImages(algorithm)
    assert algorithm.kind in ("sft", "pretrain"), algorithm.kind
    return TextRows(tokenizer, algorithm.kind, data)


class TextRows:
    """Conversations, completions and documents. Rows of a packed pretraining run stay whole: the packs are cut instead."""

    def __init__(self, tokenizer: Any, kind: str, data: DataConfig) -> None:
        self.encoder, self.data = Encoder(tokenizer, kind == "pretrain", data), data
        self.whole = kind == "pretrain" and data.packing

    def encode(self, row: Row) -> Encoded | None:
        if holds_images(row):
            fix = "name a vision-language model, with algorithm sft"
            raise DataError("this row holds images, and text alone is read here", where=row.origin, fix=fix)
        full = self.encoder.encode(row)
        example = full if self.whole else truncate(full, self.data.max_length, self.data.truncation, row.origin)
        return None if example is None else Encoded([example], truncated=len(example.tokens) < len(full.tokens))

"""Queries with texts that do and do not answer them: how rows are encoded, and their batches.

A sample has R texts: the query, the text that answers it (the positive), and R − 2 that do not (the
negatives). A batch of P samples has B = R · P rows: first all queries, then all positives, then the
first negative of each sample, and so on. A row without its text is a filler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.config.data import DataConfig
from drumline.data.batches import (
    FirstPassNumbers,
    WholeTextBatch,
    collate_whole_texts,
    learned_segment,
    read_segments,
)
from drumline.data.cache import Segment, TokenCache
from drumline.data.encode import encode_whole_text
from drumline.data.sources import Row
from drumline.data.targets import EncodedSample
from drumline.errors import DataError
from drumline.plan.plan import Plan

# Bits of a text's number. fp64 has such numbers without rounding.
ID_BITS = 52
# The number of a row that has no text.
NO_TEXT = -1


class RetrievalRowEncoder:
    """Encodes a query and the texts that do and do not answer it, each as a segment of its own.

    Args:
        tokenizer: a tokenizer of transformers, whose special tokens are around each text.
        data: the settings of `data`.
        negatives: how many texts that do not answer are read of a row, the first ones.
        query_prompt: text before each query.
        document_prompt: text before each other text.
    """

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        negatives: int,
        query_prompt: str,
        document_prompt: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.negatives = negatives
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a sample of two segments and one for each negative, see `RowEncoder.encode`."""
        values = row.values
        negatives = values.get("negative", [])
        if negatives and not self.negatives:
            raise DataError(
                "the row has negatives, and algorithm.negatives is 0",
                where=row.origin,
                fix=f"set algorithm.negatives to {len(negatives)}, or take the column out",
            )
        documents = [values["positive"], *negatives[: self.negatives]]
        texts = [self.query_prompt + values["query"]]
        for document in documents:
            texts.append(self.document_prompt + document)
        segments = []
        is_cut = False
        for text in texts:
            encoded = encode_whole_text(self.tokenizer, text, self.data, row.origin)
            if encoded is None:
                return None
            segments.append(encoded.segment)
            is_cut = is_cut or encoded.truncated
        # A meta, since the sample has no targets and is kept.
        return EncodedSample(segments, {"negatives": len(negatives)}, is_cut)


@dataclass(frozen=True)
class RetrievalBatch(WholeTextBatch):
    """A batch of queries with texts that do and do not answer them.

    Attributes:
        text_ids_B: fp64, a number of each text by its tokens: equal texts have equal numbers.
            NO_TEXT for a filler.
        real_P: fp32, 1 for a sample, 0 for a filler, which weighs nothing.
        weight: the number of real samples.
    """

    text_ids_B: torch.Tensor
    real_P: torch.Tensor


def collate_retrieval(
    plan: Plan,
    cache: TokenCache,
    samples: Sequence[int],
    pad_id: int,
    width: int | None,
    texts: int,
) -> RetrievalBatch:
    """Return the batch of `samples` of a cache (-1: a filler), padded to `width` tokens.

    Without a `width` the rows are padded to the longest one. `texts`: R of the batch. A sample may
    have fewer.
    """
    return _retrieval_batch(plan, read_segments(cache, samples), pad_id, width, texts)


def _retrieval_batch(
    plan: Plan,
    samples: Sequence[Sequence[Segment] | None],
    pad_id: int,
    width: int | None,
    texts: int,
) -> RetrievalBatch:
    """Return the batch of samples, each given as its segments; None is a filler."""
    rows: list[Sequence[Segment] | None] = []
    ids: list[int] = []
    for number in range(texts):
        for segments in samples:
            if segments is None or number >= len(segments):
                rows.append(None)
                ids.append(NO_TEXT)
            else:
                rows.append([segments[number]])
                tokens, _ = segments[number]
                ids.append(text_id(tokens))
    fields = collate_whole_texts(plan, rows, pad_id, width)
    is_real = [segments is not None for segments in samples]
    fields["weight"] = sum(is_real)
    return RetrievalBatch(
        **fields,
        text_ids_B=torch.tensor(ids, dtype=torch.float64),
        real_P=torch.tensor(is_real, dtype=torch.float32),
    )


def text_id(tokens: npt.NDArray[Any]) -> int:
    """Return a number of ID_BITS bits by which equal texts are found."""
    data = tokens.astype(np.int64).tobytes()
    digest = blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - ID_BITS)


def placeholder_retrieval(
    plan: Plan, rows: int, length: int, texts: int, numbers: int
) -> RetrievalBatch:
    """Return a placeholder batch of `rows` texts with `length` tokens, `texts` a sample.

    `numbers`: how many the first pass has of each sample. They are 0.
    """
    count = rows // texts
    samples = [[learned_segment(length)] * texts] * count
    batch = _retrieval_batch(plan, samples, 0, length, texts)
    numbers_NK = torch.zeros(count, numbers, dtype=torch.float64)
    return replace(batch, first=FirstPassNumbers(numbers_NK), places_P=torch.arange(count))

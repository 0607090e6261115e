"""Queries with texts that do and do not answer them: how rows are encoded, and their batches.

For embeddings a sample has R texts: the query, the text that answers it (the positive), and R − 2
that do not (the negatives). A batch of P samples has B = R · P rows: first all queries, then all
positives, then the first negative of each sample, and so on. A row without its text is a filler.

For rerankers a sample has C candidates, each of which is the query and another text in one row: the
positive, and then the negatives. A batch has B = C · P rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    read_metas,
    read_segments,
)
from drumline.data.cache import Segment, TokenCache
from drumline.data.encode import encode_whole_text, without_targets
from drumline.data.sources import Row
from drumline.data.targets import EncodedSample, truncate
from drumline.errors import DataError
from drumline.models.load import load_config
from drumline.plan.plan import Plan

# Bits of a text's number. fp64 has such numbers without rounding.
ID_BITS = 52
# The number of a row that has no text.
NO_TEXT = -1
# transformers' name of the tokens' parts: 0 for the first text, 1 for the second.
TOKEN_TYPES = "token_type_ids"


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
        _require_texts(row)
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
        return EncodedSample(segments, {"negatives": len(documents) - 1}, is_cut)


class CandidateRowEncoder:
    """Encodes a query with each text that does or does not answer it, each pair as a segment.

    A pair that is too long loses tokens of its text alone. The meta has the number of negatives,
    and for a tokenizer that tells both parts apart (BERT's token types) the place in each segment
    at which the text begins.

    Args:
        tokenizer: a tokenizer of transformers.
        data: the settings of `data`.
        negatives: how many texts that do not answer are read of a row, the first ones.
    """

    def __init__(self, tokenizer: Any, data: DataConfig, negatives: int) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.negatives = negatives

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a sample with a segment for each candidate, see `RowEncoder.encode`."""
        _require_texts(row)
        values = row.values
        documents = [values["positive"], *values.get("negative", [])[: self.negatives]]
        segments = []
        starts = []
        is_cut = False
        for document in documents:
            encoded = self.tokenizer(values["query"], document, verbose=False)
            whole = without_targets(encoded["input_ids"])
            limit = self.data.max_length
            # Only for `error` and `drop`.
            if truncate(whole, limit, self.data.truncation, row.origin) is None:
                return None
            if len(whole.tokens) > limit:
                is_cut = True
                encoded = self._cut(values["query"], document, row.origin)
            segments.append(without_targets(encoded["input_ids"]))
            types = encoded.get(TOKEN_TYPES, [])
            # 0 for each token of the query, and then 1.
            starts.append(types.count(0))
        meta: dict[str, Any] = {"negatives": len(documents) - 1}
        if TOKEN_TYPES in self.tokenizer.model_input_names:
            meta["starts"] = starts
        return EncodedSample(segments, meta, is_cut)

    def _cut(self, query: str, document: str, origin: str) -> Any:
        """Return a pair as the tokenizer cuts it to data.max_length. Raises DataError."""
        limit = self.data.max_length
        query_size = len(self.tokenizer(query, verbose=False)["input_ids"])
        # A pair may have more special tokens than a text.
        query_size += self.tokenizer.num_special_tokens_to_add(pair=True)
        query_size -= self.tokenizer.num_special_tokens_to_add(pair=False)
        if query_size >= limit:
            raise DataError(
                f"the query has {query_size} tokens, which leaves nothing of data.max_length {limit}",
                where=origin,
                fix="raise data.max_length, or take the row out",
            )
        self.tokenizer.truncation_side = self.data.truncation
        return self.tokenizer(query, document, truncation="only_second", max_length=limit)


def _require_texts(row: Row) -> None:
    """Raise DataError for a query, a positive or a negative without text.

    Special tokens and prompts would hide that.
    """
    for name in ("query", "positive", "negative"):
        texts = row.values.get(name, [])
        if isinstance(texts, str):
            texts = [texts]
        for text in texts:
            if not text.strip():
                raise DataError(f"`{name}` has an empty text", where=row.origin, fix="take it out")


def require_negatives(cache: TokenCache, role: str) -> None:
    """Raise DataError if no sample of a cache has a negative. `role`: training or held-out."""
    for sample in range(len(cache)):
        if cache.meta(sample)["negatives"]:
            return
    what = f"none of the {len(cache)} {role} rows has a negative: every text answers its query"
    raise DataError(what, where="data", fix="add a column `negative`, a text or a list")


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


@dataclass(frozen=True)
class CandidateBatch(WholeTextBatch):
    """A batch of queries, each in one row with a text that does or does not answer it.

    Attributes:
        present_B: bool, false for a filler.
        real_P: fp32, 1 for a sample, 0 for a filler.
        token_type_ids_BT: int64, 0 for the query and 1 for the text; None for models without types.
        weight: the number of real samples.
    """

    present_B: torch.Tensor
    real_P: torch.Tensor
    token_type_ids_BT: torch.Tensor | None

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model."""
        inputs = super().inputs()
        if self.token_type_ids_BT is None:
            return inputs
        return {**inputs, TOKEN_TYPES: self.token_type_ids_BT}


def collate_candidates(
    plan: Plan,
    cache: TokenCache,
    samples: Sequence[int],
    pad_id: int,
    width: int | None,
    candidates: int,
    model_has_types: bool,
) -> CandidateBatch:
    """Return the batch of `samples` of a cache (-1: a filler), padded to `width` tokens.

    Without a `width` the rows are padded to the longest one. `candidates`: C of the batch. A sample
    may have fewer. `model_has_types`: the model tells a query's tokens from a text's.
    """
    metas = read_metas(cache, samples)
    rows = read_segments(cache, samples)
    has_types = model_has_types and any("starts" in meta for meta in metas)
    return _candidate_batch(plan, rows, metas, pad_id, width, candidates, has_types)


def _candidate_batch(
    plan: Plan,
    samples: Sequence[Sequence[Segment] | None],
    metas: Sequence[dict[str, Any]],
    pad_id: int,
    width: int | None,
    candidates: int,
    has_types: bool = False,
) -> CandidateBatch:
    """Return the batch of samples, each given as its segments and its meta; None is a filler.

    `has_types`: the model takes types of tokens, and metas have the places of the texts.
    """
    rows: list[Sequence[Segment] | None] = []
    # Beyond all rows for fillers, which have no text.
    starts: list[int] = []
    for number in range(candidates):
        for segments, meta in zip(samples, metas, strict=True):
            row = None
            start = plan.config.data.max_length
            if segments is not None and number < len(segments):
                row = [segments[number]]
                if has_types:
                    start = meta["starts"][number]
            rows.append(row)
            starts.append(start)
    fields = collate_whole_texts(plan, rows, pad_id, width)
    is_real = [segments is not None for segments in samples]
    fields["weight"] = sum(is_real)
    types_BT = None
    if has_types:
        columns_T = torch.arange(fields["input_ids_BT"].shape[1])
        lengths_B1 = fields["lengths_B"][:, None]
        is_text_BT = (columns_T >= torch.tensor(starts)[:, None]) & (columns_T < lengths_B1)
        types_BT = is_text_BT.long()
    return CandidateBatch(
        **fields,
        present_B=torch.tensor([row is not None for row in rows]),
        real_P=torch.tensor(is_real, dtype=torch.float32),
        token_type_ids_BT=types_BT,
    )


def placeholder_candidates(plan: Plan, rows: int, length: int, candidates: int) -> CandidateBatch:
    """Return a placeholder batch of `rows` pairs with `length` tokens, `candidates` a sample."""
    count = rows // candidates
    samples = [[learned_segment(length)] * candidates] * count
    return _candidate_batch(plan, samples, [{}] * count, 0, length, candidates)


def text_id(tokens: npt.NDArray[Any]) -> int:
    """Return a number of ID_BITS bits by which equal texts are found."""
    data = tokens.astype(np.int64).tobytes()
    digest = blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - ID_BITS)


def placeholder_retrieval(
    plan: Plan, rows: int, length: int, texts: int, first_numbers: Callable[[int], int]
) -> RetrievalBatch:
    """Return a placeholder batch of `rows` texts with `length` tokens, `texts` a sample.

    `first_numbers`: takes the width of the hidden states, and returns how many numbers of the first
    pass each sample has. They are 0.
    """
    hf_config = load_config(plan.model_path, plan.config.model)
    numbers = first_numbers(hf_config.get_text_config().hidden_size)
    count = rows // texts
    samples = [[learned_segment(length)] * texts] * count
    batch = _retrieval_batch(plan, samples, 0, length, texts)
    numbers_NK = torch.zeros(count, numbers, dtype=torch.float64)
    return replace(batch, first=FirstPassNumbers(numbers_NK), places_P=torch.arange(count))

"""Batches of answers that are labelled good or bad, for KTO (Ethayarajh et al. 2024).

KTO estimates its KL from mismatched rows: a prompt with the answer to another prompt. B rows, T
tokens, P samples; each sample is one row, so B = P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from drumline.data.batches import (
    Batch,
    FirstPassNumbers,
    TokenBatch,
    collate,
    learned_segment,
    read_metas,
)
from drumline.data.cache import Segment, TokenCache
from drumline.data.images import add_images, width_with_images
from drumline.errors import DataError
from drumline.models.image_tokens import Vision


@dataclass(frozen=True, kw_only=True)
class JudgedBatch(TokenBatch):
    """A TokenBatch with one batch row for each judged answer, whose tokens are the targets.

    Attributes:
        good_B: fp64, 1 for a good answer, else 0.
        bad_B: fp64, 1 for a bad answer, else 0. A filler has 0 in both.
        samples_P: int64, numbers of the samples in their cache, -1 for fillers.
        reference_B: fp64, log-probability of each answer under the reference; None until it is
            known.
        mismatched: the same prompts with answers to other prompts, for the first pass; None if the
            algorithm needs none. If all samples have one prompt, these rows are fillers.
        first_reference_B: the `reference_B` of the rows of the first pass, which are `mismatched`.
        weight: the number of real rows.
    """

    good_B: torch.Tensor
    bad_B: torch.Tensor
    samples_P: torch.Tensor
    reference_B: torch.Tensor | None = None
    mismatched: JudgedBatch | None = None
    first_reference_B: torch.Tensor | None = None

    weigh = staticmethod(Batch.weigh)

    @property
    def real_P(self) -> torch.Tensor:  # noqa: N802 - as the fields of batches are called
        """fp64: 1 for a sample, 0 for a filler."""
        return self.good_B + self.bad_B

    def token_weights(self) -> torch.Tensor:
        """Return fp64[B, T]: 1 at the last token of each answer, and 0 elsewhere and for fillers.

        Only the load-balancing loss of a mixture (`models.router`) reads it, as the weight of each
        row. The objective reads all targets of an answer.
        """
        last_BT = self.position_ids_BT == self.last_B[:, None]
        return last_BT * self.real_P[:, None]


def judged_batch(
    rows: Sequence[Segment | None],
    labels: Sequence[bool | None],
    samples: Sequence[int],
    pad_id: int,
    width: int | None,
) -> JudgedBatch:
    """Return a batch of judged answers.

    Args:
        rows: the segment of each answer; None for a filler.
        labels: whether each answer is good; None for a filler.
        samples: the number of each sample in its cache, -1 for a filler.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest answer.
    """
    segments_of_rows: list[list[Segment] | None] = []
    for row in rows:
        if row is None:
            segments_of_rows.append(None)
        else:
            segments_of_rows.append([row])
    is_good = [label is True for label in labels]
    is_bad = [label is False for label in labels]
    fields = vars(collate(segments_of_rows, pad_id, width))
    fields["weight"] = sum(row is not None for row in rows)
    return JudgedBatch(
        **fields,
        good_B=torch.tensor(is_good, dtype=torch.float64),
        bad_B=torch.tensor(is_bad, dtype=torch.float64),
        samples_P=torch.tensor(samples, dtype=torch.int64),
    )


def collate_judged(
    cache: TokenCache,
    samples: Sequence[int],
    pad_id: int,
    width: int | None,
    vision: Vision | None = None,
) -> JudgedBatch:
    """Return the batch of `samples` of a cache (-1: a filler), padded to `width` tokens.

    Without a `width` the rows are padded to the longest one. `vision`: the model's images; None for
    a model of text.
    """
    rows = _segments(cache, samples)
    labels = _labels(cache, samples)
    if vision is None:
        return judged_batch(rows, labels, samples, pad_id, width)
    return _judged_batch_with_images(cache, rows, labels, samples, pad_id, width, vision)


def _judged_batch_with_images(
    cache: TokenCache,
    rows: Sequence[Segment | None],
    labels: Sequence[bool | None],
    samples: Sequence[int],
    pad_id: int,
    width: int | None,
    vision: Vision,
) -> JudgedBatch:
    """Return `judged_batch` of rows with the images of the prompts of `samples`."""
    segments = [None if row is None else [row] for row in rows]
    metas = []
    for row, meta in zip(rows, read_metas(cache, samples), strict=True):
        # A mismatched row may be a filler where its sample is none.
        metas.append({} if row is None else meta)
    own_width = width_with_images(segments, metas, width, vision)
    batch = judged_batch(rows, labels, samples, pad_id, own_width)
    return add_images(batch, segments, metas, vision)


def collate_mismatched(
    cache: TokenCache,
    samples: Sequence[int],
    predecessor_ids: Sequence[int],
    pad_id: int,
    width: int | None,
    max_length: int,
    vision: Vision | None = None,
) -> JudgedBatch:
    """Return the batch of `collate_judged` with its `mismatched` rows.

    Args:
        cache: the token cache.
        samples: samples of the cache; -1 is a filler.
        predecessor_ids: the `order.predecessors` of the samples, whose answers are taken; -1 for
            none. TRL takes the sample before, though it may have the same prompt.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest answer.
        max_length: tokens that a mismatched row may have.
        vision: the model's images; None for a model of text.
    """
    batch = collate_judged(cache, samples, pad_id, width, vision)
    rows = _segments(cache, samples)
    rows_of_predecessors = _segments(cache, predecessor_ids)
    labels = _labels(cache, samples)
    mismatched_rows: list[Segment | None] = []
    for index, (row, other) in enumerate(zip(rows, rows_of_predecessors, strict=True)):
        if row is None or other is None:
            mismatched_rows.append(None)
            labels[index] = None
        else:
            mismatched_rows.append(mismatch(row, other, max_length))
    if vision is None:
        mismatched = judged_batch(mismatched_rows, labels, samples, pad_id, width)
    else:
        mismatched = _judged_batch_with_images(
            cache, mismatched_rows, labels, samples, pad_id, width, vision
        )
    return replace(batch, mismatched=mismatched)


def mismatch(row: Segment, other: Segment, max_length: int) -> Segment:
    """Return the prompt of one row with the answer of another, cut to `max_length` tokens."""
    tokens, learn = row
    other_tokens, other_learn = other
    # A prompt is all that comes before the first target.
    prompt_size = int(learn.argmax())
    other_prompt_size = int(other_learn.argmax())
    answer = other_tokens[other_prompt_size:]
    answer_learn = other_learn[other_prompt_size:]
    joined_tokens = np.concatenate((tokens[:prompt_size], answer))
    joined_learn = np.concatenate((learn[:prompt_size], answer_learn))
    return joined_tokens[:max_length], joined_learn[:max_length]


def placeholder_judged(rows: int, length: int) -> JudgedBatch:
    """Return a placeholder batch of good answers of `length` tokens, all of them targets.

    The numbers of the reference and of the first pass are 0.
    """
    segments = [learned_segment(length)] * rows
    batch = judged_batch(segments, [True] * rows, range(rows), 0, length)
    zeros_B = torch.zeros(rows, dtype=torch.float64)
    # K is 2: see `first_pass` of algorithms.kto.
    numbers_NK = torch.zeros(rows, 2, dtype=torch.float64)
    return replace(batch, reference_B=zeros_B, first=FirstPassNumbers(numbers_NK))


def require_both_labels(train: TokenCache) -> None:
    """Raise DataError if all training rows have the same label."""
    seen = set()
    for sample in range(len(train)):
        seen.add(train.meta(sample)["good"])
        # Usually after a few rows: do not read all.
        if len(seen) == 2:
            return
    label = "false"
    if True in seen:
        label = "true"
    what = f"all {len(train)} training rows have label {label}"
    fix = "add rows with the other label: the algorithm learns from good and bad answers"
    raise DataError(what, where="data.train", fix=fix)


def _segments(cache: TokenCache, samples: Sequence[int]) -> list[Segment | None]:
    """Return the segment of each sample of a cache; None for a filler (-1)."""
    segments: list[Segment | None] = []
    for sample in samples:
        if sample >= 0:
            segments.append(cache.segments(sample)[0])
        else:
            segments.append(None)
    return segments


def _labels(cache: TokenCache, samples: Sequence[int]) -> list[bool | None]:
    """Return whether each answer is good; None for a filler (-1)."""
    labels: list[bool | None] = []
    for sample in samples:
        if sample >= 0:
            labels.append(cache.meta(sample)["good"])
        else:
            labels.append(None)
    return labels

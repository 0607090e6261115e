"""Batches of preference pairs. P pairs, B = 2P rows: those of the chosen answers, then those of the rejected ones. T tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drumline.data.batches import FILLER_WIDTH, TokenBatch, collate
from drumline.data.cache import Segment, TokenCache


@dataclass(frozen=True)
class PairBatch(TokenBatch):
    """A TokenBatch whose row p is the chosen side of a pair and row P + p its rejected one, so no cut parts them.

    Targets are the answers' tokens. `real_P`: fp32, 1 for a pair, 0 for a filler, which weighs nothing. `margin_P`: fp32, NaN where the
    data says none. `reference_B`: fp64, log-probability of each answer under the reference model; None until it is known. `samples_P`:
    int64, numbers of the pairs in their cache, −1 for fillers. `weight`: how many pairs are real.
    """

    real_P: torch.Tensor
    samples_P: torch.Tensor
    margin_P: torch.Tensor
    reference_B: torch.Tensor | None = None

    @property
    def last_B(self) -> torch.Tensor:  # noqa: N802 - as the field of other batches is called
        """int64: place of each row's last token."""
        return self.lengths_B - 1

    def token_weights(self) -> torch.Tensor:
        """[B, T] that add up to a half for each answer, so that a pair is 1."""
        last_BT = self.position_ids_BT == self.last_B[:, None]
        return last_BT * self.real_P.repeat(2)[:, None] / 2


def collate_pairs(cache: TokenCache, samples: Sequence[int], pad_id: int, width: int | None) -> PairBatch:
    """The pairs of `samples` in a cache (−1: a filler), padded to `width` tokens a side, or to the longest side where it is None."""
    pairs = [cache.segments(sample) if sample >= 0 else None for sample in samples]
    metas = [cache.meta(sample) if sample >= 0 else {} for sample in samples]
    return pair_batch(pairs, samples, metas, pad_id, width)


def pair_batch(
    pairs: Sequence[Sequence[Segment] | None], samples: Sequence[int], metas: Sequence[dict[str, Any]], pad_id: int, width: int | None
) -> PairBatch:
    """Of each pair the chosen and the rejected segment; None for a filler."""
    rows = [None if pair is None else pair[side : side + 1] for side in (0, 1) for pair in pairs]
    batch = collate(rows, pad_id, width)
    return PairBatch(
        input_ids_BT=batch.input_ids_BT,
        targets_BT=batch.targets_BT,
        position_ids_BT=batch.position_ids_BT,
        lengths_B=torch.tensor([FILLER_WIDTH if row is None else len(row[0][0]) for row in rows]),
        real_P=torch.tensor([float(pair is not None) for pair in pairs]),
        samples_P=torch.tensor(samples, dtype=torch.int64),
        weight=sum(pair is not None for pair in pairs),
        margin_P=torch.tensor([meta.get("margin", math.nan) for meta in metas], dtype=torch.float32),
    )

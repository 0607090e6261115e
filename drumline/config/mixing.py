"""The keys of `data` that choose rows, their number in an epoch and their order.

`epoch_counts` computes from them how many samples of each source an epoch has. This module does not
import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from drumline.config.section import KIND_ALONE, Count, Section, Short
from drumline.errors import DataError

MOST_REPEATS = 10**4
Repeats = Annotated[float, Field(gt=0, le=MOST_REPEATS)]


class Duplicates(Section):
    kind: Literal["exact", "near"] = Field(
        description="exact: rows with the same content; near: also rows that share most 5-grams."
    )
    threshold: float = Field(
        0.8,
        ge=0.5,
        le=1,
        description="near: from this similarity of 5-grams on (Jaccard, by MinHash).",
    )


class Decontaminate(Section):
    ngram: int = Field(13, gt=0, le=1000, description="Words of an n-gram.")
    overlap: float = Field(
        0.5,
        gt=0,
        le=1,
        description="A training row is left out if it holds this part of an evaluation row's n-grams.",
    )


class Curriculum(Section):
    by: str = Field(min_length=1, description="length (tokens), or a column of numbers.")
    epochs: int = Field(
        1,
        gt=0,
        le=10**6,
        description="Epochs that go from the smallest value up; the ones behind them are shuffled.",
    )
    reverse: bool = Field(False, description="From the largest value down.")


class StreamConfig(Section):
    rows: int = Field(
        65536,
        gt=0,
        le=10**8,
        description="Rows of a block: so many are tokenised together, and shuffled.",
    )
    blocks: int = Field(
        4,
        gt=1,
        le=10**4,
        description="Blocks on the disk at most; those that training has passed are deleted.",
    )


DuplicatesKey = Annotated[Duplicates, KIND_ALONE] | None


def _long_of_true(value: Any) -> Any:
    """Return an empty section for `true`, so that each of its keys has its default."""
    if value is True:
        return {}
    return value


def _long_of_column(value: Any) -> Any:
    """Return the section that orders samples by a column, for the name of the column."""
    if isinstance(value, str):
        return {"by": value}
    return value


DecontaminateKey = Annotated[Decontaminate, Short(_long_of_true, {"const": True})] | None
CurriculumKey = Annotated[Curriculum, Short(_long_of_column, {"type": "string"})] | None
StreamKey = Annotated[StreamConfig, Short(_long_of_true, {"const": True})] | None


class Mixed(Section):
    """The keys of a source that set how many of an epoch's samples come from it."""

    weight: float | None = Field(
        None, ge=0, le=MOST_REPEATS, description="Share of an epoch, relative to the other sources."
    )
    repeats: Repeats | None = Field(
        None,
        description="Samples in an epoch, as a multiple of those of the source (0.5: half of them).",
    )
    cap: Count | None = Field(
        None, description="At most this many samples of this source in an epoch."
    )

    @property
    def mixes(self) -> bool:
        """Whether any of the keys is set."""
        return (self.weight, self.repeats, self.cap) != (None, None, None)


def epoch_counts(
    sources: Sequence[Mixed], sizes: Sequence[int], temperature: float | None
) -> list[int]:
    """Return how many samples of each source an epoch has; `sizes` has the samples of each source.

    A source with `repeats` gets that multiple of its size. The other sources together get as many
    samples as they have. These are shared by weight, else by size^(1/temperature), else by size.
    Samples above the cap of a source go to the sources that are below their caps. Counts are made
    whole by the largest remainder, and ties go to the earlier source.

    Raises:
        DataError: A source with a share of the epoch has no samples, or no source has a share.
    """
    shared = [i for i, source in enumerate(sources) if source.repeats is None]
    shares = _shares(sources, sizes, shared, temperature)
    _require_samples(sources, sizes)
    largest = max((shares[i] for i in shared), default=0.0)
    if not largest and len(shared) == len(sources):
        raise DataError(
            "the weights sum to nothing: no source has a part of an epoch",
            where="data.train",
            fix="give one of them a weight above 0",
        )
    counts = []
    for source, size in zip(sources, sizes, strict=True):
        if source.repeats is None:
            counts.append(0)
        else:
            counts.append(_count_repeated(source, size))
    samples_to_share = sum(sizes[i] for i in shared)
    relative = {i: shares[i] / largest for i in shared if shares[i] > 0}
    caps = {i: _cap(sources[i]) for i in shared}
    for i, count in _share_out(samples_to_share, relative, caps).items():
        counts[i] = count
    return counts


def _cap(source: Mixed) -> float:
    """Return the most samples that a source may have in an epoch; infinite without a cap."""
    return source.cap or math.inf


def _count_repeated(source: Mixed, size: int) -> int:
    """Return how many samples a source with `repeats` has in an epoch; at least one."""
    count = max(1, round((source.repeats or 0) * size))
    return int(min(count, _cap(source)))


def _shares(
    sources: Sequence[Mixed], sizes: Sequence[int], shared: list[int], temperature: float | None
) -> list[float]:
    """Return the relative share of each source in the places that sources without `repeats` share.

    Shares are weights if any source in `shared` has one, else powers of the sizes.
    """
    if any(sources[i].weight is not None for i in shared):
        return [float(source.weight or 0) for source in sources]
    exponent = 1 / (temperature or 1)
    return [size**exponent for size in sizes]


def _require_samples(sources: Sequence[Mixed], sizes: Sequence[int]) -> None:
    """Raise DataError if a source with `repeats` or a weight has no samples."""
    for i, source in enumerate(sources):
        if not sizes[i] and (source.repeats or source.weight):
            raise DataError(
                "has a part of each epoch, and no sample to train on",
                where=f"data.train[{i}]",
                fix="leave the source out, or look at what drops its rows",
            )


def _share_out(places: int, shares: dict[int, float], caps: Mapping[int, float]) -> dict[int, int]:
    """Return how many of `places` each source gets, in proportion to its share and up to its cap.

    The keys are numbers of sources. Places above a cap are shared again among the sources that are
    below their caps.
    """
    counts: dict[int, int] = {}
    below_cap = list(shares)
    while below_cap:
        total = math.fsum(shares[i] for i in below_cap)
        exact = {i: places * shares[i] / total for i in below_cap}
        full = [i for i in below_cap if exact[i] > caps[i]]
        if not full:
            return {**counts, **_whole_numbers(exact, places)}
        for i in full:
            counts[i] = int(caps[i])
            places -= counts[i]
        below_cap = [i for i in below_cap if i not in full]
    return counts


def _whole_numbers(exact: dict[int, float], places: int) -> dict[int, int]:
    """Round exact shares of `places` to whole numbers with the same sum, by the largest remainder.

    Shares of equal remainders go to the earlier source.
    """
    counts = {i: math.floor(value) for i, value in exact.items()}
    left = max(0, places - sum(counts.values()))
    by_remainder = sorted(exact, key=lambda i: counts[i] - exact[i])
    for i in by_remainder[:left]:
        counts[i] += 1
    return counts

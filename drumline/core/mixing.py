"""Which rows are trained on, how often, and in which order: keys of `data`, and how many samples of each source an epoch has. No torch
here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from drumline.core.section import KIND_ALONE, Count, Section, Short
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
DecontaminateKey = (
    Annotated[Decontaminate, Short(lambda value: {} if value is True else value, {"const": True})]
    | None
)
CurriculumKey = (
    Annotated[
        Curriculum,
        Short(lambda value: {"by": value} if isinstance(value, str) else value, {"type": "string"}),
    ]
    | None
)
StreamKey = (
    Annotated[StreamConfig, Short(lambda value: {} if value is True else value, {"const": True})]
    | None
)


class Mixed(Section):
    """How much a source has of an epoch."""

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
        return (self.weight, self.repeats, self.cap) != (None, None, None)


def epoch_counts(
    sources: Sequence[Mixed], sizes: Sequence[int], temperature: float | None
) -> list[int]:
    """Samples of each source in an epoch; `sizes`: those that it has. A source with `repeats` has that multiple of its size. The others
    share as many places as they have samples, by weight, by size^(1/temperature), or by size; what is above a cap goes to the ones below
    theirs. Whole numbers by the largest remainder, ties by the order of the sources. Raises DataError where the parts make no epoch."""
    most = [each.cap or math.inf for each in sources]
    counts = [
        int(min(max(1, round((each.repeats or 0) * size)), cap))
        for each, size, cap in zip(sources, sizes, most, strict=True)
    ]
    shared = [i for i, each in enumerate(sources) if each.repeats is None]
    weighted = any(sources[i].weight is not None for i in shared)
    parts = [
        float(each.weight or 0) if weighted else size ** (1 / (temperature or 1))
        for each, size in zip(sources, sizes, strict=True)
    ]
    for i, each in enumerate(sources):
        if not sizes[i] and (each.repeats or each.weight):
            what = "has a part of each epoch, and no sample to train on"
            raise DataError(
                what,
                where=f"data.train[{i}]",
                fix="leave the source out, or look at what drops its rows",
            )
    largest = max((parts[i] for i in shared), default=0.0)
    if not largest and len(shared) == len(sources):
        fix = "give one of them a weight above 0"
        raise DataError(
            "the weights sum to nothing: no source has a part of an epoch",
            where="data.train",
            fix=fix,
        )
    room, below = sum(sizes[i] for i in shared), [i for i in shared if parts[i] > 0]
    counts = [0 if i in shared else count for i, count in enumerate(counts)]
    while below:
        total = math.fsum(parts[i] / largest for i in below)
        exact = {i: room * (parts[i] / largest) / total for i in below}
        full = [i for i in below if exact[i] > most[i]]
        for i in full:
            counts[i] = int(most[i])
            room -= counts[i]
        below = [i for i in below if i not in full]
        if not full:
            for i in below:
                counts[i] = math.floor(exact[i])
            left = room - sum(counts[i] for i in below)
            for i in sorted(below, key=lambda i: counts[i] - exact[i])[: max(0, left)]:
                counts[i] += 1
            break
    return counts

"""Rows of tokens put together into sequences of one length: whole rows, or a stream of documents that is cut."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def pack(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Groups of whole rows with at most `capacity` tokens each; every row is in exactly one group. Best-fit decreasing (Johnson 1973: at
    most 11/9 of the fewest possible groups, plus 4): rows from the longest down, each into the fullest group with room for it. The distinct
    free rooms are in a sorted list, so a row costs two binary searches: O(n log n). Ties go by row index, so the same lengths give the same
    groups everywhere. Rows in a group, and groups by their first row, are in row order."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return []
    assert sizes.min() > 0 and sizes.max() <= capacity, "rows must fit: truncate first"
    groups: list[list[int]] = []
    rooms: list[int] = []  # distinct free rooms, ascending
    holders: dict[int, list[int]] = {}  # room → groups that have it, last in first out
    order = np.argsort(-sizes, kind="stable")
    for row, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            group, room = len(groups), capacity
            groups.append([row])
        else:
            room = rooms[at]
            group = holders[room].pop()
            groups[group].append(row)
            if not holders[room]:
                del rooms[at], holders[room]
        left = room - size
        if left:
            if left not in holders:
                insort(rooms, left)
                holders[left] = []
            holders[left].append(group)
    for members in groups:
        members.sort()
    groups.sort(key=lambda members: members[0])
    return groups


def cut(starts: Ints, stops: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Sequences of `capacity` tokens, for pretraining: documents are joined end to end, and the stream is cut. Documents are ranges
    [starts, stops) in a token file. Returns `segments` int64[S, 2], ranges of the same file in stream order, and `offsets` int64[N + 1]:
    sequence i is segments offsets[i]..offsets[i + 1]. A document with a cut inside continues as a new segment. Only the last sequence may
    be shorter."""
    ends = np.cumsum(stops - starts)
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return np.zeros((0, 2), np.int64), np.zeros(1, np.int64)
    at = np.union1d(ends, np.arange(0, total, capacity, dtype=np.int64))
    firsts, lasts = at[:-1], at[1:]
    document = np.searchsorted(ends, firsts, side="right")
    shift = starts[document] - (ends[document] - (stops - starts)[document])
    segments = np.stack((firsts + shift, lasts + shift), axis=1)
    offsets = np.searchsorted(firsts, np.arange(0, total, capacity, dtype=np.int64))
    return segments, np.append(offsets, len(segments)).astype(np.int64)

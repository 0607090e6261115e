"""Puts rows of tokens together into sequences of one length.

`pack` joins whole rows; `cut` cuts a stream of documents into pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def pack(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Return groups of whole rows with at most `capacity` tokens each; every row is in one group.

    This is best-fit decreasing (Johnson 1973: at most 11/9 of the fewest possible groups, plus 4):
    rows from the longest down, each into the fullest group with room for it. The distinct free rooms
    are in a sorted list, so a row costs two binary searches: O(n log n). Ties go by row index, so
    the same lengths give the same groups everywhere.

    Args:
        lengths: tokens of each row, from 1 to `capacity`.
        capacity: tokens that a group may have.

    Returns:
        The indices of the rows of each group, ascending. Groups are in the order of their first
        rows.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return []
    assert sizes.min() > 0 and sizes.max() <= capacity, "rows must fit: truncate first"
    groups: list[list[int]] = []
    # Distinct free rooms, ascending.
    rooms: list[int] = []
    # The groups that have each room. The last one is filled first.
    groups_by_room: dict[int, list[int]] = {}
    order = np.argsort(-sizes, kind="stable")
    for row, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        # The smallest room that holds the row.
        at = bisect_left(rooms, size)
        if at == len(rooms):
            group = len(groups)
            groups.append([row])
            left = capacity - size
        else:
            room = rooms[at]
            group = groups_by_room[room].pop()
            groups[group].append(row)
            left = room - size
            if not groups_by_room[room]:
                del rooms[at]
                del groups_by_room[room]
        # A full group takes no further row.
        if left:
            if left not in groups_by_room:
                insort(rooms, left)
                groups_by_room[left] = []
            groups_by_room[left].append(group)
    for members in groups:
        members.sort()
    # No row is in two groups, so their first rows decide.
    groups.sort()
    return groups


def cut(starts: Ints, stops: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Join documents end to end, and cut the stream into sequences of `capacity` tokens.

    This is for pretraining. A document with a cut inside continues as a new segment. Only the last
    sequence may be shorter.

    Args:
        starts: int64[D], where documents start in a token file.
        stops: int64[D], where they stop.
        capacity: tokens of a sequence.

    Returns:
        `segments`, int64[S, 2]: ranges of the same file in stream order. `offsets`, int64[N + 1]:
        sequence i is segments offsets[i]..offsets[i + 1].
    """
    sizes = stops - starts
    # Where each document ends in the stream.
    ends = np.cumsum(sizes)
    total = 0
    if len(ends):
        total = int(ends[-1])
    if not total:
        return np.zeros((0, 2), np.int64), np.zeros(1, np.int64)
    cuts = np.arange(0, total, capacity, dtype=np.int64)
    # In the stream a segment goes from one of these to the next.
    edges = np.union1d(ends, cuts)
    firsts = edges[:-1]
    lasts = edges[1:]
    # The document of each segment. `right`: one that ends at the segment's start is over, and so is
    # an empty one.
    document = np.searchsorted(ends, firsts, side="right")
    begins = ends - sizes
    # From a place in the stream to the place in the file.
    shift = starts[document] - begins[document]
    segments = np.stack((firsts + shift, lasts + shift), axis=1)
    # Every cut is the start of a segment.
    first_segments = np.searchsorted(firsts, cuts)
    offsets = np.append(first_segments, len(segments))
    return segments, offsets.astype(np.int64)

"""Which rank keeps which tensor, where each is kept whole by one."""

from __future__ import annotations


def share(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Name → rank: the largest first, to the least loaded. Every rank comes to the same answer by itself."""
    load = [0] * ranks
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner

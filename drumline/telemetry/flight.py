"""The collectives that ranks have begun, by torch's flight recorder (gloo and NCCL), and where ranks do not agree about them."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault

RECENT = 200  # entries that a rank reports; the recorder keeps 2000
# What ranks bring to these may differ: one of them has all, or each as much as it has.
UNEVEN = {"all_to_all", "alltoall", "alltoall_base", "gather", "scatter", "reduce"}
LEFT_OUT = "has left one out"
Entry = dict[str, Any]  # JSON: library, group, number, op, sizes, dtypes, line, waits


def recent(after: Mapping[str, int] | None = None, most: int = RECENT) -> list[Entry]:
    """This rank's newest collectives, oldest first, but for sends to one rank. May be called from any thread, while another waits in one.

    `after`: of each library the `id` of an entry, after which those of interest were recorded.
    """
    import torch  # the launcher, which reads what ranks report, does without

    from drumline.vendor.torch import dump_flight_recorders

    try:
        dumps = dump_flight_recorders()
    except EnvironmentFault:
        return []  # another torch costs the report of a hang a line, and nothing else
    inner = f"{Path(torch.__file__).parent}/"
    begun = {} if after is None else after
    found: list[tuple[int, Entry]] = []
    for dump in dumps:
        made = pickle.loads(dump)  # noqa: S301 - bytes that torch has made in this process just now
        for raw in made.get("entries", ()):
            entry = _entry(raw, inner)
            if not raw["is_p2p"] and entry["id"] > begun.get(entry["library"], -1):
                found.append((raw["time_created_ns"], entry))
    # Each library has a recorder of its own; numbers of entries are by recorder.
    found.sort(key=lambda each: each[0])
    return [entry for _, entry in found[-most:]]


def newest(entries: Iterable[Entry]) -> dict[str, int]:
    """Return for each library the largest `id` among its entries."""
    ids: dict[str, int] = {}
    for entry in entries:
        ids[entry["library"]] = max(entry["id"], ids.get(entry["library"], -1))
    return ids


def _entry(raw: dict[str, Any], inner: str) -> Entry:
    """`inner`: the folder whose lines are not the user's."""
    ours = [f for f in raw.get("frames", ()) if not f["filename"].startswith(inner)]
    line = f"{ours[0]['filename']}:{ours[0]['line']} in {ours[0]['name']}" if ours else ""
    library, _, operation = raw["profiling_name"].rpartition(":")
    group = " ".join(dict.fromkeys(raw["process_group"]))
    if library == "nccl":
        group = f"{group}, NCCL"  # its half for tensors on the host counts for itself
    return {
        "id": raw["record_id"],
        "library": library,
        "group": group,
        "number": raw["collective_seq_id"],
        "op": operation,
        "sizes": raw["input_sizes"],
        "dtypes": raw["input_dtypes"],
        "line": line,
        # Not by `state`, which is "completed" as well where the host has not come back from the call.
        "waits": not raw["retired"],
    }


def describe(entry: Entry) -> str:
    """all_reduce Float [4, 5] (number 7 of group 0 default_pg) at FILE:LINE in FUNCTION."""
    shapes = ", ".join(
        f"{dtype} {size}" for dtype, size in zip(entry["dtypes"], entry["sizes"], strict=False)
    )
    place = f" at {entry['line']}" if entry["line"] else ""
    return f"{entry['op']} {shapes} (number {entry['number']} of group {entry['group']}){place}"


def _form(entry: Entry) -> tuple[Any, ...]:
    if entry["op"].strip("_") in UNEVEN:
        return (entry["op"],)
    return entry["op"], str(entry["sizes"]), str(sorted(set(entry["dtypes"])))


def first_difference(
    by_rank: Mapping[int, Iterable[Entry]], lines: bool = False
) -> dict[int, Entry] | None:
    """Rank → entry, of the first collective of a group that its ranks do not begin alike: another operation, shape or type. `lines`: other
    places in the code count as well. None where all that more than one rank has begun agree."""
    groups: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, entries in by_rank.items():
        for entry in entries:
            groups.setdefault(entry["group"], {}).setdefault(entry["number"], {})[rank] = entry
    for numbers in groups.values():
        for _, found in sorted(numbers.items()):
            if len({_place(entry) if lines else _form(entry) for entry in found.values()}) > 1:
                return found
    return None


def blame(
    found: Mapping[int, Entry], by_rank: Mapping[int, Iterable[Entry]]
) -> tuple[list[int], str]:
    """The ranks that differ from most (all of them where there is no majority), or the one that has left a collective out, and a line on
    what each rank has begun. `found`: as `first_difference` gives it."""
    each = "; ".join(f"rank {rank}: {describe(entry)}" for rank, entry in sorted(found.items()))
    what = f"the ranks begin different collectives: {each}"
    for rank, entry in found.items():
        for other, theirs in found.items():
            after = [
                e
                for e in by_rank[other]
                if e["group"] == theirs["group"] and e["number"] == theirs["number"] + 1
            ]
            if _place(entry) != _place(theirs) and after and _place(after[0]) == _place(entry):
                return [rank], f"rank {rank} {LEFT_OUT}; {what}"
    places = Counter(map(_place, found.values()))
    (most, count), *rest = places.most_common()
    tied = bool(rest) and rest[0][1] == count
    return sorted(rank for rank, entry in found.items() if tied or _place(entry) != most), what


def _place(entry: Entry) -> tuple[Any, ...]:
    return (*_form(entry), entry["line"])

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
Entry = dict[str, Any]  # JSON: group, number, op, sizes, dtypes, line, waits


def recent(after: int = -1, most: int = RECENT) -> list[Entry]:
    """This rank's newest collectives, oldest first, but for sends to one rank; those recorded after the entry `after` (its `id`). May be
    called from any thread, while another waits in a collective."""
    import torch  # the launcher, which reads what ranks report, does without

    try:
        from drumline.vendor.torch import dump_flight_recorder
    except EnvironmentFault:
        return []  # another torch costs the report of a hang a line, and nothing else
    made = pickle.loads(dump_flight_recorder())  # noqa: S301 - bytes that torch has made in this process just now
    entries = [e for e in made.get("entries", ()) if e["record_id"] > after and not e["is_p2p"]]
    inner = f"{Path(torch.__file__).parent}/"
    return [_entry(entry, inner) for entry in sorted(entries, key=lambda entry: entry["record_id"])[-most:]]


def _entry(raw: dict[str, Any], inner: str) -> Entry:
    """`inner`: the folder whose lines are not the user's."""
    ours = [f for f in raw.get("frames", ()) if not f["filename"].startswith(inner)]
    line = f"{ours[0]['filename']}:{ours[0]['line']} in {ours[0]['name']}" if ours else ""
    return {
        "id": raw["record_id"],
        "group": " ".join(dict.fromkeys(raw["process_group"])),
        "number": raw["collective_seq_id"],
        "op": raw["profiling_name"].rpartition(":")[2],
        "sizes": raw["input_sizes"],
        "dtypes": raw["input_dtypes"],
        "line": line,
        "waits": not raw["retired"],
    }


def describe(entry: Entry) -> str:
    """all_reduce Float [4, 5] (number 7 of group 0 default_pg) at FILE:LINE in FUNCTION."""
    shapes = ", ".join(f"{dtype} {size}" for dtype, size in zip(entry["dtypes"], entry["sizes"], strict=False))
    place = f" at {entry['line']}" if entry["line"] else ""
    return f"{entry['op']} {shapes} (number {entry['number']} of group {entry['group']}){place}"


def _form(entry: Entry) -> tuple[Any, ...]:
    if entry["op"].strip("_") in UNEVEN:
        return (entry["op"],)
    return entry["op"], str(entry["sizes"]), str(sorted(set(entry["dtypes"])))


def first_difference(by_rank: Mapping[int, Iterable[Entry]], lines: bool = False) -> dict[int, Entry] | None:
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


def blame(found: Mapping[int, Entry], by_rank: Mapping[int, Iterable[Entry]]) -> tuple[list[int], str]:
    """The ranks that differ from most (all of them where there is no majority), or the one that has left a collective out, and a line on
    what each rank has begun. `found`: as `first_difference` gives it."""
    each = "; ".join(f"rank {rank}: {describe(entry)}" for rank, entry in sorted(found.items()))
    what = f"the ranks begin different collectives: {each}"
    for rank, entry in found.items():
        for other, theirs in found.items():
            after = [e for e in by_rank[other] if e["group"] == theirs["group"] and e["number"] == theirs["number"] + 1]
            if _place(entry) != _place(theirs) and after and _place(after[0]) == _place(entry):
                return [rank], f"rank {rank} {LEFT_OUT}; {what}"
    places = Counter(map(_place, found.values()))
    (most, count), *rest = places.most_common()
    tied = bool(rest) and rest[0][1] == count
    return sorted(rank for rank, entry in found.items() if tied or _place(entry) != most), what


def _place(entry: Entry) -> tuple[Any, ...]:
    return (*_form(entry), entry["line"])

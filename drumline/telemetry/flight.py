"""The collectives that ranks have begun, by torch's flight recorder (gloo and NCCL), and the first one about which ranks disagree."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault

# Entries that a rank reports; the recorder keeps 2000.
RECENT = 200
# Operations to which ranks may bring different sizes: one of them has all, or each as much as it has.
UNEVEN = {"all_to_all", "alltoall", "alltoall_base", "gather", "scatter", "reduce"}
LEFT_OUT = "has left one out"
# A collective, as JSON: id, library, group, number, op, sizes, dtypes, line, waits.
Entry = dict[str, Any]


def recent(after: Mapping[str, int] | None = None, most: int = RECENT) -> list[Entry]:
    """Return this rank's newest collectives without sends to one rank, oldest first.

    May be called from any thread, while another waits in a collective.
    `after`: library → the `id` of an entry; only collectives after it are returned. `most`: entries.
    """
    # The launcher, which reads what ranks report, does without torch.
    import torch

    from drumline.vendor.torch import dump_flight_recorders

    try:
        dumps = dump_flight_recorders()
    except EnvironmentFault:
        # With another torch the report of a hang lacks a line, and nothing else.
        return []
    inner = f"{Path(torch.__file__).parent}/"
    last_ids = {} if after is None else after
    timed: list[tuple[int, Entry]] = []
    for dump in dumps:
        record = pickle.loads(dump)  # noqa: S301 - bytes that torch has made in this process just now
        for raw in record.get("entries", ()):
            entry = _entry(raw, inner)
            if not raw["is_p2p"] and entry["id"] > last_ids.get(entry["library"], -1):
                timed.append((raw["time_created_ns"], entry))
    # By time: each library has a recorder of its own, which numbers its entries.
    timed.sort(key=itemgetter(0))
    return [entry for _, entry in timed[-most:]]


def newest(entries: Iterable[Entry]) -> dict[str, int]:
    """Return for each library the largest `id` among its entries."""
    ids: dict[str, int] = {}
    for entry in entries:
        ids[entry["library"]] = max(entry["id"], ids.get(entry["library"], -1))
    return ids


def _entry(raw: dict[str, Any], inner: str) -> Entry:
    """Return a collective of the recorder as an entry. `inner`: torch's folder, whose lines are not the user's."""
    line = ""
    for frame in raw.get("frames", ()):
        if not frame["filename"].startswith(inner):
            line = f"{frame['filename']}:{frame['line']} in {frame['name']}"
            break
    library, _, operation = raw["profiling_name"].rpartition(":")
    group = " ".join(dict.fromkeys(raw["process_group"]))
    if library == "nccl":
        # The group's half for tensors on the host counts for itself.
        group = f"{group}, NCCL"
    return {
        "id": raw["record_id"],
        "library": library,
        "group": group,
        "number": raw["collective_seq_id"],
        "op": operation,
        "sizes": raw["input_sizes"],
        "dtypes": raw["input_dtypes"],
        "line": line,
        # Not by `state`, which is "completed" also if the host has not returned from the call.
        "waits": not raw["retired"],
    }


def describe(entry: Entry) -> str:
    """Return `all_reduce Float [4, 5] (number 7 of group 0 default_pg) at FILE:LINE in FUNCTION`, for an entry."""
    tensors = zip(entry["dtypes"], entry["sizes"], strict=False)
    shapes = ", ".join(f"{dtype} {size}" for dtype, size in tensors)
    place = f" at {entry['line']}" if entry["line"] else ""
    return f"{entry['op']} {shapes} (number {entry['number']} of group {entry['group']}){place}"


def _signature(entry: Entry) -> tuple[Any, ...]:
    """Return what ranks must agree on: operation, shapes and types."""
    if entry["op"].strip("_") in UNEVEN:
        return (entry["op"],)
    return entry["op"], str(entry["sizes"]), str(sorted(set(entry["dtypes"])))


def _signature_and_line(entry: Entry) -> tuple[Any, ...]:
    """Return what ranks must agree on, and the line of code."""
    return (*_signature(entry), entry["line"])


def first_difference(
    by_rank: Mapping[int, Iterable[Entry]], lines: bool = False
) -> dict[int, Entry] | None:
    """Return rank → entry, of the first collective of a group that its ranks do not begin alike.

    They differ in operation, shape or type; with `lines` also in the line of code. None if ranks agree on
    all collectives that more than one of them has begun.
    """
    groups: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, entries in by_rank.items():
        for entry in entries:
            numbers = groups.setdefault(entry["group"], {})
            numbers.setdefault(entry["number"], {})[rank] = entry
    key = _signature_and_line if lines else _signature
    for numbers in groups.values():
        for number in sorted(numbers):
            entry_by_rank = numbers[number]
            distinct = {key(entry) for entry in entry_by_rank.values()}
            if len(distinct) > 1:
                return entry_by_rank
    return None


def blame(
    found: Mapping[int, Entry], by_rank: Mapping[int, Iterable[Entry]]
) -> tuple[list[int], str]:
    """Return the ranks to blame for different collectives, and a line on what each rank has begun.

    These are the ranks that differ from most (all of them without a majority), or the one that has left
    a collective out. `found`: as `first_difference` returns it.
    """
    begun = "; ".join(f"rank {rank}: {describe(entry)}" for rank, entry in sorted(found.items()))
    what = f"the ranks begin different collectives: {begun}"
    for rank, entry in found.items():
        for other, peer_entry in found.items():
            if _has_left_out(entry, peer_entry, by_rank[other]):
                return [rank], f"rank {rank} {LEFT_OUT}; {what}"
    ranks_per_form = Counter(_signature_and_line(entry) for entry in found.values())
    (most_common, count), *rest = ranks_per_form.most_common()
    has_majority = not rest or rest[0][1] != count
    blamed = []
    for rank, entry in found.items():
        if not has_majority or _signature_and_line(entry) != most_common:
            blamed.append(rank)
    return sorted(blamed), what


def _has_left_out(entry: Entry, peer_entry: Entry, peer_entries: Iterable[Entry]) -> bool:
    """Return whether a rank has left out a collective: its entry is the one that another rank has next.

    `peer_entry`: of the other rank, with the same number. `peer_entries`: all of that rank's.
    """
    form = _signature_and_line(entry)
    if form == _signature_and_line(peer_entry):
        return False
    for candidate in peer_entries:
        is_same_group = candidate["group"] == peer_entry["group"]
        if is_same_group and candidate["number"] == peer_entry["number"] + 1:
            return form == _signature_and_line(candidate)
    return False

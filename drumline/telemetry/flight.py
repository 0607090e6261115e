"""The collectives that ranks have begun, and the first one about which ranks disagree.

They come from torch's flight recorder, which gloo and NCCL write to. The launcher compares them
when ranks hang.
"""

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
# Operations to which ranks may bring different sizes: one of them has all, or each as much as it
# has.
UNEVEN = {"all_to_all", "alltoall", "alltoall_base", "gather", "scatter", "reduce"}
SKIPPED_ONE = "has left one out"
# A collective, as JSON: id, library, group, number, op, sizes, dtypes, line, and `waits`, whether it
# is not completed yet.
Entry = dict[str, Any]


def recent(after: Mapping[str, int] | None = None, most: int = RECENT) -> list[Entry]:
    """Return this rank's newest collectives without sends to one rank, oldest first.

    It may be called from any thread, also while another waits in a collective.

    Args:
        after: Library → the `id` of an entry, as `largest_ids` returns them. Only later collectives are
            returned.
        most: How many collectives are returned, at most.
    """
    # The launcher, which reads what ranks report, does without torch.
    import torch

    from drumline.vendor.torch import dump_flight_recorders

    try:
        dumps = dump_flight_recorders()
    except EnvironmentFault:
        # With another torch the report of a hang lacks a line, and nothing else.
        return []
    torch_folder = f"{Path(torch.__file__).parent}/"
    if after is None:
        after = {}
    # Each is (nanoseconds, entry).
    timed: list[tuple[int, Entry]] = []
    for dump in dumps:
        record = pickle.loads(dump)  # noqa: S301 - bytes that torch has made in this process just now
        for raw in record.get("entries", ()):
            entry = _entry(raw, torch_folder)
            last_id = after.get(entry["library"], -1)
            is_new = entry["id"] > last_id
            # Sends and receives are left out: ranks do not make the same ones.
            if is_new and not raw["is_p2p"]:
                timed.append((raw["time_created_ns"], entry))
    # By time: each library has a recorder of its own, which numbers its entries.
    timed.sort(key=itemgetter(0))
    newest = timed[-most:]
    return [entry for _, entry in newest]


def largest_ids(entries: Iterable[Entry]) -> dict[str, int]:
    """Return for each library the largest `id` among its entries."""
    ids: dict[str, int] = {}
    for entry in entries:
        library = entry["library"]
        largest = ids.get(library, -1)
        ids[library] = max(entry["id"], largest)
    return ids


def _entry(raw: dict[str, Any], torch_folder: str) -> Entry:
    """Return a collective of the recorder as an entry.

    `torch_folder`: the lines of code in it are not the user's, so the first line outside is shown.
    """
    line = ""
    for frame in raw.get("frames", ()):
        if not frame["filename"].startswith(torch_folder):
            line = f"{frame['filename']}:{frame['line']} in {frame['name']}"
            break
    # "nccl:all_reduce".
    library, _, operation = raw["profiling_name"].rpartition(":")
    # Its name and its description, which may be the same.
    group = " ".join(dict.fromkeys(raw["process_group"]))
    if library == "nccl":
        # A group with a CPU (gloo) and a CUDA (NCCL) backend has a sequence number for each of them.
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
    """Return a collective in words.

    `all_reduce Float [4, 5] (number 7 of group 0 default_pg) at FILE:LINE in FUNCTION`, for
    example.
    """
    tensors = zip(entry["dtypes"], entry["sizes"], strict=False)
    shapes = ", ".join(f"{dtype} {size}" for dtype, size in tensors)
    operation = entry["op"]
    number = entry["number"]
    group = entry["group"]
    text = f"{operation} {shapes} (number {number} of group {group})"
    line = entry["line"]
    if line:
        text += f" at {line}"
    return text


def _signature(entry: Entry) -> tuple[Any, ...]:
    """Return what ranks must agree on: operation, shapes and types."""
    operation = entry["op"]
    if operation.strip("_") in UNEVEN:
        return (operation,)
    sizes = str(entry["sizes"])
    dtypes = sorted(set(entry["dtypes"]))
    return operation, sizes, str(dtypes)


def _signature_and_line(entry: Entry) -> tuple[Any, ...]:
    """Return what ranks must agree on, and the line of code, which may differ."""
    return (*_signature(entry), entry["line"])


def first_difference(
    by_rank: Mapping[int, Iterable[Entry]], lines: bool = False
) -> dict[int, Entry] | None:
    """Return rank → entry, of the first collective of a group that its ranks do not begin alike.

    They differ in operation, shape or type; with `lines` also in the line of code. None if ranks
    agree on all collectives that more than one of them has begun.

    `by_rank`: the collectives of each rank, as `recent` returns them.
    """
    # Group → number of a collective in it → rank → entry. Ranks count the collectives of a group
    # alike, so entries with the same number belong together.
    groups: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, entries in by_rank.items():
        for entry in entries:
            numbers = groups.setdefault(entry["group"], {})
            entry_by_rank = numbers.setdefault(entry["number"], {})
            entry_by_rank[rank] = entry
    signature_of = _signature_and_line if lines else _signature
    for numbers in groups.values():
        for number in sorted(numbers):
            entry_by_rank = numbers[number]
            signatures = {signature_of(entry) for entry in entry_by_rank.values()}
            if len(signatures) > 1:
                return entry_by_rank
    return None


def blame(
    found: Mapping[int, Entry], by_rank: Mapping[int, Iterable[Entry]]
) -> tuple[list[int], str]:
    """Return the ranks to blame for different collectives, and a line on what each rank has begun.

    These are the ranks that differ from most (all of them without a majority), or the one that has
    skipped a collective.

    Args:
        found: The entries of a collective by rank, as `first_difference` returns them.
        by_rank: All collectives of each rank, as they were given to `first_difference`.
    """
    begun = []
    for rank, entry in sorted(found.items()):
        begun.append(f"rank {rank}: {describe(entry)}")
    listed = "; ".join(begun)
    what = f"the ranks begin different collectives: {listed}"
    # Before ranks are counted: one that skipped a collective is to blame even in the majority.
    for rank, entry in found.items():
        for other, peer_entry in found.items():
            if _has_skipped_one(entry, peer_entry, by_rank[other]):
                return [rank], f"rank {rank} {SKIPPED_ONE}; {what}"
    form_of_rank = {rank: _signature_and_line(entry) for rank, entry in found.items()}
    forms = Counter(form_of_rank.values()).most_common()
    most_common, count = forms[0]
    has_majority = True
    if len(forms) > 1:
        _, second_count = forms[1]
        has_majority = second_count != count
    blamed = []
    for rank, form in form_of_rank.items():
        if not has_majority or form != most_common:
            blamed.append(rank)
    return sorted(blamed), what


def _has_skipped_one(entry: Entry, peer_entry: Entry, peer_entries: Iterable[Entry]) -> bool:
    """Return whether a rank has skipped a collective: its number k is number k + 1 of another rank.

    Args:
        entry: The collective of the rank.
        peer_entry: That of the other rank, with the same number.
        peer_entries: All collectives of the other rank.
    """
    form = _signature_and_line(entry)
    if form == _signature_and_line(peer_entry):
        return False
    next_number = peer_entry["number"] + 1
    for candidate in peer_entries:
        is_same_group = candidate["group"] == peer_entry["group"]
        if is_same_group and candidate["number"] == next_number:
            return form == _signature_and_line(candidate)
    return False

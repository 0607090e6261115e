"""Each committed wait of the host has a reason. This needs no stand-in: it reads `counts.json`."""

from __future__ import annotations

from collections import Counter
from fnmatch import filter as matching
from pathlib import Path

from tests.fake_gpu.table import BY_NAME
from tests.fake_gpu.waits import REASONS
from tests.harness import Sections, read_json

COUNTS = Path(__file__).parent / "counts.json"


def committed() -> Sections:
    """Return what is committed of each row."""
    rows: Sections = read_json(COUNTS)["rows"]
    return rows


def test_each_committed_wait_has_one_reason_and_each_reason_its_waits() -> None:
    rows = committed()
    waits = set()
    for name, row in rows.items():
        committed_waits = list(row["waits"])
        for rank in BY_NAME[name].counted_ranks:
            committed_waits += row[rank]["waits"]
        for wait in committed_waits:
            _, _, place = wait.partition(" | ")
            waits.add((name, place))

    explained: Counter[tuple[str, str]] = Counter()
    for reason in REASONS:
        for name in rows:
            if reason.is_of(name):
                explained[name, reason.place] += 1

    assert waits == explained.keys()
    twice = [wait for wait, reasons in explained.items() if reasons > 1]
    assert not twice


def test_each_pattern_is_of_a_row() -> None:
    names = list(committed())
    for reason in REASONS:
        for pattern in reason.rows:
            assert matching(names, pattern), f"{pattern} is of no row"

"""Each committed wait of the host has a reason. This needs no stand-in: it reads `counts.json`."""

from __future__ import annotations

from pathlib import Path

from tests.fake_gpu.waits import REASONS
from tests.harness import read_json

COUNTS = Path(__file__).parent / "counts.json"


def test_each_committed_wait_has_a_reason_and_each_reason_a_wait() -> None:
    places = set()
    for row in read_json(COUNTS)["rows"].values():
        for wait in row["waits"]:
            _, _, place = wait.partition(" | ")
            places.add(place)
    assert places == REASONS.keys()

"""Each committed wait of the host has a reason. This needs no stand-in: it reads `counts.json`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fake_gpu.waits import REASONS

COUNTS = Path(__file__).parent / "counts.json"


def test_each_committed_wait_has_a_reason_and_each_reason_a_wait() -> None:
    rows = json.loads(COUNTS.read_text())["rows"]
    places = set()
    for row in rows.values():
        places |= {wait.partition(" | ")[2] for wait in row["waits"]}
    assert places == REASONS.keys()

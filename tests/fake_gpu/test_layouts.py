"""Ranks of large layouts, each run by itself: the most bytes that torch hands out, against the plan's.

benchmarks/standin_memory.py has more layouts, and docs/explanations/benchmarks.md its table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.standin_memory import TARGET, cases, error, measure
from tests.fake_gpu.running import NEEDS_STAND_IN

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000), NEEDS_STAND_IN]
HELD = [
    "llama-3.1-8b, tp 8",
    "llama-3.1-8b, tp 8, whole stream",
    "llama-3.1-8b, pp 4, 1f1b",
    "llama-3.1-70b, fsdp2 4 × tp 8, full",
]


@pytest.mark.parametrize("name", HELD)
def test_a_rank_takes_what_is_planned(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in cases() if case.name == name]
    (row,) = measure([case], tmp_path, is_traced=False)
    assert "failed" not in row, row["failed"]
    of_formula = error(row, "formula")
    assert of_formula == pytest.approx(0, abs=TARGET), row
    assert error(row, "planned_reserved", "reserved") == pytest.approx(0, abs=3 * TARGET), row

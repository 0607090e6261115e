"""Random kills in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chaos import chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
def test_kills_change_nothing(tmp_path: Path, kills: int) -> None:
    chaos(tmp_path, kills=kills, seed=0)

"""Twenty random kills in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chaos import chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    chaos(tmp_path, kills=20, seed=0)

"""Random kills in one run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.chaos import chaos, one_machine
from tests.harness import start_drumline, start_interpreter


@pytest.mark.full  # plugins/hosts/tests/test_chaos.py kills in CI, too
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "start"), [(4, start_drumline), (20, start_interpreter)])
def test_kills_change_nothing(
    tmp_path: Path, kills: int, start: Callable[..., subprocess.Popen[str]]
) -> None:
    chaos(tmp_path, one_machine(start), kills, 0)

"""The parts of `make gpu` over the stand-in, as on a GPU but for sizes: their commands pass, or say what they need."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS
from tests.fake_gpu.environment import environment
from tests.fake_gpu.running import NEEDS_STAND_IN, end, said, shared_memory, start
from tests.gpu.stand_in import COMPILED_CODE
from tests.harness import read_json

SECONDS_A_PART = 2700
pytestmark = [pytest.mark.full, pytest.mark.timeout(SECONDS_A_PART + 60), NEEDS_STAND_IN]
# Why a command, or one of the runs of a sweep, may be skipped.
REASONS = re.compile(rf"needs {COMPILED_CODE}|\w+ is not installed")
RUNS_IN_EAGER_MODE = {"speed": 3, "memory sweep": 10}


@pytest.mark.parametrize("part", PARTS)
def test_a_parts_commands_pass_but_for_what_the_stand_in_lacks(part: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    output = run_part(part, out, tmp_path / "cache")
    figures = read_json(out)
    assert "H100" in figures["device"], output
    assert figures["runs"], output
    assert REASONS.search(figures["without_trl"])
    for row in figures["runs"]:
        if row["end"] == "skipped":
            assert REASONS.search(row["last"]), row
        else:
            assert row["end"] == "0", f"{row['name']}:\n{row['output'][-8000:]}"
            check_sweep(row)
    if part == "probe":
        check_attention(figures["attention"])


def check_sweep(row: dict[str, object]) -> None:
    """Check that a sweep's runs went to their ends, or say why they did not start."""
    expected = RUNS_IN_EAGER_MODE.get(str(row["name"]))
    if expected is None:
        return
    figures = row["figures"]
    assert isinstance(figures, dict)
    measured = [run for run in figures["runs"] if "skipped" not in run]
    skipped = [run["skipped"] for run in figures["runs"] if "skipped" in run]
    assert len(measured) == expected
    assert all(run["categories"]["peak"]["measured"] > 0 for run in measured)
    assert all(REASONS.search(reason) for reason in skipped)


def check_attention(kernels: dict[str, object]) -> None:
    """Check that the probe saw a GPU's kernels: the stand-in has all but cuDNN's."""
    plain = kernels["plain"]
    assert isinstance(plain, dict)
    assert plain["able"] == ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    (chosen,) = plain["by default"]
    assert "flash" in chosen
    seconds = kernels["first calls, as torch chooses"]
    assert isinstance(seconds, list)
    assert len(seconds) == 20


def run_part(part: str, out: Path, cache: Path) -> str:
    """Run a part over the stand-in to its end; it writes `out`. Return its output.

    `cache`: a folder for what `drumline calibrate` measures, which no later run is to read.
    """
    command = ["benchmarks/gpu.py", part, "--smoke", "--out", out]
    with shared_memory() as meeting:
        env = environment(1, meeting, XDG_CACHE_HOME=cache)
        process = start([*command, "--seconds", SECONDS_A_PART], env)
        try:
            process.wait(SECONDS_A_PART)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{part} ran out of time:\n{said(process)}") from None
        finally:
            end(process)
        return said(process)

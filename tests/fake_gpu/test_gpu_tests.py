"""The tests of tests/gpu over the stand-in: those that it can run pass, the others say what they need."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.fake_gpu.running import NEEDS_STAND_IN, run_python
from tests.gpu.stand_in import COMPILED_CODE, GIGABYTES, KERNELS_THAT_TAKE_TIME
from tests.harness import ROOT

SECONDS_A_FILE = 2700
PATIENCE = 4  # see tests/harness.py
pytestmark = [pytest.mark.full, pytest.mark.timeout(SECONDS_A_FILE + 60), NEEDS_STAND_IN]
# File of tests/gpu → how many devices it gets.
DEVICES = {
    "test_activations.py": 1,
    "test_attention.py": 1,
    "test_calibrate.py": 2,
    "test_context_parallel.py": 2,
    "test_data_parallel.py": 2,
    "test_deepspeed.py": 1,
    "test_fsdp2.py": 1,
    "test_generate.py": 1,
    "test_gpu.py": 2,
    "test_kernels.py": 1,
    "test_losses.py": 1,
    "test_planner.py": 1,
}
# Why a test may be skipped.
REASONS = re.compile(
    rf"needs {COMPILED_CODE}|needs {KERNELS_THAT_TAKE_TIME}|needs {GIGABYTES}|\w+ is not installed"
    r"|could not import|varlen has no soft caps|needs two GPUs"
)


@pytest.mark.parametrize("name", DEVICES)
def test_a_file_passes_but_for_what_the_stand_in_lacks(name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    output = run_file(name, report, tmp_path / "tests")
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert cases, output
    for case in cases:
        assert case.find("failure") is None, output[-8000:]
        assert case.find("error") is None, output[-8000:]
        skipped = case.find("skipped")
        if skipped is not None:
            reason = skipped.get("message", "")
            assert REASONS.search(reason), output[-8000:]


def test_every_file_is_known() -> None:
    there = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert DEVICES.keys() == there


def run_file(name: str, report: Path, base_folder: Path) -> str:
    """Run a file by a pytest over the stand-in, which writes `report`. Return its output."""
    options = ["-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={base_folder}"]
    options += ["-o", f"timeout={SECONDS_A_FILE}"]
    command = ["-m", "pytest", *options, f"tests/gpu/{name}"]
    return run_python(command, DEVICES[name], SECONDS_A_FILE, TEST_PATIENCE=PATIENCE).out

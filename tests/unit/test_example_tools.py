"""The tools of examples/tools: what they compute, and what a program cannot do."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.rl.tools import load_tools
from tests.harness import ROOT
from tests.loopback import until

FOLDER = ROOT / "examples" / "tools"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="run_python needs namespaces"),
]


@pytest.fixture(scope="module")
def tools() -> dict[str, Any]:
    paths = ["tools.py:calculate", "tools.py:run_python"]
    return {tool.name: tool for tool in load_tools(paths, Path(FOLDER), "functions")}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(3 + 4) * 12", "84"), ("36 / 3", "12"), ("-2 ** 3 % 5", "2"), ("7 / 2", "3.5")],
)
def test_the_calculator_computes(tools: dict[str, Any], expression: str, value: str) -> None:
    assert tools["calculate"].call({"expression": expression}) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 1000", "1 / 0", "x", "1 +"])
def test_the_calculator_refuses(tools: dict[str, Any], expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError, SyntaxError)):
        tools["calculate"].call({"expression": expression})


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(6 * 7)", "42"),
        ("pass", "(nothing was printed)"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 2)", "unreachable"),
        ("x = bytearray(2**30)", "MemoryError"),
        ("import time; time.sleep(60)", "error: it took more than 5 seconds"),
        ("import os; os.kill(os.getpid(), 11)", "error: killed by SIGSEGV"),
        ("import sys; sys.exit(255)", "(nothing was printed)"),
        ("import os; print(dict(os.environ).get('HOME'))", "None"),
    ],
)
def test_a_program_has_limits(tools: dict[str, Any], code: str, result: str) -> None:
    assert result in tools["run_python"].call({"code": code})


def test_nothing_that_a_program_starts_outlives_it(tools: dict[str, Any]) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)  # left-behind
    os._exit(0)
print("started")
"""
    assert tools["run_python"].call({"code": code}) == "started"
    until(lambda: not is_running("left-behind"))


def is_running(text: str) -> bool:
    """Return whether the command line of any process has a text."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                return True
    return False

"""Processes of tests: where there is a GPU they are interpreters, since no fork may use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forks
from tests.harness import ENV

SHOW = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["SEEN"], os.getsid(0) == os.getpid(), os.getcwd()]))
print("torch" in sys.modules, file=sys.stderr)
sys.exit(3)
"""


def test_a_process_is_an_interpreter_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "likely_gpus", lambda: 1)
    (tmp_path / "shown.py").write_text(SHOW)
    process = forks.Forked("shown", "a", 1, env={**ENV, "SEEN": "x"}, cwd=tmp_path)
    assert process.wait(60) == process.poll() == 3
    out, err = process.communicate()
    assert json.loads(out) == [["a", "1"], "x", True, str(tmp_path)]
    assert err.strip() == "False", "it has imported nothing that its module does not import"


def test_a_process_that_goes_on_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "likely_gpus", lambda: 1)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    process = forks.Forked("sleeps", env=ENV, cwd=tmp_path)
    assert process.poll() is None
    process.end()
    assert process.returncode == -9

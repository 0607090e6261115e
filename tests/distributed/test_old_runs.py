"""What commit 474a450 left on disk is still read: tests/fixtures/run_474a450 holds a model, rows, token caches and a run of four steps.

Made by `drumline train config.yaml` of that commit in an empty folder, with the rows and the model of tests/harness.py and tests/tiny.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import ROOT, drumline, events

MADE_AT = "/tmp/fx"  # where the run was; its plan.json says so


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The fixture as it would be had it been made in this folder."""
    made = tmp_path / "made"
    shutil.copytree(ROOT / "tests" / "fixtures" / "run_474a450", made)
    plan = made / "run" / "plan.json"
    plan.write_text(plan.read_text().replace(MADE_AT, str(made)))
    return made


def test_it_goes_on(folder: Path) -> None:
    more = ["--resume", "--allow", "run.steps", "run.steps=6"]
    ended = drumline("train", "config.yaml", *more, cwd=folder)
    assert ended.code == 0, ended.err
    assert events(folder / "run", "restore")[-1]["step"] == 4
    assert [e["step"] for e in events(folder / "run", "step")] == [1, 2, 3, 4, 5, 6]


def test_it_is_exported_and_evaluated(folder: Path) -> None:
    ended = drumline("export", "run", "--to", "out", cwd=folder)
    assert ended.code == 0, ended.err
    assert (
        json.loads((folder / "out" / "drumline.json").read_text())["checkpoint"] == "step-00000004"
    )
    ended = drumline(
        "eval", "config.yaml", "--checkpoint", "run/checkpoints/step-00000004", cwd=folder
    )
    assert ended.code == 0, ended.err
    before = events(folder / "run", "eval")[-1]["loss"]
    assert json.loads((folder / "run" / "eval.json").read_text())["held_out"]["metrics"][
        "loss"
    ] == pytest.approx(before, rel=1e-5)

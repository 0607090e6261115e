"""What commit 474a450 left on disk is still read: tests/fixtures/run_474a450 holds a model, rows,
token caches and a run of four steps.

Made by `drumline train config.yaml` of that commit in an empty folder, with the rows and the model
of tests/harness.py and tests/tiny.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness import ROOT, column, events, read_json, run_drumline

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
    run_drumline("train", "config.yaml", *more, cwd=folder)
    run = folder / "run"
    assert events(run, "restore")[-1]["step"] == 4
    assert column(run, "step") == [1, 2, 3, 4, 5, 6]


def test_it_is_exported_and_evaluated(folder: Path) -> None:
    run_drumline("export", "run", "--to", "out", cwd=folder)
    exported = read_json(folder / "out" / "drumline.json")
    assert exported["checkpoint"] == "step-00000004"
    saved = "run/checkpoints/step-00000004"
    run_drumline("eval", "config.yaml", "--checkpoint", saved, cwd=folder)
    before = events(folder / "run", "eval")[-1]["loss"]
    metrics = read_json(folder / "run" / "eval.json")["held_out"]["metrics"]
    assert metrics["loss"] == pytest.approx(before, rel=1e-5)

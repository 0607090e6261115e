"""The study of Optuna: it goes on from its file, and refuses other keys."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from drumline.config.run import EvalConfig
from drumline.errors import EnvironmentFault, UserError
from drumline_sweep.axes import Axis, Point, axes_of
from drumline_sweep.optuna_study import Study
from drumline_sweep.trials import Outcome, Trial

AXES = axes_of(["optimizer.lr=log:1e-6..1e-2", "schedule=cosine,linear"])


def study_of(folder: Path, number: int, axes: tuple[Axis, ...] = AXES) -> Study:
    return Study(folder, axes, number, EvalConfig(), seed=0)


def finished(point: Point) -> Outcome:
    """Return the outcome of a trial whose best learning rate is 1e-4."""
    rate = float(dict(point)["optimizer.lr"])
    value = (math.log10(rate) + 4) ** 2
    return Outcome(Trial(point, Path("trial")), "finished", value)


def test_a_study_goes_on_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    study = study_of(tmp_path, 6)
    known = []
    for number, point in enumerate(study.points()):
        known.append(point)
        # The sweep is killed during trial 3.
        if number != 3:
            study.tell([finished(point)], point)

    again = list(study_of(tmp_path, 8).points())
    assert again[:6] == known, "the known ones come first"
    assert len(set(again)) == 8
    states = [trial.state.name for trial in study.study.get_trials()]
    assert states[2:5] == ["COMPLETE", "RUNNING", "COMPLETE"]
    with pytest.raises(UserError, match="of other keys"):
        list(study_of(tmp_path, 8, AXES[:1]).points())


def test_a_point_fails_with_one_of_its_seeds(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    study = study_of(tmp_path, 1)
    (point,) = study.points()
    good = finished(point)
    study.tell([good, None], point)
    assert study.study.get_trials()[0].state.name == "RUNNING", "a seed still trains"
    failed = Outcome(good.trial, "failed")
    study.tell([good, failed], point)
    assert study.study.get_trials()[0].state.name == "FAIL"


def test_without_optuna_it_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(EnvironmentFault) as error:
        study_of(tmp_path, 1)
    line = "--optuna: the package optuna is missing — pip install 'drumline-sweep[optuna]'"
    assert error.value.line() == line

"""What a sweep tries, what is refused before anything starts, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.config.run import EvalConfig
from drumline.errors import UserError
from drumline_sweep.axes import overrides_of
from drumline_sweep.plan import Options, Sweep
from drumline_sweep.results import groups_of, rows_of
from drumline_sweep.sweep import run_sweep
from drumline_sweep.trials import Outcome, Trial, outcome
from tests.harness import write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path / "model", run={"device": "cpu"})


def numbers(first: int, last: int) -> str:
    """Return whole numbers with commas between them."""
    return ",".join(map(str, range(first, last)))


def claim(config: Path, folder: Path, *given: str) -> None:
    Sweep(config, list(given), Options(to=folder)).claim()


def dry_run(config: Path, folder: Path, *given: str) -> int:
    return run_sweep(config, list(given), Options(to=folder, dry_run=True))


def test_a_note_says_that_there_are_fewer_points_than_requested(
    config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = Sweep(config, ["batch.micro_batch=1..4"], Options(random=20))
    assert len(many.points()) == 4
    note = "note: --random 20: there are 4 different points"
    assert note in capsys.readouterr().err

    enough = Sweep(config, ["optimizer.lr=1,2"], Options(random=2))
    assert len(enough.points()) == 2
    assert not capsys.readouterr().err


@pytest.mark.claim("a sweep refuses a key that is none before anything starts")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["optimizer.lrr=1,2"], "unknown key 'lrr' — did you mean 'lr'"),
        (["learning_rate=1,2"], "did you mean 'optimizer.lr'"),
        (["optimizer.lr=1,fast"], "'fast' given, a number is wanted"),
        (["optimizer.lr"], "no key with values"),
        (["=1,2"], "no key with values"),
        (["optimizer.lr=1,,2"], "a value is empty"),
        (["optimizer.lr=1,1"], "stands twice"),
        (["optimizer.lr=1,2", "optimizer.lr=3"], "stands twice"),
        (["optimizer.lr=1e-3..1e-5"], "no range"),
        (["optimizer.lr=log:0..1"], "no range"),
        (["optimizer.lr=1e-5..1e-3"], "a grid needs values"),
        (["optimizer.lr=-1..1"], "greater than 0"),
        (["optimizer.lr=.nan,1"], "finite"),
        (["run.dir=a,b"], "cannot be swept"),
        (["launch.kind=ssh,local"], "--on slurm"),
        (["run.seed=0..9"], "write seeds out"),
        (["optimizer.lr=1e-3"], "nothing to sweep over"),
        (["optimizer.lr=[1,2"], "not readable as YAML"),
        (
            [f"run.steps={numbers(1, 200)}", f"run.seed={numbers(0, 200)}"],
            "of at most",
        ),
        (
            [f"run.steps={numbers(1, 200)}", f"data.max_length={numbers(2, 200)}"],
            "of at most",
        ),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_a_line_before_anything_starts(
    config: Path,
    given: list[str],
    says: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    with pytest.raises(UserError) as found:
        dry_run(config, folder, *given)
    assert says in found.value.line()
    assert not folder.exists()


def test_seeds_alone_are_not_drawn(config: Path) -> None:
    for options in (Options(random=3), Options(optuna=3)):
        with pytest.raises(UserError, match="nothing to draw but seeds"):
            Sweep(config, ["run.seed=0,1"], options)
    with pytest.raises(UserError, match="cannot be combined"):
        Sweep(config, ["optimizer.lr=1,2"], Options(random=3, optuna=3))


def test_another_folder_is_refused(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    file = folder / "x"
    file.write_text("mine")
    for place in (folder, file):
        with pytest.raises(UserError, match="not a sweep"):
            claim(config, place, "optimizer.lr=1,2")


def test_another_config_is_refused(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    claim(config, folder, "optimizer.lr=1,2")
    claim(config, folder, "optimizer.lr=3,4", "run.seed=1,2")
    says = "of another config: data.max_length 96 → 64 — name another"
    with pytest.raises(UserError, match=says):
        claim(config, folder, "optimizer.lr=1,2", "data.max_length=64")


def test_a_trial_of_another_key_is_no_trial_of_this_sweep(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "one"
    claim(config, folder, "eval.every=1,2")
    claim(config, folder, "optimizer.lr=1,2")
    claim(config, folder, "eval.every=2,3", "run.seed=0,1")
    says = r"every=… is eval\.every there, and checkpoint\.every here — name another"
    for is_dry in (True, False):
        options = Options(to=folder, dry_run=is_dry)
        with pytest.raises(UserError, match=says):
            run_sweep(config, ["checkpoint.every=1,2"], options)
    # Two keys with the same last part have their whole names.
    claim(config, folder, "checkpoint.every=1,2", "eval.every=1,2")

    # The file of an earlier version has no keys.
    file = folder / "sweep.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({"config": state["config"]}))
    assert dry_run(config, folder, "eval.every=1,2") == 0
    assert "2 trials" in capsys.readouterr().out


def outcomes_of(sweep: Sweep, values: list[float | None]) -> list[Outcome]:
    """Return an outcome for each trial of a grid; None: the trial failed."""
    found = []
    trials = sweep.trials(sweep.points())
    for trial, value in zip(trials, values, strict=True):
        state = "finished"
        if value is None:
            state = "failed"
        found.append(
            Outcome(
                trial,
                state,
                value,
                at=4,
                seconds=1.0,
                tokens_per_s=10.0,
                reason="out of memory",
            )
        )
    return found


def test_the_table_is_grouped_over_seeds_and_the_best_is_first(
    config: Path,
    tmp_path: Path,
) -> None:
    options = Options(to=tmp_path / "sweep")
    sweep = Sweep(config, ["optimizer.lr=1,2,3", "run.seed=0,1"], options)
    outcomes = outcomes_of(sweep, [3.0, 5.0, 1.0, None, None, None])
    first = outcomes[0].trial
    second = outcomes[1].trial
    assert overrides_of(first.point) == ["optimizer.lr=1", "run.seed=0"]
    assert overrides_of(second.point) == ["optimizer.lr=1", "run.seed=1"]

    head, *rows = rows_of(sweep, groups_of(outcomes, "min"))
    assert head == ["", "lr", "loss", "min to max", "seeds", "seconds", "tokens/s"]
    assert rows == [
        ["1", "2", "1", "1 to 1", "1 of 2", "1", "10"],
        ["2", "1", "4", "3 to 5", "2 of 2", "1", "10"],
        ["–", "3", "failed", "", "", "", ""],
    ]
    _, *rows = rows_of(sweep, groups_of(outcomes, "max"))
    assert [row[1] for row in rows] == ["1", "2", "3"]


def test_without_seeds_the_table_has_the_step(config: Path, tmp_path: Path) -> None:
    options = Options(to=tmp_path / "sweep")
    sweep = Sweep(config, ["optimizer.lr=1,2"], options)
    outcomes = outcomes_of(sweep, [3.0, None])
    rows = rows_of(sweep, groups_of(outcomes, "min"))
    assert rows == [
        ["", "lr", "loss", "step", "seconds", "tokens/s"],
        ["1", "1", "3", "4", "1", "10"],
        ["–", "2", "failed", "", "", ""],
    ]


def test_a_trial_that_was_stopped_before_its_plan_has_not_failed(tmp_path: Path) -> None:
    trial = Trial((), tmp_path / "a")
    options = EvalConfig()
    assert outcome(trial, options, None).state == "not started"
    assert outcome(trial, options, 75).state == "not started"
    assert outcome(trial, options, 1).state == "failed"

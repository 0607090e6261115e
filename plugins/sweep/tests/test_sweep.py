"""Sweeps: what is tried, what is refused before anything starts, and what a table says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from drumline.config.run import EvalConfig
from drumline.errors import UserError
from drumline.telemetry.events import Eval, Step
from drumline_sweep.axes import axes_of, folder_name, overrides_of, points, short_names, split
from drumline_sweep.sweep import Options, Sweep, groups_of, rows_of, sweep
from drumline_sweep.trials import Outcome, Trial, best, outcome
from tests.harness import write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path / "model", run={"device": "cpu"})


def step(number: int, **values: Any) -> Step:
    return Step(**{**dict.fromkeys(Step.names(), 1.0), "step": number, **values})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,3e-5", ["1e-5", "3e-5"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{kind: lora, r: 4}, none", ["{kind: lora, r: 4}", "none"]),
        ("\"a,b\",'c,d'", ['"a,b"', "'c,d'"]),
        ("it's,that's", ["it's", "that's"]),
        ("[a, {b: [1,2]}],x", ["[a, {b: [1,2]}]", "x"]),
        ("", [""]),
        (",", ["", ""]),
    ],
)
def test_commas_within_brackets_and_quotes_part_nothing(text: str, values: list[str]) -> None:
    assert split(text) == values


def test_a_grid_is_all_combinations_and_draws_are_the_first_of_more() -> None:
    axes = axes_of(["optimizer.lr=1e-5,3e-5", "data.max_length=64,128,256"])
    assert len(list(points(axes, None, 0))) == 6
    drawn = axes_of(
        ["optimizer.lr=log:1e-6..1e-3", "batch.micro_batch=1..4", "schedule=cosine,linear"]
    )
    five, three = list(points(drawn, 5, 7)), list(points(drawn, 3, 7))
    assert five[:3] == three and len({*five}) == 5 and five != list(points(drawn, 5, 8))
    many = [dict(point) for point in points(drawn, 400, 0)]
    rates = [float(point["optimizer.lr"]) for point in many]
    assert (
        min(rates) >= 1e-6
        and max(rates) <= 1e-3
        and abs(sum(math.log10(rate) < -4.5 for rate in rates) / 400 - 0.5) < 0.1
    )
    assert {point["batch.micro_batch"] for point in many} == {"1", "2", "3", "4"}
    assert len(list(points(axes, 100, 0))) == 6, "there are no more"


@pytest.mark.parametrize(
    "ends",
    [
        "0.999..0.99999",
        "100000.5..100001.5",
        "-3e-7..2.5e-7",
        "log:0.999..0.99999",
        "0..0.12345678",
    ],
)
def test_what_is_drawn_lies_in_the_range_and_differs(ends: str) -> None:
    low, high = map(float, ends.removeprefix("log:").split(".."))
    drawn = [float(point[0][1]) for point in points(axes_of([f"optimizer.beta2={ends}"]), 200, 0)]
    assert len({*drawn}) == 200 and low <= min(drawn) and max(drawn) <= high


def test_fewer_points_than_were_asked_for_are_said(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(Sweep(config, ["batch.micro_batch=1..4"], Options(20)).points()) == 4
    assert "note: --random 20: there are 4 different points" in capsys.readouterr().err
    assert (
        len(Sweep(config, ["optimizer.lr=1,2"], Options(2)).points()) == 2
        and not capsys.readouterr().err
    )


def test_names_of_folders_are_names(tmp_path: Path) -> None:
    axes = axes_of(
        [
            "optimizer.lr=1e-5,3e-5",
            "schedule={kind: cosine, warmup_steps: 1},../../etc",
            "model.id=a/b,ü,<script>",
        ]
    )
    names = [folder_name(point, short_names(axes)) for point in points(axes, None, 0)]
    assert len({*names}) == 12 and all(
        "/" not in name and len(name) < 120 and name.isascii() for name in names
    )
    assert folder_name((("run.seed", "1"),), {"run.seed": "seed"}) == "seed=1"


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
        (["--random", "run.seed=0,1"], "nothing to draw but seeds"),
        (["optimizer.lr=1e-3"], "nothing to sweep over"),
        (["optimizer.lr=[1,2"], "not readable as YAML"),
        (
            [
                "run.steps=" + ",".join(map(str, range(1, 200))),
                "run.seed=" + ",".join(map(str, range(200))),
            ],
            "of at most",
        ),
        (
            [
                "run.steps=" + ",".join(map(str, range(1, 200))),
                "data.max_length=" + ",".join(map(str, range(2, 200))),
            ],
            "of at most",
        ),
    ],
)
@pytest.mark.slow
def test_what_is_wrong_is_a_line_before_anything_starts(
    config: Path, given: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as found:
        draw = 3 if given[0] == "--random" else None
        sweep(
            config,
            [each for each in given if each != "--random"],
            Options(draw, to=tmp_path / "sweep", dry_run=True),
        )
    assert says in found.value.line() and not (tmp_path / "sweep").exists()


def test_another_folder_and_another_config_are_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    for place in (tmp_path / "mine", tmp_path / "mine" / "x"):
        with pytest.raises(UserError, match="not a sweep"):
            Sweep(config, ["optimizer.lr=1,2"], Options(to=place)).claim()
    Sweep(config, ["optimizer.lr=1,2"], Options(to=tmp_path / "one")).claim()
    Sweep(config, ["optimizer.lr=3,4", "run.seed=1,2"], Options(to=tmp_path / "one")).claim()
    with pytest.raises(
        UserError, match=r"of another config: data.max_length 96 → 64 — name another"
    ):
        Sweep(
            config, ["optimizer.lr=1,2", "data.max_length=64"], Options(to=tmp_path / "one")
        ).claim()


def test_a_trial_of_another_key_is_no_trial_of_this_sweep(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "one"
    for given in (["eval.every=1,2"], ["optimizer.lr=1,2"], ["eval.every=2,3", "run.seed=0,1"]):
        Sweep(config, given, Options(to=to)).claim()
    for dry_run in (True, False):
        with pytest.raises(
            UserError,
            match=r"every=… is eval\.every there, and checkpoint\.every here — name another folder with --to",
        ):
            sweep(config, ["checkpoint.every=1,2"], Options(to=to, dry_run=dry_run))
    Sweep(
        config, ["checkpoint.every=1,2", "eval.every=1,2"], Options(to=to)
    ).claim()  # which have their whole names
    state = json.loads((to / "sweep.json").read_text())
    (to / "sweep.json").write_text(json.dumps({"config": state["config"]}))  # of an earlier version
    assert (
        sweep(config, ["eval.every=1,2"], Options(to=to, dry_run=True)) == 0
        and "2 trials" in capsys.readouterr().out
    )


def test_the_best_of_a_run_is_held_out_and_never_the_untrained_one() -> None:
    least, most = EvalConfig(metric="loss"), EvalConfig(metric="loss", mode="max")
    seen = ((0, 0.1), (2, 1.5), (4, 1.2), (6, None))
    evals = [
        Eval(step=number, samples=1, seconds=0.0, metrics={"loss": loss}) for number, loss in seen
    ]
    assert best([*evals, step(6, loss=0.5)], least) == (1.2, 4) and best(evals, most) == (1.5, 2)
    assert best([step(number, loss=float(number)) for number in range(1, 31)], least) == (
        29.0,
        30,
    ), "the mean of the last tenth"
    ended = [step(number, loss=1.0 if number < 4 else None) for number in range(1, 31)]
    assert best(ended, least) == (None, None) and best(ended[:3], least) == (1.0, 3), (
        "a run that diverged has none"
    )
    assert best([], least) == (None, None) and best([step(1, loss=None)], least) == (None, None)
    assert best([evals[3], step(6, loss=0.5)], least) == (None, None), (
        "a held-out NaN is not made good by training"
    )


def test_the_table_is_grouped_over_seeds_and_the_best_is_first(
    config: Path, tmp_path: Path
) -> None:
    made = Sweep(config, ["optimizer.lr=1,2,3", "run.seed=0,1"], Options(to=tmp_path / "sweep"))
    trials = [made.trial(point, seed) for point in made.points() for seed in made.seeds]
    assert [overrides_of(trial.point) for trial in trials[:2]] == [
        ["optimizer.lr=1", f"run.seed={seed}"] for seed in "01"
    ]
    values = [3.0, 5.0, 1.0, None, None, None]
    seen = [
        Outcome(t, "finished" if v else "failed", v, 4, 1.0, 10.0, "out of memory")
        for t, v in zip(trials, values, strict=True)
    ]
    rows = rows_of(made, groups_of(seen, "min"))
    assert [row[:5] for row in rows[1:]] == [
        ["1", "2", "1", "1 to 1", "1 of 2"],
        ["2", "1", "4", "3 to 5", "2 of 2"],
        ["–", "3", "failed", "", ""],
    ]
    assert [row[1] for row in rows_of(made, groups_of(seen, "max"))[1:]] == ["1", "2", "3"]


def test_optuna_goes_on_where_it_was(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra sweep is not installed")
    from drumline_sweep.optuna_study import Study

    axes = axes_of(["optimizer.lr=log:1e-6..1e-2", "schedule=cosine,linear"])
    made = Sweep(
        config,
        ["optimizer.lr=log:1e-6..1e-2", "schedule=cosine,linear"],
        Options(optuna=6, to=tmp_path),
    )

    def value(point: Any) -> float:
        return (math.log10(float(dict(point)["optimizer.lr"])) + 4) ** 2

    study, known = Study(tmp_path, axes, 6, made.eval, 0), []
    for number, point in enumerate(study.points()):
        known.append(point)
        if number != 3:  # whose sweep was killed
            study.tell([Outcome(made.trial(point, ()), "finished", value(point))], point)
        if number == 4:
            study.tell([Outcome(made.trial(point, ()), "failed")], point)
    again = list(Study(tmp_path, axes, 8, made.eval, 0).points())
    assert again[:6] == known and len({*again}) == 8, "what was begun first, then new ones"
    assert study.study.get_trials()[3].state.name == "RUNNING"
    with pytest.raises(UserError, match="of other keys"):
        list(Study(tmp_path, axes[:1], 8, made.eval, 0).points())


def test_a_trial_that_was_stopped_before_its_plan_has_not_failed(tmp_path: Path) -> None:
    trial = Trial({}, tmp_path / "a")
    assert [outcome(trial, EvalConfig(), code).state for code in (None, 75, 1)] == [
        "not started",
        "not started",
        "failed",
    ]

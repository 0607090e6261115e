"""`drumline compare`: sides, keys, curves, and what seeds can tell."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from drumline.config.load import load_text
from drumline.errors import UserError
from drumline.report.compare import Verdict, compare, judge, sides, welch
from drumline.report.curves import groups
from drumline.report.facts import RunFacts
from drumline.report.sections import _key_numbers
from drumline.telemetry.events import Eval, Event
from tests.unit.report_runs import start, step, write_run


@pytest.mark.claim("seeds tell a difference from chance by Welch's test")
def test_welch() -> None:
    # scipy.stats.ttest_ind(..., equal_var=False).pvalue
    assert welch([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0, 10.0]) == pytest.approx(
        0.069133593, abs=1e-8
    )
    assert welch([1.0], [2.0, 3.0]) is None and welch([1.0, 1.0], [2.0, 2.0]) is None


def test_rounding_has_no_winner() -> None:
    def verdict(other: float) -> str:
        return Verdict("loss", ([2.0], [other]), -1, None).winner

    assert verdict(2.0) == "alike" and verdict(2.0 + 1.9e-5) == "alike"
    assert verdict(2.0 + 2.1e-5) == "A ahead, untested" and verdict(1.9) == "B ahead, untested"


def test_seeds_are_sides_and_the_better_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = [write_run(tmp_path / f"a/{seed}", seed=seed, shift=seed / 100) for seed in (0, 1, 2)]
    b = [
        write_run(tmp_path / f"b/{seed}", seed=seed, lr=2e-3, shift=seed / 100 - 0.5, steps=16)
        for seed in (0, 1, 2)
    ]
    one, other = sides([*a, *b])
    assert [len(one), len(other)] == [3, 3] and [
        run.folder for run in sides([tmp_path / "a", tmp_path / "b"])[1]
    ] == b
    verdicts, last = judge(one, other)
    loss = next(each for each in verdicts if each.name == "loss")
    assert (
        last == 16
        and loss.winner == "B"
        and loss.p < 0.01
        and loss.difference == pytest.approx(-0.5)
    )
    assert next(each for each in verdicts if each.name == "learning rate").winner == "–"
    monkeypatch.setenv("COLUMNS", "80")
    compare([tmp_path / "a", tmp_path / "b"])
    shown = capsys.readouterr().out
    assert (
        "optimizer.lr" in shown
        and "n = 3 and 3" in shown
        and "run.seed" not in shown
        and max(map(len, shown.splitlines())) <= 80
    )
    compare([a[0], b[0]])
    assert "no test is possible" in capsys.readouterr().out


def test_a_section_of_another_kind_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *overrides: str) -> Path:
        folder = write_run(tmp_path / name)
        plan = json.loads((folder / "plan.json").read_text())
        plan["config"] = load_text("data: a.jsonl\n", [*overrides, f"run.dir={folder}"]).model_dump(
            mode="json"
        )
        (folder / "plan.json").write_text(json.dumps(plan))
        return folder

    a = run("a", "strategy=ddp")
    b = run(
        "b",
        "strategy={kind: fsdp2, offload: cpu, tp: 2}",
        "adapter={kind: lora, r: 8}",
        "run.profile={}",
    )
    monkeypatch.setenv("COLUMNS", "80")
    compare([a, b])
    shown = capsys.readouterr().out
    table = shown.partition("curves up to")[0].rpartition("──")[2]
    keys = [line.split(maxsplit=2) for line in map(str.strip, table.splitlines()) if line]
    assert keys == [
        ["strategy", "ddp", "fsdp2, offload cpu"],
        ["strategy.tp", "1", "2"],
        ["adapter", "none", "lora, r 8"],
        ["run.profile", "null", "defaults"],
    ]


def test_no_name_breaks_inside_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [tmp_path / side for side in "ab"]
    for number, side in enumerate(sides):
        for seed in (0, 1):
            metrics = {"token_accuracy": 0.5, "a_metric_of_a_long_name": 1.0 + seed / 7}
            steps = [
                step(each, 12345.678 + seed / 3 + number, metrics=metrics) for each in range(1, 5)
            ]
            write_run(side / str(seed), seed=seed, lr=1e-3 + number, events=[start(4), *steps])
    monkeypatch.setenv("COLUMNS", "80")
    compare(sides)
    shown = capsys.readouterr().out
    assert (
        "a_metric_of_a_long_name" in shown
        and "not shown" in " ".join(shown.split())
        and "optimizer.lr" in shown
    )
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("steps", "named"), [((0, 3, 6), True), ((0, 6), False)])
def test_held_out_values_are_compared_at_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: tuple[int, ...], named: bool
) -> None:
    def run(name: str, evaluated: tuple[int, ...], last: int) -> Path:
        evals = [
            Eval(step=number, samples=1, seconds=0.1, metrics={"loss": 5.0 - number})
            for number in evaluated
        ]
        return write_run(
            tmp_path / name,
            events=[start(last), *evals, *(step(number) for number in range(1, last + 1))],
        )

    a, b = run("a", steps, 6), run("b", (0, 3), 3)
    verdicts, last = judge([RunFacts(a)], [RunFacts(b)])
    found = [each.values for each in verdicts if each.name == "held out: loss"]
    assert last == 3 and found == [([2.0], [2.0])] * named
    compare([a, b])
    assert ("not compared" in "".join(capsys.readouterr())) != named


def test_repeats_of_a_seed_are_one_value(tmp_path: Path) -> None:
    a = [write_run(tmp_path / f"a/{number}", seed=0, shift=number / 1e4) for number in range(2)]
    b = [
        write_run(tmp_path / f"b/{number}", seed=0, lr=2e-3, shift=number / 1e4 - 0.5)
        for number in range(2)
    ]
    one, other = sides([*a, *b])
    verdicts, _ = judge(one, other)
    assert len(one) == 2 and all(each.p is None for each in verdicts), "no test of one seed"
    assert groups(one) == [[0], [1]] and groups(
        [*one, RunFacts(write_run(tmp_path / "c", seed=1))]
    ) == [[0, 2], [1]]


def test_runs_without_steps_and_wrong_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, empty = write_run(tmp_path / "a"), write_run(tmp_path / "empty", events=[])
    compare([a, empty])
    assert "nothing can be compared" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"differ in run\.seed only"):
        sides([a])
    with pytest.raises(UserError, match="no such folder"):
        sides([a, tmp_path / "none"])
    with pytest.raises(UserError, match="no run folder"):
        (tmp_path / "void").mkdir()
        sides([a, tmp_path / "void"])


def diverged(ends: int = 3, loss: float = 1.0, steps: int = 10) -> list[Event]:
    """A run of `steps` whose losses are no numbers after step `ends`."""
    return [
        start(steps),
        *(step(each, loss if each <= ends else math.nan) for each in range(1, steps + 1)),
    ]


def test_a_run_that_ended_without_a_number_is_not_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worse, lost = (
        write_run(tmp_path / "worse", events=diverged(10, 2.0)),
        write_run(tmp_path / "lost", events=diverged()),
    )
    never = write_run(tmp_path / "never", events=diverged(0))
    for other in (lost, never):
        for name, pair in (("A", [worse, other]), ("B", [other, worse])):
            verdicts, last = judge(*([RunFacts(each)] for each in pair))
            loss = next(each for each in verdicts if each.name == "loss")
            assert last == 10 and loss.winner == f"{name}: {'AB'.replace(name, '')} has no number"
    assert next(
        each for each in judge([RunFacts(lost)], [RunFacts(never)])[0] if each.name == "loss"
    ).winner.startswith("neither")
    monkeypatch.setenv("COLUMNS", "120")
    compare([worse, lost])
    assert "loss 2 no number A: B has no number" in " ".join(capsys.readouterr().out.split())
    numbers = _key_numbers(RunFacts(lost))
    assert numbers["steps"] == "10 of 10" and numbers["training"] == "loss 1 → no number"


def test_a_step_that_is_done_again_without_a_number_has_none(tmp_path: Path) -> None:
    events = [*diverged(6, steps=6), step(5, math.nan), step(6, math.inf)]
    assert RunFacts(write_run(tmp_path / "a", events=events)).curves["loss"] == [
        (each, 1.0) for each in range(1, 5)
    ]

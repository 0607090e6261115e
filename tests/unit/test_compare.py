"""`drumline compare`: sides, keys, curves, and what seeds can tell."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from drumline.config.load import load_text
from drumline.errors import UserError
from drumline.report.compare import CurveComparison, compare, judge, sides, welch
from drumline.report.curves import seed_groups
from drumline.report.facts import RunFacts
from drumline.report.sections import _key_numbers
from drumline.telemetry.events import Eval, Event
from tests.unit.report_runs import start, step, write_run

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def find_verdict(verdicts: list[CurveComparison], name: str) -> CurveComparison:
    (found,) = [verdict for verdict in verdicts if verdict.name == name]
    return found


def capture_comparison(
    columns: int,
    folders: list[Path],
    capsys: Capture,
    monkeypatch: Patch,
) -> str:
    """Return what `compare` prints on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    compare(folders)
    return capsys.readouterr().out


def assert_width(shown: str, columns: int) -> None:
    for line in shown.splitlines():
        assert len(line) <= columns


@pytest.mark.claim("seeds tell a difference from chance by Welch's test")
def test_welch() -> None:
    p = welch([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0, 10.0])
    # scipy.stats.ttest_ind(..., equal_var=False).pvalue
    assert p == pytest.approx(0.069133593, abs=1e-8)
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None


def test_rounding_has_no_winner() -> None:
    def winner(other: float) -> str:
        return CurveComparison("loss", ([2.0], [other]), -1, None).winner

    assert winner(2.0) == "alike"
    assert winner(2.0 + 1.9e-5) == "alike"
    assert winner(2.0 + 2.1e-5) == "A ahead, untested"
    assert winner(1.9) == "B ahead, untested"


def test_seeds_are_sides_and_the_better_one_is_named(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    a = []
    b = []
    for seed in (0, 1, 2):
        shift = seed / 100
        run = write_run(
            tmp_path / f"a/{seed}",
            seed=seed,
            shift=shift,
        )
        a.append(run)
        run = write_run(
            tmp_path / f"b/{seed}",
            seed=seed,
            lr=2e-3,
            shift=shift - 0.5,
            steps=16,
        )
        b.append(run)

    one, other = sides([*a, *b])
    assert len(one) == 3
    assert len(other) == 3

    _, second = sides(folders)
    assert [run.folder for run in second] == b

    verdicts, last = judge(one, other)
    assert last == 16

    loss = find_verdict(verdicts, "loss")
    assert loss.winner == "B"
    assert loss.p < 0.01
    assert loss.difference == pytest.approx(-0.5)
    assert find_verdict(verdicts, "learning rate").winner == "–"

    shown = capture_comparison(80, folders, capsys, monkeypatch)
    assert "optimizer.lr" in shown
    assert "n = 3 and 3" in shown
    assert "run.seed" not in shown
    assert_width(shown, 80)

    compare([a[0], b[0]])
    assert "no test is possible" in capsys.readouterr().out


def test_a_section_of_another_kind_is_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def run(name: str, *overrides: str) -> Path:
        folder = write_run(tmp_path / name)
        file = folder / "plan.json"
        plan = json.loads(file.read_text())
        config = load_text("data: a.jsonl\n", [*overrides, f"run.dir={folder}"])
        plan["config"] = config.model_dump(mode="json")
        file.write_text(json.dumps(plan))
        return folder

    a = run("a", "strategy=ddp")
    b = run(
        "b",
        "strategy={kind: fsdp2, offload: cpu, tp: 2}",
        "adapter={kind: lora, r: 8}",
        "run.profile={}",
    )
    shown = capture_comparison(80, [a, b], capsys, monkeypatch)
    above_curves, _, _ = shown.partition("curves up to")
    _, _, table = above_curves.rpartition("──")
    keys = []
    for line in table.splitlines():
        if line.strip():
            keys.append(line.strip().split(maxsplit=2))

    assert keys == [
        ["strategy", "ddp", "fsdp2, offload cpu"],
        ["strategy.tp", "1", "2"],
        ["adapter", "none", "lora, r 8"],
        ["run.profile", "null", "defaults"],
    ]


def test_no_name_breaks_inside_a_word(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    sides = [tmp_path / "a", tmp_path / "b"]
    for number, side in enumerate(sides):
        for seed in (0, 1):
            metrics = {"token_accuracy": 0.5, "a_metric_of_a_long_name": 1.0 + seed / 7}
            loss = 12345.678 + seed / 3 + number
            events: list[Event] = [start(4)]
            for each in range(1, 5):
                events.append(step(each, loss, metrics=metrics))
            write_run(
                side / str(seed),
                seed=seed,
                lr=1e-3 + number,
                events=events,
            )

    shown = capture_comparison(80, sides, capsys, monkeypatch)
    assert "a_metric_of_a_long_name" in shown
    assert "not significant" in " ".join(shown.split())
    assert "optimizer.lr" in shown
    assert_width(shown, 80)


@pytest.mark.parametrize(("steps", "is_compared"), [((0, 3, 6), True), ((0, 6), False)])
def test_held_out_values_are_compared_at_one_step(
    tmp_path: Path, capsys: Capture, steps: tuple[int, ...], is_compared: bool
) -> None:
    def run(
        name: str,
        evaluated: tuple[int, ...],
        last: int,
    ) -> Path:
        events: list[Event] = [start(last)]
        for number in evaluated:
            metrics = {"loss": 5.0 - number}
            events.append(Eval(step=number, samples=1, seconds=0.1, metrics=metrics))
        for number in range(1, last + 1):
            events.append(step(number))
        return write_run(tmp_path / name, events=events)

    a = run("a", steps, 6)
    b = run("b", (0, 3), 3)
    verdicts, last = judge([RunFacts(a)], [RunFacts(b)])
    found = [each.values for each in verdicts if each.name == "held out: loss"]
    assert last == 3

    compare([a, b])
    shown = "".join(capsys.readouterr())
    if is_compared:
        assert found == [([2.0], [2.0])]
        assert "not compared" not in shown
    else:
        assert found == []
        assert "not compared" in shown


def test_repeats_of_a_seed_are_one_value(tmp_path: Path) -> None:
    a = []
    b = []
    for number in range(2):
        shift = number / 1e4
        a.append(write_run(tmp_path / f"a/{number}", seed=0, shift=shift))
        b.append(write_run(tmp_path / f"b/{number}", seed=0, lr=2e-3, shift=shift - 0.5))

    one, other = sides([*a, *b])
    assert len(one) == 2

    verdicts, _ = judge(one, other)
    for verdict in verdicts:
        assert verdict.p is None, "no test of one seed"

    assert seed_groups(one) == [[0], [1]]

    another_seed = RunFacts(write_run(tmp_path / "c", seed=1))
    assert seed_groups([*one, another_seed]) == [[0, 2], [1]]


def test_runs_without_steps_and_wrong_sides(tmp_path: Path, capsys: Capture) -> None:
    a = write_run(tmp_path / "a")
    empty = write_run(tmp_path / "empty", events=[])
    compare([a, empty])
    assert "nothing can be compared" in capsys.readouterr().out

    with pytest.raises(UserError, match=r"differ in run\.seed only"):
        sides([a])

    with pytest.raises(UserError, match="no such folder"):
        sides([a, tmp_path / "none"])

    void = tmp_path / "void"
    void.mkdir()
    with pytest.raises(UserError, match="no run folder"):
        sides([a, void])


def diverged(
    ends: int = 3,
    loss: float = 1.0,
    steps: int = 10,
) -> list[Event]:
    """Return a run of `steps` whose losses are no numbers after step `ends`."""
    events: list[Event] = [start(steps)]
    for each in range(1, steps + 1):
        if each <= ends:
            events.append(step(each, loss))
        else:
            events.append(step(each, math.nan))
    return events


def judged_loss(a: Path, b: Path) -> CurveComparison:
    verdicts, last = judge([RunFacts(a)], [RunFacts(b)])
    assert last == 10
    return find_verdict(verdicts, "loss")


def test_a_run_that_ended_without_a_number_is_not_ahead(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    worse = write_run(tmp_path / "worse", events=diverged(10, 2.0))
    lost = write_run(tmp_path / "lost", events=diverged())
    never = write_run(tmp_path / "never", events=diverged(0))
    for other in (lost, never):
        assert judged_loss(worse, other).winner == "A: B has no number"
        assert judged_loss(other, worse).winner == "B: A has no number"

    assert judged_loss(lost, never).winner.startswith("neither")

    shown = capture_comparison(120, [worse, lost], capsys, monkeypatch)
    assert "loss 2 no number A: B has no number" in " ".join(shown.split())

    numbers = _key_numbers(RunFacts(lost))
    assert numbers["steps"] == "10 of 10"
    assert numbers["training"] == "loss 1 → no number"


def test_a_step_that_is_done_again_without_a_number_has_none(tmp_path: Path) -> None:
    events = [
        *diverged(6, steps=6),
        step(5, math.nan),
        step(6, math.inf),
    ]
    run = RunFacts(write_run(tmp_path / "a", events=events))
    assert run.curves["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]

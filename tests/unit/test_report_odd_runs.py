"""What reports, comparisons and the command line make of runs that went another way than most: elsewhere before, on fewer ranks, hung."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drumline.cli import main
from drumline.cli.program import _arguments_for_typer, _complete_resume
from drumline.report.compare import _direction
from drumline.report.details import _memory_by_rank, _total_of_steps, repeat
from drumline.report.facts import RunFacts
from drumline.report.progress import Progress
from drumline.report.sections import _key_numbers
from drumline.report.watch import BrowserFeed
from drumline.telemetry.events import Event, EventLog, Fault, Restore, RunEnd, examine
from drumline.telemetry.watched import Hang
from tests.unit.report_runs import start, step, write_run

FAULT: dict[str, Any] = {
    "attempt": 0,
    "rank": 1,
    "signal": None,
    "exitcode": 1,
    "error": "x",
    "log": "y",
    "step": 4,
}


def at(event: Event, seconds: float) -> dict[str, Any]:
    return {**event.values(), "t": 1_000_000 + seconds}


def run_of(folder: Path, *logged: dict[str, Any]) -> RunFacts:
    write_run(folder, events=[])
    (folder / "events.jsonl").write_text("".join(json.dumps(values) + "\n" for values in logged))
    return RunFacts(folder)


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("loss", -1),
        ("held out: perplexity", -1),
        ("held out: kl", -1),
        ("held out: checklist/accuracy", 1),
        ("held out: loss/accuracy", 1),
        ("reward: checklist", 1),
        ("reward", 1),
        ("reward_chosen", 1),
        ("reward_rejected", 0),
        ("log_prob_rejected", 0),
        ("chosen_std", 0),
        ("kl_coefficient", 0),
        ("held out: reward_failed", -1),
        ("held out: hard/reward_failed", -1),
        ("held out: reward/error", 1),
        ("held out: tasks/x/exact_match_stderr", 0),
        ("calibration_error", -1),
        ("tokens/s", 1),
        ("samples/s", 1),
        ("model FLOPs utilisation", 1),
        ("learning rate", 0),
    ],
)
def test_which_way_is_better(tmp_path: Path, name: str, better: int) -> None:
    assert _direction(name, RunFacts(write_run(tmp_path / "run"))) == better


@pytest.mark.parametrize(("tokens", "speed"), [(4, "40 samples/s"), (100, "10,000 tokens/s")])
def test_a_module_without_tokens_is_counted_in_samples(
    tmp_path: Path, tokens: int, speed: str
) -> None:
    per_s = {4: 40.0, 100: 1e4}[tokens]
    steps = [step(number, tokens=tokens, tokens_per_s=per_s) for number in (1, 2)]
    folder = write_run(tmp_path / "run", events=[start(), *steps])
    assert _key_numbers(RunFacts(folder))["speed, median"] == speed
    unit = speed.partition(" ")[2]
    assert unit in RunFacts(folder).curves
    live = BrowserFeed(folder)
    live.add(Event.from_values(at(steps[0], 0)))
    assert live.state["speed_unit"] == unit


def test_a_hang_before_the_first_step_is_an_event(tmp_path: Path) -> None:
    hang = Hang(
        attempt=0, step=-1, rank=0, ranks=[0], phase="startup", seconds=30.0, limit=20.0, why="it waits", waits=[], collective=None,
        position=0, sample_ids=None, stack=[],
    )  # fmt: skip
    EventLog(tmp_path / "events.jsonl").emit(hang)
    assert [(type(event), sound) for _, event, sound in examine(tmp_path / "events.jsonl")] == [
        (Hang, True)
    ]


def test_steps_of_another_folder_are_no_work_of_this_run(tmp_path: Path) -> None:
    restored = Restore(step=900, path="s3://b/step-00000900", seconds=1.0, skipped=[])
    steps = [at(step(number, seconds=1.0), 60 + number - 900) for number in range(901, 1001)]
    logged = [
        at(start(), 0),
        at(restored, 30),
        *steps,
        at(RunEnd(status="finished", exit_code=0, step=1000, goodput={}), 160),
    ]
    assert run_of(tmp_path / "run", *logged).goodput == pytest.approx(100 / 160)
    live = BrowserFeed(tmp_path / "run")
    for values in logged:
        live.add(Event.from_values(values))
    assert live.message([])["state"]["goodput"] == pytest.approx(100 / 160)


@pytest.mark.parametrize(
    ("why", "spent"), [("stop", 20.0), ("fault", 1020.0), ("last fault", 20.0)]
)
def test_the_time_between_a_stop_and_the_next_start_is_no_loss(
    tmp_path: Path, why: str, spent: float
) -> None:
    action = "restart" if why == "fault" else "stop: 3 restarts without progress"
    fault = Fault(
        attempt=0,
        rank=1,
        signal="SIGKILL",
        exitcode=-9,
        error="killed",
        log="x",
        step=5,
        action=action,
    )
    end = RunEnd(status="preempted", exit_code=75, step=5, goodput={}) if why == "stop" else fault
    steps = [
        at(step(number, seconds=1.0), number if number <= 5 else 1005 + number)
        for number in range(1, 11)
    ]
    logged = [at(start(), 0), *steps[:5], at(end, 10), at(start(), 1010), *steps[5:]]
    logged.append(at(RunEnd(status="finished", exit_code=0, step=10, goodput={}), 1020))
    live = BrowserFeed(tmp_path / "run")
    for values in logged:
        live.add(Event.from_values(values))
    facts = run_of(tmp_path / "run", *logged)
    assert (
        live.message([])["state"]["goodput"]
        == pytest.approx(10 / spent)
        == pytest.approx(facts.goodput)
    )
    assert facts.seconds == pytest.approx(spent)


def test_a_rank_has_the_memory_of_steps_that_it_took(tmp_path: Path) -> None:
    four, two = [1, 2, 3, 4], [5, 6]
    run = run_of(
        tmp_path / "run",
        at(start(), 0),
        at(step(1, memory_bytes=four), 1),
        at(step(2, memory_bytes=two), 2),
    )
    assert [(line["name"], line["y"]) for line in _memory_by_rank(run)] == [
        ("rank 0", [1, 5]),
        ("rank 1", [2, 6]),
        ("rank 2", [3]),
        ("rank 3", [4]),
    ]


def test_the_command_that_repeats_a_run_says_each_thing_once(tmp_path: Path) -> None:
    command = repeat(run_of(tmp_path / "run", at(start(ranks=2), 0)))
    assert command is not None and command.count("--nproc 2") == 1


def test_a_new_plan_is_a_restart_too() -> None:
    progress = Progress(Console(file=io.StringIO()))
    for action in ("restart", "replan", "stop: no restart is left"):
        progress.on_event(Fault(**FAULT, action=action))
    assert progress.restarts == 2


def test_a_run_of_a_sweep_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3e-5").mkdir()
    for place in ("runs/mine-sweep/lr=3e-5", "lr=3e-5"):
        assert _complete_resume(["train", "x.yaml", "--resume", place, "run.dir=new"]) == [
            "train",
            "x.yaml",
            "--resume",
            place,
            "run.dir=new",
        ]
    assert _complete_resume(["train", "x.yaml", "--resume", "run.steps=9"]) == [
        "train",
        "x.yaml",
        "--resume",
        "newest",
        "run.steps=9",
    ]


def test_what_stands_behind_two_hyphens_is_the_scripts_own() -> None:
    theirs = ["--", "--resume", "--foo", "--local_rank=3", "x.yaml"]
    assert _arguments_for_typer(["--local-rank=1", "launch", "s.py", *theirs]) == [
        "launch",
        "s.py",
        *theirs,
    ]
    assert _arguments_for_typer(["train", "x.yaml", "--resume"]) == [
        "train",
        "x.yaml",
        "--resume",
        "newest",
    ]


def test_a_folder_of_somebody_else_s_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied", "/home/other/run/events.jsonl")

    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(os, "lstat", refused)
    with pytest.raises(SystemExit) as end:
        main(["report", "/home/other/run"])
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith(
        "error: /home/other/run/events.jsonl: permission denied"
    ), line


@pytest.mark.parametrize(
    ("logged", "total"), [([1, 2, 3, 4], (400.0, "")), ([2, 4], (400.0, "about ")), ([], (0, ""))]
)
def test_steps_without_an_event_count_in_sums(
    tmp_path: Path, logged: list[int], total: tuple[float, str]
) -> None:
    run = run_of(tmp_path / "run", *(at(step(number), number) for number in logged))
    assert _total_of_steps(run, run.points("step", "tokens")) == total

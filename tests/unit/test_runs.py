"""Runs that are under way: their states, their logs, and a request to stop that reaches their launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drumline.cli import app
from drumline.errors import EnvironmentFault, UserError
from drumline.launch import lease, runs
from drumline.launch.lease import Lease
from drumline.system.signals import LauncherSignals
from drumline.telemetry.events import (
    Event,
    EventLog,
    Fault,
    RunEnd,
    RunStart,
    last_start_offset,
    read_tail,
    tail,
)
from tests.faults.live import kill, wait_for
from tests.faults.test_launch import toy
from tests.harness import drumline, events, start_drumline, write_config
from tests.tiny import tiny_model_dir

FAULT = {
    "attempt": 0,
    "rank": 1,
    "signal": None,
    "exitcode": 1,
    "error": "x",
    "log": "y",
    "step": 4,
}


def write_run(folder: Path, name: str, *logged: Event) -> Path:
    """Write a run folder with events, and return it."""
    run = toy(folder / name, "").parent
    path = run / "events.jsonl"
    # A log makes its file, and a run without events has none.
    for event in logged:
        EventLog(path).emit(event)

    return run


def end(status: str, code: int) -> RunEnd:
    return RunEnd(status=status, exit_code=code, step=7, goodput={})


START = RunStart(
    world_size=2,
    steps=9,
    parameters=1,
    strategy="ddp",
    device="cpu",
    run_dir="r",
    resumed_from=None,
    plan_line="a plan",
    left_out=[],
)
FINISHED = end("finished", 0)
PREEMPTED = end("preempted", 75)


def follow(run: Path) -> int:
    return runs.follow(run, lambda event: None)


def test_states(tmp_path: Path) -> None:
    write_run(tmp_path, "new")
    write_run(tmp_path, "done", START, FINISHED)
    write_run(tmp_path, "saved", START, PREEMPTED)
    write_run(tmp_path, "bad", START, Fault(**FAULT, action="stop: no restart is allowed"))
    write_run(tmp_path, "dead", START, Fault(**FAULT, action="restart"))
    (tmp_path / "no-run").mkdir()
    now = write_run(tmp_path, "now", START, PREEMPTED, START)
    with Lease(now):
        found = {each.run_dir.name: each for each in runs.states(tmp_path)}
        states = {name: each.state for name, each in found.items()}
        assert states == {
            "new": "not started",
            "done": "finished",
            "saved": "preempted",
            "bad": "failed",
            "dead": "lost",
            "now": "running",
        }
        assert found["done"].step == 7
        assert found["new"].step is None
        assert found["bad"].step == 4
        assert found["done"].where == ""
        assert f"pid {os.getpid()}" in found["now"].where

        table = runs.table(list(found.values()))

    header, *lines = table.splitlines()
    assert header.split()[:3] == ["RUN", "STATE", "STEP"]
    assert len(lines) == 6

    places = set()
    for line in lines:
        name = Path(line.split()[0]).name
        places.add(line.index(states[name]))
    assert len(places) == 1, "in columns"

    (lost,) = runs.states(now)
    assert lost.state == "lost", "the end of the start before does not count"
    assert follow(now) == 1


@pytest.mark.slow
def test_a_request_to_stop_reaches_the_holder_alone(tmp_path: Path) -> None:
    with LauncherSignals() as signals, Lease(tmp_path) as held:
        lease.request_stop(tmp_path, "of an earlier one")
        time.sleep(lease.RENEW_SECONDS * 1.5)
        assert not signals.number

        lease.request_stop(tmp_path, held.token)
        deadline = time.monotonic() + 3 * lease.RENEW_SECONDS
        while not signals.number and time.monotonic() < deadline:
            time.sleep(0.05)

        assert signals.number == signal.SIGTERM
        assert not (tmp_path / lease.STOP).exists()


def test_a_holder_on_another_host_is_known_by_its_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.system.process.ProcessId.alive", lambda self: None)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    held = tmp_path / "a"
    held.mkdir()
    copied = tmp_path / "b"
    copied.mkdir()
    with Lease(held):
        content = (held / lease.NAME).read_bytes()
        (copied / lease.NAME).write_bytes(content)
        found = lease.holders([held, copied, tmp_path / "c"])

    assert found.keys() == {held, copied}
    assert found[held].alive is True
    assert found[copied].alive is False


def kinds_of(logged: list[Event]) -> list[str]:
    return [event.kind for event in logged]


def test_the_newest_events(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", START, PREEMPTED, START, FINISHED)
    path = run / "events.jsonl"
    assert kinds_of(read_tail(path)) == ["run_start", "run_end"] * 2
    assert read_tail(path, 100) == []

    tailed: list[Event] = []
    with tail(path, tailed.append, last_start_offset(path)):
        pass
    assert kinds_of(tailed) == ["run_start", "run_end"]
    assert getattr(tailed[1], "exit_code", None) == 0

    none = tmp_path / "none"
    assert read_tail(none) == []
    assert last_start_offset(none) == 0


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "run")
    with pytest.raises(UserError, match="has no logs — under torchrun"):
        runs.print_logs(run, None)

    for attempt in (2, 10):
        folder = run / "logs" / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        for rank in (0, 10, 9):
            (folder / f"rank-{rank}.out").write_text(f"out {rank} of {attempt}\n")
            (folder / f"rank-{rank}.log").write_text(f"API_KEY=hunter2hunter2 {rank}\n")
            (folder / f"rank-{rank}.json").write_text("{}")

    runs.print_logs(run, None)
    printed = capsys.readouterr().out
    assert "hunter2" not in printed

    lines = printed.splitlines()
    assert len(lines) == 6

    out_lines = [line for line in lines if "out" in line]
    assert out_lines == [f"rank {rank} | out {rank} of 10" for rank in (0, 9, 10)]

    runs.print_logs(run, 9)
    assert capsys.readouterr().out.splitlines()[0] == "out 9 of 10"

    with pytest.raises(UserError, match="no logs of rank 3"):
        runs.print_logs(run, 3)


def test_what_is_no_run_or_not_under_way_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run")
    for command in (runs.stop, follow):
        with pytest.raises(UserError, match="is no run folder"):
            command(tmp_path)

    with pytest.raises(UserError, match="is not under way"):
        runs.stop(run)


def test_a_damaged_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "run")
    for name in ("attempt-x", "attempt-1"):
        (run / "logs" / name).mkdir(parents=True)
    os.mkfifo(run / "logs/attempt-1/rank-0.log")
    (run / "logs/attempt-1/rank-1.log").write_text("hello\n")
    runs.print_logs(run, None)
    assert capsys.readouterr().out == "rank 1 | hello\n"

    assert follow(run) == 1
    assert capsys.readouterr().err == f"{run}: not started\n"

    for config in (None, [], {"launch": None}, {"launch": {"nodes": 3}}):
        (run / "plan.json").write_text(json.dumps({"config": config}))
        assert follow(run) == 1

    (run / "events.jsonl").mkdir()
    with pytest.raises(EnvironmentFault, match="it is a folder"):
        follow(run)

    with pytest.raises(UserError, match="is no folder"):
        runs.states(run / "plan.json")

    with pytest.raises(UserError, match="there is no such folder"):
        runs.states(tmp_path / "none")


def test_a_holder_elsewhere_that_has_died_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.2)
    run = write_run(tmp_path, "run")
    path = run / lease.NAME
    with Lease(run) as held:
        first_line, *_ = path.read_bytes().split(b"\n")

    elsewhere = {**json.loads(first_line), "host": "elsewhere", "boot": "another"}
    path.write_bytes(json.dumps(elsewhere).encode() + b"\n%020d\n" % 7)

    runs._wait_for_end(run, held.token)
    assert "its launcher has died" in capsys.readouterr().err


def list_commands() -> list[str]:
    """Return the names of the commands, but for two that need nothing, and measure."""
    names = set()
    for command in app.registered_commands:
        if command.callback:
            names.add(command.name or command.callback.__name__)

    return sorted(names - {"calibrate", "doctor"})


@pytest.mark.parametrize("command", list_commands())
def test_a_command_without_arguments_says_what_it_needs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command])
    is_refused = isinstance(done.exception, UserError)
    assert is_refused or done.exit_code in (0, 2), done.output
    assert done.output or done.exception


@pytest.mark.claim("a run is followed and stopped by another process, in Kubernetes too")
@pytest.mark.slow
def test_a_run_is_followed_and_stopped_by_another_process(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        run={"steps": 5000},
        checkpoint={"every": None},
    )
    run = tmp_path / "run"
    training = start_drumline("train", config)
    processes = [training]
    try:
        wait_for(run, "step", 3, training)

        following = start_drumline("follow", run)
        processes.append(following)
        assert drumline("stop", run).code == 0

        out, err = training.communicate(timeout=60)
        assert training.returncode == 75
        assert "stopped and saved" in out + err, err

        shown, more = following.communicate(timeout=30)
        assert following.returncode == 75
        assert "plan: " in shown
        assert "step 1/" in shown, more
    finally:
        for process in processes:
            if process.poll() is None:
                kill(process.pid)

    assert events(run, "run_end")[-1]["status"] == "preempted"
    assert "preempted" in drumline("ps", tmp_path).out

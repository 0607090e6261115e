"""Runs that are under way: their states, their logs, and a request to stop that reaches their launcher."""

from __future__ import annotations

import contextlib
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
    last,
    last_start,
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


def run_of(folder: Path, name: str, *logged: Event) -> Path:
    run = toy(folder / name, "").parent
    for event in logged:
        EventLog(run / "events.jsonl").emit(event)
    return run


def end(status: str, code: int) -> RunEnd:
    return RunEnd(status=status, exit_code=code, step=7, goodput={})


def start() -> RunStart:
    return RunStart(
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


def test_states(tmp_path: Path) -> None:
    run_of(tmp_path, "new")
    run_of(tmp_path, "done", start(), end("finished", 0))
    run_of(tmp_path, "saved", start(), end("preempted", 75))
    run_of(tmp_path, "bad", start(), Fault(**FAULT, action="stop: no restart is allowed"))
    run_of(tmp_path, "dead", start(), Fault(**FAULT, action="restart"))
    (tmp_path / "no-run").mkdir()
    with Lease(run_of(tmp_path, "now", start(), end("preempted", 75), start())):
        found = {each.run_dir.name: each for each in runs.states(tmp_path)}
        wanted = {
            "new": "not started",
            "done": "finished",
            "saved": "preempted",
            "bad": "failed",
            "dead": "lost",
            "now": "running",
        }
        assert {name: each.state for name, each in found.items()} == wanted
        assert (found["done"].step, found["new"].step, found["bad"].step) == (7, None, 4)
        assert f"pid {os.getpid()}" in found["now"].where and found["done"].where == ""
        lines = runs.table(list(found.values())).splitlines()
        assert lines[0].split()[:3] == ["RUN", "STATE", "STEP"] and len(lines) == 7
        assert len({line.index(wanted[Path(line.split()[0]).name]) for line in lines[1:]}) == 1, (
            "in columns"
        )
    assert [each.state for each in runs.states(tmp_path / "now")] == ["lost"], (
        "the end of the start before does not count"
    )
    assert runs.follow(tmp_path / "now", lambda event: None) == 1


@pytest.mark.slow
def test_a_request_to_stop_reaches_the_holder_alone(tmp_path: Path) -> None:
    with LauncherSignals() as signals, Lease(tmp_path) as held:
        lease.request_stop(tmp_path, "of an earlier one")
        time.sleep(lease.RENEW_SECONDS * 1.5)
        assert not signals.number
        lease.request_stop(tmp_path, held.token)
        until = time.monotonic() + 3 * lease.RENEW_SECONDS
        while not signals.number and time.monotonic() < until:
            time.sleep(0.05)
        assert signals.number == signal.SIGTERM and not (tmp_path / lease.STOP).exists()


def test_a_holder_on_another_host_is_known_by_its_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.system.process.ProcessId.alive", lambda self: None)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    (tmp_path / "a").mkdir()
    with Lease(tmp_path / "a"):
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / lease.NAME).write_bytes((tmp_path / "a" / lease.NAME).read_bytes())
        found = lease.holders([tmp_path / name for name in ("a", "b", "c")])
    assert {folder.name: holder.alive for folder, holder in found.items()} == {
        "a": True,
        "b": False,
    }


def test_the_newest_events(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", start(), end("preempted", 75), start(), end("finished", 0))
    path = run / "events.jsonl"
    assert [event.kind for event in last(path)] == ["run_start", "run_end"] * 2
    assert [event.kind for event in last(path, 100)] == [] and last(tmp_path / "none") == []
    got: list[Event] = []
    with tail(path, got.append, last_start(path)):
        pass
    assert [event.kind for event in got] == ["run_start", "run_end"] and getattr(
        got[1], "exit_code", None
    ) == 0
    assert last_start(tmp_path / "none") == 0


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, "run")
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
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "out" in line] == [
        f"rank {rank} | out {rank} of 10" for rank in (0, 9, 10)
    ]
    assert "hunter2" not in "".join(lines) and len(lines) == 6
    runs.print_logs(run, 9)
    assert capsys.readouterr().out.splitlines()[0] == "out 9 of 10"
    with pytest.raises(UserError, match="no logs of rank 3"):
        runs.print_logs(run, 3)
    for command in (runs.stop, lambda folder: runs.follow(folder, lambda event: None)):
        with pytest.raises(UserError, match="is no run folder"):
            command(tmp_path)
    with pytest.raises(UserError, match="is not under way"):
        runs.stop(run)


def test_a_damaged_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, "run")
    for name in ("attempt-x", "attempt-1"):
        (run / "logs" / name).mkdir(parents=True)
    os.mkfifo(run / "logs/attempt-1/rank-0.log")
    (run / "logs/attempt-1/rank-1.log").write_text("hello\n")
    runs.print_logs(run, None)
    assert capsys.readouterr().out == "rank 1 | hello\n"
    assert (
        runs.follow(run, lambda event: None) == 1
        and capsys.readouterr().err == f"{run}: not started\n"
    )
    for config in (None, [], {"launch": None}, {"launch": {"nodes": 3}}):
        (run / "plan.json").write_text(json.dumps({"config": config}))
        assert runs.follow(run, lambda event: None) == 1
    (run / "events.jsonl").mkdir()
    with pytest.raises(EnvironmentFault, match="it is a folder"):
        runs.follow(run, lambda event: None)
    with pytest.raises(UserError, match="is no folder"):
        runs.states(run / "plan.json")
    with pytest.raises(UserError, match="there is no such folder"):
        runs.states(tmp_path / "none")


def test_a_holder_elsewhere_that_has_died_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.2)
    run = run_of(tmp_path, "run")
    with Lease(run) as held:
        text = (run / lease.NAME).read_bytes()
    there = {**json.loads(text.split(b"\n")[0]), "host": "elsewhere", "boot": "another"}
    (run / lease.NAME).write_bytes(json.dumps(there).encode() + b"\n%020d\n" % 7)
    runs._wait_for_end(run, held.token)
    assert "its launcher has died" in capsys.readouterr().err


COMMANDS = {
    command.name or command.callback.__name__
    for command in app.registered_commands
    if command.callback
}


@pytest.mark.parametrize(
    "command", sorted(COMMANDS - {"calibrate", "doctor"})
)  # which need nothing, and measure
def test_a_command_without_arguments_says_what_it_needs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command])
    assert isinstance(done.exception, UserError) or done.exit_code in (0, 2), done.output
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
    following = None
    try:
        wait_for(run, "step", 3, training)
        following = start_drumline("follow", run)
        assert drumline("stop", run).code == 0
        out, err = training.communicate(timeout=60)
        assert training.returncode == 75 and "stopped and saved" in out + err, err
        shown, more = following.communicate(timeout=30)
        assert following.returncode == 75 and "plan: " in shown and "step 1/" in shown, more
    finally:
        for process in (training, following):
            with contextlib.suppress(AttributeError, ProcessLookupError):
                kill(process.pid) if process.poll() is None else None
    assert events(run, "run_end")[-1]["status"] == "preempted"
    assert "preempted" in drumline("ps", tmp_path).out

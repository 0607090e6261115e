"""After the ranks have gone: whose fault it was, what to say, and whether to start again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config.resume import Resume
from drumline.launch.local import (
    decide_exit_code,
    launch,
    next_attempt,
    progress_of_attempt,
    resume_of_restart,
)
from drumline.launch.postmortem import (
    RankEnd,
    Restarts,
    memory_exhaustion,
    read_error,
    report,
    root_cause,
)
from drumline.plan.plan import Plan
from drumline.system.signals import LauncherSignals
from drumline.telemetry.events import Eval, EventLog, Restore, Save, Step, read
from tests.faults.test_launch import toy
from tests.unit.report_runs import start, story

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def raised(message: str, time: float, code: int = 1) -> dict[str, Any]:
    text = f"Traceback (most recent call last):\n  File x\n{message}\n"
    return {"message": message, "traceback": text, "time": time, "exit_code": code}


def ended(
    rank: int,
    code: int,
    *,
    error: dict[str, Any] | None = None,
    killed: bool = False,
    at: float = 0.0,
    log: Path | None = None,
) -> RankEnd:
    return RankEnd(
        rank, code, error, log or Path("/nowhere/rank.log"), killed, error["time"] if error else at
    )


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        ([ended(0, 1, error=raised(PEER, 10.0)), ended(1, -9, at=10.2)], 1),
        (
            [
                ended(0, 1, error=raised("OSError: something unheard of", 10.0)),
                ended(1, -9, at=10.2),
            ],
            1,
        ),
        (
            [ended(0, 1, error=raised(PEER, 9.0)), ended(1, 1, error=raised("ValueError: x", 9.5))],
            1,
        ),
        (
            [
                ended(0, 1, error=raised("ValueError: y", 9.0)),
                ended(1, 1, error=raised("ValueError: x", 8.0)),
            ],
            1,
        ),
        ([ended(0, -6, at=9.1), ended(1, 1, error=raised("ValueError: x", 9.0))], 1),
        ([ended(0, -11, at=9.1), ended(1, 1, error=raised(PEER, 9.0))], 0),
        (
            [
                ended(0, 1, error=raised(PEER, 9.1)),
                ended(1, 1, error=raised("ValueError: x", 9.0), killed=True),
            ],
            1,
        ),
        ([ended(0, -9, killed=True), ended(1, 7, at=9.0)], 1),
        (
            [
                ended(0, -9, killed=True),
                ended(1, 1, error=raised("RuntimeError: Timed out waiting 600000ms for recv", 9.0)),
            ],
            1,
        ),
        ([ended(0, 0), ended(1, -9, at=3.0), ended(2, -9, at=2.0)], 2),
    ],
    ids=[
        "kill",
        "kill, odd words",
        "closed first",
        "earlier",
        "abort after",
        "segfault",
        "stuck",
        "mute",
        "timeout",
        "earlier kill",
    ],
)
def test_root_cause(ends: list[RankEnd], blamed: int) -> None:
    assert root_cause(ends).rank == blamed


def test_an_abort_over_a_lost_peer_is_a_consequence(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(
        "terminate called after throwing an instance of 'std::exception'\nwhat(): Connection closed by peer\n"
    )
    assert ended(0, -6, log=log).is_consequence
    log.write_text("terminate called: out of range\n")
    assert not ended(0, -6, log=log).is_consequence


def test_report_tells_the_cause_once_and_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    error = raised("ValueError: no access with hf_abcdefgh", 9.0)
    log = tmp_path / "rank-1.log"
    log.write_text("".join(f"line {n}\n" for n in range(40)) + error["traceback"])
    said = report(
        ended(1, 1, error=error, log=log),
        [ended(0, 1, error=raised(PEER, 9.1)), ended(1, 1, error=error, log=log)],
    )
    assert said.startswith("rank 1: ValueError: no access with [redacted]")
    assert said.count("Traceback") == 1 and said.count("hf_abcdefgh") == 0
    assert "line 39" in said and "line 25" in said and "line 24" not in said and str(log) in said
    assert said.splitlines()[-1].startswith("in consequence: rank 0 RuntimeError")


def test_report_of_a_kill_without_a_log(tmp_path: Path) -> None:
    end = ended(1, -9, log=tmp_path / "none.log")
    assert "memory" in report(end, [end]) and str(tmp_path / "none.log") in report(end, [end])
    assert ended(1, -35).message == "killed by SIGRTMIN" or "signal 35" in ended(1, -35).message


@pytest.mark.parametrize("text", ["", "{", "{}", '{"message": "of another program"}', "[]"])
def test_notes_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text)
    assert read_error(tmp_path / "e.json") is None
    assert read_error(tmp_path / "missing.json") is None


@pytest.mark.parametrize(
    ("ends", "asked", "code"),
    [
        ([ended(0, 0), ended(1, 0)], 0, 0),
        ([ended(0, 0), ended(1, 0)], 15, 0),
        ([ended(0, 75), ended(1, 75)], 0, 75),
        ([ended(0, 75), ended(1, 1, error=raised(PEER, 1.0))], 0, 75),
        ([ended(0, 75), ended(1, 1, error=raised(PEER, 1.0))], 15, 75),
        ([ended(0, 2), ended(1, -9, killed=True)], 0, 2),
        ([ended(0, 3), ended(1, 3)], 0, 3),
        (
            [ended(0, 75, error=raised("saved", 1.0, 75), killed=True), ended(1, -9, killed=True)],
            15,
            75,
        ),
        ([ended(0, -15), ended(1, -9, killed=True)], 15, 75),
        ([ended(0, -9, killed=True), ended(1, -9, killed=True)], 15, 1),
        ([ended(0, 0), ended(1, -9, killed=True)], 15, 1),
        ([ended(0, -9), ended(1, 1)], 0, None),
        ([ended(0, 1), ended(1, -9, killed=True)], 15, None),
        ([ended(0, -15), ended(1, -9, killed=True)], 0, None),
    ],
)
def test_exit_code(ends: list[RankEnd], asked: int, code: int | None) -> None:
    assert decide_exit_code(ends, asked) == code


def test_how_far_the_attempt_came(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert progress_of_attempt(path, 0) == (-1, -1)
    log = EventLog(path)
    for step in (1, 2, 3):
        log.emit(Eval(step=step, samples=1, seconds=0.0))
    assert progress_of_attempt(path, 0) == (3, 3)
    assert progress_of_attempt(path, 3) == (3, -1), "the next attempt has done nothing yet"
    log.emit(Restore(t=0.0, step=1, path="x", seconds=0.0, skipped=[]))  # by a clock that is late
    assert progress_of_attempt(path, 3) == (3, 1)
    log.emit(Eval(step=2, samples=1, seconds=0.0))
    log.emit(
        Save(step=1, path="x", seconds=0.0, bytes=1, blocked_seconds=0.0, error=None)
    )  # in the background: it ends after the next step
    assert progress_of_attempt(path, 3) == (3, 2)
    with path.open("a") as torn:
        torn.write(json.dumps({"kind": "eval", "step": 9})[:-3])
    assert progress_of_attempt(path, 3) == (3, 2)


def test_attempts_are_counted_over_launches(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 0
    for number in (0, 3, 10):
        (tmp_path / "logs" / f"attempt-{number}").mkdir(parents=True)
    assert next_attempt(tmp_path) == 11


def test_restart_budget() -> None:
    assert Restarts(limit=0).decide(1, 1, 0, "a") == "no restart is allowed"
    restarts = Restarts(limit=1)
    assert restarts.decide(5, 5, 0, "a") is None
    assert restarts.decide(9, 9, 0, "a") is None, "progress since the last failure: counted anew"
    assert restarts.decide(9, 8, 1, "b") == "1 restarts without progress"


def test_crash_loop_is_the_same_step_rank_and_words() -> None:
    assert Restarts(9).decide(4, 4, 0, "x") is None
    for second, loops in [
        ((4, 4, 0, "OutOfMemory: tried 2.50 GiB at 0x7fe1"), True),
        ((4, 4, 1, "OutOfMemory: tried 2.00 GiB at 0x7fff"), False),
        ((4, 3, 0, "OutOfMemory: tried 2.00 GiB at 0x7fff"), False),
        ((4, 4, 0, "ValueError"), False),
    ]:
        restarts = Restarts(9)
        assert restarts.decide(4, 4, 0, "OutOfMemory: tried 2.00 GiB at 0x7fff") is None
        reason = restarts.decide(*second)
        assert (reason is not None) == loops
    lost = Restarts(9)
    assert lost.decide(4, -1, 1, "its host is down", "b") is None
    assert lost.decide(4, -1, 1, "its host is down", "c") is None, "another host is another failure"
    early = Restarts(9)
    assert early.decide(-1, -1, 0, "x") is None
    assert "before the first step" in (early.decide(-1, -1, 0, "x") or "")


@pytest.mark.parametrize(
    ("message", "tried"),
    [
        ("TypeError: unsupported operand type(s) for +: 'int' and 'str'", False),
        ("NotImplementedError: no such kernel", False),
        ("ModuleNotFoundError: No module named 'x'", False),
        ("ZeroDivisionError: division by zero", False),
        ("RuntimeError: CUDA error: unspecified launch failure", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("OSError: [Errno 5] Input/output error", True),
        ("RuntimeError: a peer said TypeError: x", True),
        ("killed by SIGKILL", True),
    ],
)
def test_an_error_of_code_or_of_values_is_not_tried_again(message: str, tried: bool) -> None:
    reason = Restarts(9).decide(4, 4, 0, message)
    assert reason is None if tried else "another start would not help" in (reason or "")


TIMED_OUT = "RuntimeError: Timed out waiting 600000ms for recv operation to complete"


def test_a_rank_that_was_suspended_is_named_beside_the_error_of_one_that_waited(
    tmp_path: Path,
) -> None:
    """Rank 1 got SIGSTOP; rank 0 waited in vain, said so, and could not leave: the launcher killed both."""
    waited = ended(0, 1, error=raised(TIMED_OUT, 9.0), killed=True)
    suspended = RankEnd(
        1, -9, None, tmp_path / "rank-1.log", killed=True, suspended=True, kills=(0, 3)
    )
    cause = root_cause([waited, suspended])
    said = report(cause, [waited, suspended])
    assert (
        cause.rank == 0
        and said.startswith("rank 0: RuntimeError: Timed out waiting")
        and "Traceback" in said
    )
    assert (
        "rank 1 did not end by itself and was killed by the launcher: it was suspended (SIGSTOP)"
        in said
    )
    assert "dmesg" not in said, "that SIGKILL was the launcher's"
    assert memory_exhaustion(suspended) is None, "memory ran out elsewhere on this machine"


def test_a_rank_that_waited_and_said_nothing_is_not_blamed() -> None:
    ends = [
        ended(0, -9, killed=True),
        ended(1, 1, error=raised(TIMED_OUT, 9.0), killed=True),
        ended(2, -9, killed=True),
    ]
    assert root_cause(ends).rank == 1
    silent = [
        ended(0, -9, killed=True),
        RankEnd(1, -9, None, Path("/nowhere"), killed=True, suspended=True),
    ]
    assert root_cause(silent).rank == 1, "of the silent ones the suspended one"
    assert "memory" not in report(silent[0], silent) and "hung" in report(silent[0], silent)


def again(named: str | None, run_dir: Path, apart: bool, since: int = 0) -> str:
    """Return the value of --resume with which a run is started again, after one with `named`."""
    return str(resume_of_restart(Resume.parse(named), run_dir, apart, since))


@pytest.mark.parametrize(
    ("named", "read"),
    [
        ("/other/run", "/other/run/checkpoints/step-00000004"),
        ("s3://b/run", "r/fetched/step-00000004"),
    ],
)
def test_a_run_goes_on_where_it_was_to_begin_until_it_has_saved(
    tmp_path: Path, named: str, read: str
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    saved: dict[str, Any] = {"seconds": 1.0, "bytes": 1, "blocked_seconds": 0.0}
    # Of a start before, which it has left.
    log.emit(Save(step=9, path="checkpoints/step-00000009", error=None, **saved))
    log.emit(Restore(step=4, path=read, seconds=1.0, skipped=[]))
    assert (
        again(None, tmp_path, False) == again("newest", tmp_path, False) == "newest"
        and again(named, tmp_path, False) == named
    )
    log.emit(Save(step=5, path=None, error="no space", **saved))
    assert again(named, tmp_path, False) == named
    log.emit(Save(step=6, path="checkpoints/step-00000006", error=None, **saved))
    log.emit(Restore(step=6, path="checkpoints/step-00000006", seconds=1.0, skipped=[]))
    assert again(named, tmp_path, False) == "newest"


def test_a_url_includes_what_lies_below_it() -> None:
    resume = Resume("s3://b/run")
    assert resume.includes("s3://b/run") and resume.includes("s3://b/run/checkpoints/step-00000004")
    assert not resume.includes("s3://b/run2/checkpoints/step-00000004")


def test_one_of_its_own_is_the_newest_once_it_was_read(tmp_path: Path) -> None:
    own = str(tmp_path / "checkpoints" / "step-00000002")
    assert again(own, tmp_path, False) == own
    EventLog(tmp_path / "events.jsonl").emit(Restore(step=2, path=own, seconds=1.0, skipped=[]))
    assert again(own, tmp_path, False) == "newest" and again(own, tmp_path, True) == own


def test_a_copy_beside_its_own_is_not_the_newest_once_it_was_read(tmp_path: Path) -> None:
    kept = str(tmp_path / "checkpoints" / "step-00000002-good")
    EventLog(tmp_path / "events.jsonl").emit(Restore(step=2, path=kept, seconds=1.0, skipped=[]))
    assert again(kept, tmp_path, False) == kept


@pytest.mark.parametrize(
    ("named", "at"),
    [
        ("/x/run", "/x/run/checkpoints/step-00000004"),
        ("s3://b/run", "s3://b/run/checkpoints/step-00000004"),
        ("/x/step-00000004", "/x/step-00000004"),
    ],
)
def test_saves_of_other_starts_are_not_its_own(tmp_path: Path, named: str, at: str) -> None:
    """Where the first attempt dies before it has read, and where the same start was made before."""
    log, events = EventLog(tmp_path / "events.jsonl"), tmp_path / "events.jsonl"
    save = Save(
        step=8,
        path="checkpoints/step-00000008",
        error=None,
        seconds=1.0,
        bytes=1,
        blocked_seconds=0.0,
    )
    log.emit(save)
    assert again(named, tmp_path, False) == named, "dead before its first event"
    log.emit(replace(start(), resumed_from=at))
    assert again(named, tmp_path, False) == named
    log.emit(save)
    log.emit(replace(start(), resumed_from="newest"))
    assert again(named, tmp_path, False) == "newest"
    assert again(named, tmp_path, False, since=len(read(events))) == named, (
        "a launcher that begins there anew"
    )
    log.emit(replace(start(), resumed_from=at))
    assert again(named, tmp_path, False) == named


class DiesOnce:
    """Ranks whose first attempt dies before there is an event of it."""

    def __init__(self) -> None:
        self.starts: list[list[str]] = []
        self.logs: list[str] = []

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        self.starts.append(rank[2:])
        self.logs.append(logs.name)
        return [ended(0, -9) if len(self.starts) == 1 else ended(0, 0)]


def test_a_restart_goes_on_from_where_the_run_was_to_begin(tmp_path: Path) -> None:
    plan_path, ranks = toy(tmp_path, "", max_restarts=1), DiesOnce()
    EventLog(tmp_path / "events.jsonl").emit(replace(start(), resumed_from="/x/step-00000004"))
    EventLog(tmp_path / "events.jsonl").emit(
        Save(step=8, path="there", error=None, seconds=1.0, bytes=1, blocked_seconds=0.0)
    )
    assert (
        launch(Plan.load(plan_path), plan_path, "/x/step-00000004", lambda event: None, ranks=ranks)
        == 0
    )
    assert ranks.starts == [["--resume", "/x/step-00000004"]] * 2
    assert ranks.logs == ["attempt-0", "attempt-1"], (
        "also where the first has left no folder, or it is seen late"
    )


class FailsAndCannotStartAgain:
    """Ranks whose first attempt fails, and whose second ends with the mistake that this leads to."""

    def __init__(self, events_path: Path, steps_of_second: int) -> None:
        self.events_path = events_path
        self.steps_of_second = steps_of_second
        self.attempts = 0

    def attempt(self, rank: list[str], logs: Path, signals: LauncherSignals) -> list[RankEnd]:
        self.attempts += 1
        if self.attempts == 1:
            return [ended(0, 1, error=raised("POST http://a/v1/completions: reset", 1.0))]
        for _ in range(self.steps_of_second):
            EventLog(self.events_path).emit(next(e for e in story(5) if isinstance(e, Step)))
        return [ended(0, 2, error=raised("GET http://a/health: refused — start it", 2.0, code=2))]


@pytest.mark.parametrize("steps", [0, 1])
def test_the_mistake_of_a_restart_names_the_failure_before_it(
    tmp_path: Path, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path = toy(tmp_path, "", max_restarts=1)
    ranks = FailsAndCannotStartAgain(tmp_path / "events.jsonl", steps)

    assert launch(Plan.load(plan_path), plan_path, None, lambda event: None, ranks=ranks) == 2

    last = capsys.readouterr().err.splitlines()[-1]

    assert last.startswith("error: GET http://a/health: refused — start it")
    assert ("rank 0 failed after step 0: POST http://a/v1/completions: reset" in last) == (
        not steps
    )
    assert ("--resume" in last) == (not steps)

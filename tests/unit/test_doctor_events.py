"""What the doctor takes from the events of a run, none of it from texts of strangers; and lines that launchers put something before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drumline.doctor.command import doctor
from drumline.doctor.diagnose import diagnose
from drumline.errors import UserError
from drumline.telemetry.events import EventLog, Fault, Nonfinite, RunStart
from drumline.telemetry.watched import Hang
from tests.unit.test_doctor import FULL_DISK, STEP, found, names, run_folder

START = RunStart(
    world_size=2, steps=9, parameters=1, strategy="ddp", device="cpu", run_dir="x", resumed_from=None, plan_line="", left_out=[]
)  # fmt: skip


def test_a_step_that_was_passed_over_is_a_warning(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").emit(
        Nonfinite(step=3, policy="skip", loss=None, grad_norm=None, sample_ids=[7])
    )
    assert (
        names(diagnose(str(tmp_path))) == ["nan-skipped"]
        and doctor(str(tmp_path), False, False) == 0
    )


@pytest.mark.parametrize("kind", ["samples", "completions"])
def test_texts_of_strangers_in_events_are_no_fault(kind: str, tmp_path: Path) -> None:
    said = [
        {"prompt": "torch.OutOfMemoryError: CUDA out of memory", "text": "No module named 'yaml'"}
    ]
    lines = [
        json.dumps(
            {"t": 1.0, "kind": kind, "step": 0, "when": "before", kind: said, "seconds": 1.0}
        ),
        STEP,
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert diagnose(str(tmp_path)) == []


def test_texts_of_strangers_that_the_display_printed_are_no_fault(tmp_path: Path) -> None:
    said = "sample, step 20: …why? → RuntimeError: CUDA error: device-side assert triggered\n"
    (tmp_path / "train.log").write_text(
        f"step 9/9  loss 1.0\n{said}2026-01-01T00:00:00 n1: {said}finished 9 steps\n"
    )
    assert diagnose(str(tmp_path / "train.log")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_log_that_is_not_ours_to_read_hides_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    for name, mode in (("a.log", 0o644), ("b.log", 0), ("locked/c.log", 0o644)):
        (tmp_path / name).write_text(FULL_DISK)
        (tmp_path / name).chmod(mode)
    (tmp_path / "locked").chmod(0o744)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above are root's
    os.seteuid(65534)
    try:
        assert names(diagnose(".")) == ["disk-full", "record-damaged"]
        with pytest.raises(UserError, match="cannot be read"):
            diagnose("b.log")
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("signal", "exitcode", "name"),
    [
        ("SIGSEGV", -11, "crashed"),
        ("SIGBUS", -7, "crashed"),
        ("SIGABRT", -6, "aborted"),
        (None, 7, "rank-failed"),
    ],
)
def test_a_run_that_failed_is_never_well(
    signal: str | None, exitcode: int, name: str, tmp_path: Path
) -> None:
    error = f"killed by {signal}" if signal else f"exited with {exitcode}"
    fault = Fault(
        attempt=0,
        rank=1,
        signal=signal,
        exitcode=exitcode,
        error=error,
        log="x",
        step=3,
        action="stop",
    )
    EventLog(tmp_path / "events.jsonl").emit(fault)
    (finding,) = diagnose(str(tmp_path))
    assert (
        finding.signature.name == name
        and "not named here" not in finding.cause
        and finding.ranks == (1,)
    )
    assert doctor(str(tmp_path), False, False) == 1
    (tmp_path / "a.log").write_text(f"Traceback\n{FULL_DISK}")
    first = diagnose(str(tmp_path))[0]
    assert first.signature.name == ("crashed" if name == "crashed" else "disk-full")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Segmentation fault (core dumped)", "crashed"),
        ("run.sh: line 3: 4711 Segmentation fault      python train.py", "crashed"),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", "crashed"),
        ("  traceback : Signal 11 (SIGSEGV) received by PID 14750", "crashed"),
        (
            "E1126 10:00:00.0 7 api.py:874] failed (exitcode: -11) local_rank: 3 (pid: 33054) of binary: python",
            "crashed",
        ),
        (
            "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 11 (Segmentation fault).",
            "crashed",
        ),
        ("  exitcode  : -6 (pid: 14750)", "aborted"),
        ("Aborted (core dumped)", "aborted"),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.",
            "loader-killed",
        ),
    ],
)
def test_crashes_as_launchers_report_them(line: str, name: str) -> None:
    assert names(found(f"{line}\n")) == [name]


def test_events_belong_to_their_attempts(tmp_path: Path) -> None:
    """A user's own folder has such a name, too."""
    run = run_folder(tmp_path / "attempt-7", rank_0=FULL_DISK, again_1="fine\n")
    log, start = EventLog(run / "events.jsonl"), START
    fault = {"rank": 1, "signal": None, "exitcode": 1, "log": "x", "step": 3, "action": "restart"}
    log.emit(start)
    log.emit(Fault(attempt=0, error="OSError: [Errno 28] No space left on device", **fault))
    hang = {
        "ranks": [1],
        "seconds": 5.0,
        "limit": 5.0,
        "why": "x",
        "waits": [],
        "collective": None,
        "position": 0,
        "sample_ids": None,
    }
    log.emit(Hang(attempt=1, step=9, rank=1, phase="data", stack=[], **hang))
    log.emit(Fault(attempt=1, error="odd", **fault))
    for _ in range(2):  # the second one goes on after a stop, which is no fault
        log.emit(start)
        log.emit(Nonfinite(step=9, policy="stop", loss=None, grad_norm=None, sample_ids=[7]))
    seen = [(each.evidence.attempt, each.signature.name) for each in diagnose(str(run))]
    assert seen == [(3, "nan"), (2, "nan"), (1, "hang"), (1, "rank-failed"), (0, "disk-full")]
    assert diagnose(str(run))[2].cause == "a rank hung (data)"


@pytest.mark.parametrize(
    "error",
    ["KeyError: 'x'", "numpy.MemoryError: x", "MemoryError", "torch._dynamo.exc.Unsupported: call"],
)
@pytest.mark.parametrize(
    "launcher",
    [
        "",
        "[rank0]: ",
        "[1,3]<stderr>:",
        "3: ",
        " 3: ",
        "(Worker pid=123, ip=10.0.0.1) ",
        "2026-11-26T20:10:11.123Z ",
        "trainer-1  | ",
    ],
)
def test_errors_behind_what_launchers_put_before_a_line(launcher: str, error: str) -> None:
    assert names(found(f"{launcher}{error}\n")) == [
        "host-alloc" if "Memory" in error else "python-error"
    ]


@pytest.mark.parametrize(
    "error",
    [
        "triton.runtime.errors.OutOfResources: x",
        "concurrent.futures.process.BrokenProcessPool: x",
        "subprocess.TimeoutExpired: x",
    ],
)
def test_errors_of_other_names(error: str) -> None:
    assert names(found(f"{error}\n")) == ["python-error"]
    assert names(found("{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0}\n")) == ["nan"]

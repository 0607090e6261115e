"""Watching and hurting a run that is under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.harness import events, survivors


def wait_for(
    run_dir: Path,
    kind: str,
    at_least: int,
    process: subprocess.Popen[Any] | None = None,
    after: float = 0.0,
    timeout: float = 240,
) -> dict[str, Any]:
    """The first event of `kind` written after `after` (unix seconds) with step >= `at_least`.

    Raises AssertionError if none comes.
    """
    deadline = time.time() + timeout
    while time.time() < deadline:
        for event in _whole_lines(run_dir / "events.jsonl"):
            if event["kind"] == kind and event.get("step", 0) >= at_least and event["t"] >= after:
                return event
        if process is not None and process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(
                f"ended with {process.returncode} before {kind} {at_least}:\n{out}\n{err}"
            )
        time.sleep(0.01)
    raise AssertionError(f"no {kind} event with step >= {at_least} within {timeout} s")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def the_event(run_dir: Path, kind: str, **fields: Any) -> dict[str, Any]:
    """Return the only event of a kind, and require the values of these of its fields."""
    (event,) = events(run_dir, kind)
    for name, value in fields.items():
        assert event[name] == value, event
    return event


def wait_until(
    came: Callable[[], object], seconds: float, process: subprocess.Popen[Any] | None = None
) -> None:
    """Return once `came()` is true, and at the latest after `seconds` or when the process ends."""
    deadline = time.monotonic() + seconds
    while not came() and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            return
        time.sleep(0.02)


def ranks_of(run_dir: Path) -> dict[int, int]:
    """Rank → process id of the run in `run_dir`: whose output goes to logs/attempt-A/rank-R.out,
    and whose parent's does not."""
    parents: dict[int, int] = {}
    outputs: dict[int, Path] = {}
    for process in psutil.process_iter(["ppid"]):
        parents[process.pid] = process.info["ppid"]
        outputs[process.pid] = _output(process.pid)

    folder = run_dir.resolve()

    found: dict[int, int] = {}
    for pid, output in outputs.items():
        is_ours = output.suffix == ".out" and folder in output.parents
        if is_ours and outputs.get(parents[pid]) != output:
            rank = int(output.stem.removeprefix("rank-"))
            found[rank] = pid
    return found


def _output(pid: int) -> Path:
    """Where a process prints to; an empty path for one that has ended."""
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return Path()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def gone(marker: str | Path, within: float) -> bool:
    """No process names `marker` on its command line any more, `within` seconds from now."""
    deadline = time.time() + within
    while survivors(str(marker)):
        if time.time() > deadline:
            return False
        time.sleep(0.05)
    return True

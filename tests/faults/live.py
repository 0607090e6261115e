"""Watching and hurting a run that is under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil


def wait_for(
    run_dir: Path,
    kind: str,
    at_least: int,
    process: subprocess.Popen[Any] | None = None,
    after: float = 0.0,
    timeout: float = 240,
) -> dict[str, Any]:
    """The first event of `kind` written after `after` (unix seconds) with step >= `at_least`; AssertionError if none comes."""
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
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def ranks_of(run_dir: Path) -> dict[int, int]:
    """Rank → process id of the run in `run_dir`: whose output goes to logs/attempt-A/rank-R.out, and whose parent's does not."""
    found: dict[int, int] = {}
    outputs = {
        process.pid: (process.info["ppid"], _output(process.pid))
        for process in psutil.process_iter(["ppid"])
    }
    for pid, (parent, output) in outputs.items():
        ours = output.suffix == ".out" and run_dir.resolve() in output.parents
        if ours and outputs.get(parent, (0, Path()))[1] != output:
            found[int(output.stem.removeprefix("rank-"))] = pid
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


def gone(marker: str, within: float) -> bool:
    """No process names `marker` on its command line any more, `within` seconds from now."""
    from tests.harness import survivors

    deadline = time.time() + within
    while survivors(marker):
        if time.time() > deadline:
            return False
        time.sleep(0.05)
    return True

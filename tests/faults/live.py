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
    run_dir: Path, kind: str, at_least: int, process: subprocess.Popen[Any] | None = None, after: float = 0.0, timeout: float = 240
) -> dict[str, Any]:
    """The first event of `kind` written after `after` (unix seconds) with step >= `at_least`; AssertionError if none comes."""
    deadline = time.time() + timeout
    while time.time() < deadline:
        for event in _whole_lines(run_dir / "events.jsonl"):
            if event["kind"] == kind and event.get("step", 0) >= at_least and event["t"] >= after:
                return event
        if process is not None and process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"ended with {process.returncode} before {kind} {at_least}:\n{out}\n{err}")
        time.sleep(0.01)
    raise AssertionError(f"no {kind} event with step >= {at_least} within {timeout} s")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def ranks_of(run_dir: Path) -> dict[int, int]:
    """Rank → process id of the workers of the run in `run_dir`. What they print goes to logs/attempt-A/rank-R.out: one that was started
    before there was a plan was told its rank later."""
    found: dict[int, int] = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if "drumline.train.entry" in line and any(str(run_dir) in part for part in line):
            try:
                log = Path(f"/proc/{process.info['pid']}/fd/1").readlink().name
            except FileNotFoundError:  # it has ended
                continue
            if log.endswith(".out"):
                found[int(log.removeprefix("rank-").removesuffix(".out"))] = process.info["pid"]
    return found


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

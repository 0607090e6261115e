"""Runs on several hosts: their configs, how they end, and the same run on this machine alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline_hosts.timing import SILENT_SECONDS
from tests.faults.live import wait_for
from tests.faults.test_launch import require_end as require_code
from tests.faults.test_launch import toy
from tests.forks import Forked
from tests.harness import ENV, ROOT, events, losses, same_weights, write_config
from tests.hosts.namespaces import Host, ended
from tests.tiny import tiny_model_dir

TRAIN = (sys.executable, "-m", "drumline", "train")
PACE = f"{ROOT}/tests/hosts/pace.py:Pace"
SLOW = "2"  # seconds of a step, for as long as hosts go and come
STEPS = 60
TRAINER = "drumline.train.entry"  # on the command lines of ranks
# The secret of the launcher and its agents, which is in their memory alone.
SECRET = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def train_here(path: Path, run: Path, ranks: int) -> Path:
    """Do the same run by ranks of this machine, and return its folder."""
    launch = f"launch: {{nproc: {ranks}}}\n"
    text = re.sub(r"launch:\n(  .*\n|- .*\n)*", launch, path.read_text())
    here = path.with_name("here.yaml")
    here.write_text(text)

    line = [*TRAIN, str(here), f"run.dir={run}"]
    done = subprocess.run(line, env=ENV, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return run


def require_end(process: subprocess.Popen[str], code: int, timeout: float = 120) -> str:
    """Assert that a process ends with an exit code, and return its output."""
    found, out = ended(process, timeout)
    assert found == code, out
    return out


def start_launcher(plan: Path, worker: str) -> Forked:
    """Start the launcher of several hosts with another module as its ranks."""
    return Forked("plugins.hosts.tests.launcher", plan, worker, env=ENV, cwd=ROOT)


def start_stepping(run: Path, behave: dict[str, Any], **launch: Any) -> Forked:
    """Start two ranks that only step, each on a host of its own."""
    plan = toy(run, json.dumps(behave), **launch)
    return start_launcher(plan, "tests.faults.stepping_worker")


def start_endless(run: Path, **launch: Any) -> Forked:
    """Start such ranks without an end, and wait for their third step."""
    process = start_stepping(run, {"steps": 100000}, **launch, max_restarts=2)
    wait_for(run, "eval", 3, process)
    return process


def stop_after_restart(run: Path, process: Forked) -> None:
    """Stop a run by SIGTERM once it goes on after its fault, and assert that it saves."""
    again = wait_for(run, "restore", 0, process)
    wait_for(run, "eval", again["step"] + 1, process, after=again["t"])
    process.send_signal(signal.SIGTERM)
    require_code(process, 75)


def read_rank(run: Path, rank: int) -> psutil.Process:
    """Return the process of a rank that only steps."""
    return psutil.Process(int((run / f"pid-{rank}").read_text()))


def require_fault(run: Path, **expected: object) -> dict[str, Any]:
    """Assert that a run has one fault, with such values, and return its event."""
    (fault,) = events(run, "fault")
    for name, value in expected.items():
        assert fault[name] == value, fault
    return fault


def require_same_losses(run: Path, reference: Path) -> None:
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)


def write_elastic_config(folder: Path, ssh: Path, **launch: Any) -> Path:
    """Write a config of hosts a to d, which come and go. `ssh`: the file for `ssh -F`."""
    over = {
        "kind": "ssh",
        "hosts": ["a:1", "b:1", "c:1", "d:1"],
        "nodes": {"min": 1},
        "options": ["-F", str(ssh)],
        **launch,
    }
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
        rows=60,
        launch=over,
        data={"packing": False, "eval": []},
        run={"steps": STEPS, "callbacks": [PACE]},
        batch={"global_samples": 12, "micro_batch": 3},
        checkpoint={"every": 3},
        optimizer={"lr": 1e-3},
    )


def same_as_alone(path: Path, run: Path) -> None:
    """Assert that a run with hosts that came and went is that of one process.

    It took every sample once, in the same order and with the same learning rate.
    """
    reference = train_here(path, path.with_name("alone"), 1)
    for name in ("lr", "tokens", "samples"):
        assert by_step(run, name) == by_step(reference, name)
    assert losses(run).keys() == set(range(1, STEPS + 1))
    require_same_losses(run, reference)
    same_weights(run, reference, 1e-5)


def by_step(run: Path, name: str) -> dict[int, Any]:
    return {event["step"]: event[name] for event in events(run, "step")}


def require_no_ranks(host: Host) -> None:
    """Assert that the ranks of a host that is cut off end by themselves."""
    require_none_left([host], [TRAINER], 3 * SILENT_SECONDS)


def require_none_left(found: Sequence[Host], markers: Sequence[str], within: float) -> None:
    """Assert that soon no process of these hosts has one of the markers on its command line."""
    until = time.monotonic() + within
    while left := processes_on(found, markers):
        assert time.monotonic() < until, left
        time.sleep(0.2)


def processes_on(found: Sequence[Host], markers: Sequence[str]) -> list[str]:
    lines = []
    for host in found:
        for marker in markers:
            lines += host.processes(marker)
    return lines


def require_no_secret(found: Iterable[Host], files: Iterable[Path]) -> None:
    """Assert that no secret is on a command line, in a variable or in a file."""
    show = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null || true"
    for host in found:
        assert not SECRET.search(host.run("sh", "-c", show))
    for file in files:
        assert not SECRET.search(file.read_text())

"""`launch: {kind: ssh}` between hosts in namespaces of their own, by a real sshd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline_hosts.timing import SILENT_SECONDS
from plugins.hosts.tests.runs import (
    PACE,
    SLOW,
    TRAINER,
    require_end,
    require_fault,
    require_no_ranks,
    require_no_secret,
    require_none_left,
    require_same_losses,
    train_here,
)
from tests.faults.live import wait_for
from tests.harness import ENV, events, read_json, same_weights, write_config
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full
LAUNCHER = "-m drumline train"
ENDLESS = {"steps": 100000}


@dataclass
class Pair:
    """Hosts a and b, and the folder of a test for their run."""

    a: Host
    b: Host
    model: Path
    folder: Path

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.config = self.folder / "config.yaml"

    def write_config(self, launch: Mapping[str, Any] | None = None, **sections: Any) -> Path:
        """Write a config for one rank on each host."""
        over = {
            "kind": "ssh",
            "hosts": ["a:1", "b:1"],
            "options": ["-F", str(self.a.ssh_config)],
            "preflight": False,
        }
        over.update(launch or {})

        values: dict[str, Any] = {
            "launch": over,
            "data": {"packing": False, "eval": []},
            "run": {"steps": 8},
        }
        values.update(sections)
        return write_config(self.folder, self.model, **values)

    def start(self, *arguments: object, env: Mapping[str, str] = ENV) -> subprocess.Popen[str]:
        """Start drumline on host a."""
        return self.a.start(sys.executable, "-m", "drumline", *arguments, env=env)

    def start_run(self, step: int, **sections: Any) -> subprocess.Popen[str]:
        """Start a run, and wait until it has taken a step."""
        process = self.start("train", self.write_config(**sections))
        wait_for(self.run, "step", step, process)
        return process

    def fail(self, launch: Mapping[str, Any] | None = None) -> str:
        """Return the output of a run that a user's mistake ends before it has a folder."""
        process = self.start("train", self.write_config(launch))
        out = require_end(process, 2)
        assert not self.run.exists()
        return out

    def require_none_left(self, within: float = 10.0) -> None:
        """Assert that soon no host has a process of this test, or an agent."""
        require_none_left([self.a, self.b], [str(self.folder), "hosts.agent"], within)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    folder = tmp_path_factory.mktemp("net")
    with hosts(folder, ["a", "b"]) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def pair(two: dict[str, Host], model: Path, tmp_path: Path) -> Pair:
    return Pair(two["a"], two["b"], model, tmp_path)


def process_on(host: Host, marker: str) -> str:
    """Return the process id there of the first process with `marker` on its command line."""
    listing = host.run("ps", "-ww", "-eo", "pid,args", "--no-headers")
    for line in listing.splitlines():
        pid, command = line.split(None, 1)
        if marker in command:
            return pid
    raise AssertionError(listing)


def write_python(path: Path, variables: str = "") -> Path:
    """Write a script that is this interpreter, with variables."""
    path.write_text(f'#!/bin/sh\n{variables}exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def file_times(folder: Path) -> dict[Path, float]:
    """Return when each file below a folder was last written, in unix seconds."""
    return {path: path.stat().st_mtime for path in folder.rglob("*")}


def test_same_losses_as_two_ranks_of_one_machine(pair: Pair) -> None:
    path = pair.write_config({"preflight": True})
    require_end(pair.start("train", path), 0, 280)

    reference = train_here(path, pair.folder / "local", 2)
    require_same_losses(pair.run, reference)
    pair.require_none_left()


def test_bench_runs_on_one_host_and_on_two(pair: Pair) -> None:
    """The batch grows with the hosts, and `--nproc` overrides the devices that the YAML gives."""
    path = pair.write_config({"hosts": ["a:2", "b:2"]}, batch={"global_samples": 2})
    folder = pair.folder / "bench"
    sizes = ("--nodes", "1,2", "--nproc", "1", "--weak", "--rounds", "1", "--steps", "2")
    out = require_end(pair.start("bench", path, *sizes, "--to", folder), 0, 280)

    rows = read_json(folder / "bench.json")["rows"]
    assert [len(row["rounds"]) for row in rows] == [1, 1], out

    one = read_json(folder / "config-1x1-round1" / "plan.json")
    assert one["batch"]["global_samples"] == 2
    assert one["config"]["launch"]["hosts"] == ["a"]

    both = read_json(folder / "config-2x1-round1" / "plan.json")
    assert both["batch"]["global_samples"] == 4
    assert both["config"]["launch"]["hosts"] == ["a", "b"]
    pair.require_none_left()


def test_the_doctor_looks_at_both_hosts(pair: Pair) -> None:
    path = pair.write_config()
    _, out = ended(pair.start("doctor", path, "--bandwidth", "--json"), 280)

    report = json.loads(out[out.index("{") :])
    verdicts = {}
    for host in report["hosts"]:
        for check in host["checks"]:
            on_host = verdicts.setdefault(host["name"], {})
            on_host[check["name"]] = check["verdict"]

    assert verdicts.keys() == {"a", "b", "all"}, out
    assert {"versions", "peer name", "run folder", "model", "data"} <= verdicts["b"].keys(), out
    assert verdicts["all"].keys() == {"hosts", "all-reduce", "clocks", "a ↔ b"}, out

    for name in ("hosts", "all-reduce", "clocks"):
        assert verdicts["all"][name] == "ok", out
    pair.require_none_left()


def test_a_killed_rank_is_named_with_its_host_and_the_losses_are_the_same(pair: Pair) -> None:
    # It has not ended before it is killed, however slow this test is.
    slow = pair.folder / "slow"
    slow.write_text(SLOW)
    steps = {"steps": 20, "callbacks": [PACE]}
    process = pair.start_run(5, checkpoint={"every": 3}, run=steps)

    pair.b.run("kill", "-9", process_on(pair.b, TRAINER))
    slow.unlink()

    out = require_end(process, 0, 280)
    require_fault(pair.run, rank=1, host="b", signal="SIGKILL", action="restart")
    assert "rank 1 on host b: killed by SIGKILL" in out

    reference = train_here(pair.config, pair.folder / "local", 2)
    require_same_losses(pair.run, reference)
    same_weights(pair.run, reference, 1e-5)
    pair.require_none_left()


def test_a_host_that_is_cut_off_is_noticed_and_writes_nothing_any_more(pair: Pair) -> None:
    no_restart = {"max_restarts": 0}
    process = pair.start_run(5, launch=no_restart, checkpoint={"every": 1}, run=ENDLESS)

    pair.b.link(up=False)
    try:
        cut = time.time()
        out = require_end(process, 1)
        fault = require_fault(pair.run, rank=1, host="b")
        assert "its host has given no sign" in fault["error"]
        assert "cut off" in out
        assert fault["t"] - cut < 3 * 10

        require_no_ranks(pair.b)
        times = file_times(pair.run)
        time.sleep(2.0)
        assert file_times(pair.run) == times
    finally:
        pair.b.link(up=True)
    pair.require_none_left(30.0)


def test_sigterm_saves_on_all_hosts(pair: Pair) -> None:
    process = pair.start_run(5, run=ENDLESS)

    pair.a.run("kill", "-TERM", process_on(pair.a, LAUNCHER))

    out = require_end(process, 75)
    assert events(pair.run, "preempt"), out
    pair.require_none_left()


def test_a_killed_launcher_leaves_nothing(pair: Pair) -> None:
    process = pair.start_run(3, run=ENDLESS)

    pair.a.run("kill", "-KILL", process_on(pair.a, LAUNCHER))

    ended(process, 60)
    pair.require_none_left(3 * SILENT_SECONDS)


def test_another_torch_on_a_host_is_one_line(pair: Pair) -> None:
    folder = pair.folder
    info = folder / "fake" / "torch-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")

    python = write_python(folder / "python")
    other = write_python(folder / "other-python", f"PYTHONPATH={folder}/fake:$PYTHONPATH ")
    pair.b.run("mount", "--bind", other, python)

    out = pair.fail({"python": str(python)})
    assert out.count("error:") == 1, out
    assert "host b has torch 9.9, and this one" in out
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        (
            {"hosts": ["a:1", "no-such-host.invalid:1"]},
            "the host 'no-such-host.invalid' has no address",
        ),
        (
            {"options": ["-F", "WRONG", "-o", "ConnectionAttempts=1"]},
            "host b: .*Permission denied",
        ),
        ({"workdir": "/no/such/folder"}, "/no/such/folder"),
        ({"interface": "eth7"}, "this host has no interface 'eth7' with an address"),
    ],
)
def test_a_mistake_is_one_line(launch: dict[str, Any], line: str, pair: Pair) -> None:
    """Each mistake of the section `launch` ends the command before the run has a folder.

    WRONG is a file for ssh with a key that the hosts do not know.
    """
    if "options" in launch:
        wrong = write_wrong_ssh_config(pair)
        options = [option.replace("WRONG", wrong) for option in launch["options"]]
        launch = {"options": options}

    out = pair.fail(launch)
    (error,) = re.findall("^error:.*", out, re.MULTILINE)
    assert re.search(line, error), out
    assert "Traceback" not in out
    pair.require_none_left()


def write_wrong_ssh_config(pair: Pair) -> str:
    """Return a file for `ssh -F` with a new key."""
    key = str(pair.folder / "wrong")
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key]
    subprocess.run(command, check=True, timeout=60)

    right = pair.a.ssh_config
    wrong = pair.folder / "ssh_config"
    wrong.write_text(right.read_text().replace(f"{right.parent}/id", key))
    return str(wrong)


def test_files_of_the_model_that_differ_are_named_with_their_host(pair: Pair) -> None:
    other = pair.folder / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")

    pair.b.run("mount", "--bind", other, pair.model)
    try:
        out = pair.fail()
    finally:
        pair.b.run("umount", pair.model)
    assert f"error: {pair.model}: host b has other files there" in out


def test_a_dry_run_says_what_would_be_run_on_each_host(pair: Pair) -> None:
    env = {**ENV, "NCCL_DEBUG": "WARN", "NCCL_TIMEOUT": "1800"}
    path = pair.write_config()
    out = require_end(pair.start("train", path, "--dry-run", env=env), 0)

    assert "# host b: ssh -o BatchMode=yes" in out
    assert "drumline_hosts.agent" in out
    assert "# host a: " in out
    assert "# environment NCCL_DEBUG=WARN" in out
    assert "NCCL_TIMEOUT=1800 is read by nobody: launch.timeout_seconds" in out
    assert "#   ranks 1 to 1 of 2: " in out
    pair.require_none_left()
    assert not pair.run.exists()


def test_no_secret_is_on_a_command_line_or_in_a_file(pair: Pair) -> None:
    process = pair.start_run(3, run=ENDLESS)

    try:
        require_no_secret((pair.a, pair.b), pair.run.rglob("*.log"))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    pair.require_none_left(3 * SILENT_SECONDS)

"""`launch: {kind: ssh}` between hosts in namespaces of their own, by a real sshd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline_hosts.timing import SILENT_SECONDS
from tests.faults.live import wait_for
from tests.harness import ENV, ROOT, events, losses, same_weights, write_config
from tests.hosts.namespaces import Host, ended, hosts
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full
TRAIN = (sys.executable, "-m", "drumline", "train")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    folder = tmp_path_factory.mktemp("net")
    with hosts(folder, ["a", "b"]) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def ssh(two: dict[str, Host]) -> Path:
    """The file for `ssh -F`."""
    return two["a"].ssh_config


def config(
    folder: Path, model: Path, ssh: Path, launch: dict[str, Any] | None = None, **sections: Any
) -> Path:
    over = {
        "kind": "ssh",
        "hosts": ["a:1", "b:1"],
        "options": ["-F", str(ssh)],
        "preflight": False,
        **(launch or {}),
    }
    return write_config(
        folder,
        model,
        launch=over,
        **{"data": {"packing": False, "eval": []}, "run": {"steps": 8}, **sections},
    )


def local(path: Path, run: Path) -> Path:
    """The same run by two ranks of this machine, whose losses are those to come to."""
    text = re.sub(r"launch:\n(  .*\n|- .*\n)*", "launch: {nproc: 2}\n", path.read_text())
    path.with_name("local.yaml").write_text(text)
    line = [*TRAIN, str(path.with_name("local.yaml")), f"run.dir={run}"]
    done = subprocess.run(line, env=ENV, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return run


def left(two: dict[str, Host], run: Path, within: float = 10.0) -> list[str]:
    """What is left of a run on any host."""
    until, lines = time.monotonic() + within, [""]
    while lines and time.monotonic() < until:
        lines = [
            line
            for host in two.values()
            for marker in (str(run), "hosts.agent")
            for line in host.processes(marker)
        ]
        time.sleep(0.2)
    return lines


def rank_on(host: Host) -> int:
    """The process id there of its rank."""
    found = [
        line.split(None, 1)
        for line in host.run("ps", "-ww", "-eo", "pid,args", "--no-headers").splitlines()
        if "drumline.train.entry" in line
    ]
    assert found, host.run("ps", "-ww", "-eo", "pid,ppid,args", "--no-headers")
    return int(found[0][0])


def test_same_losses_as_two_ranks_of_one_machine(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, model, ssh, launch={"preflight": True})
    code, out = ended(two["a"].start(*TRAIN, path), 280)
    assert code == 0, out
    assert losses(tmp_path / "run") == pytest.approx(
        losses(local(path, tmp_path / "local")), rel=1e-5
    )
    assert not left(two, tmp_path / "run")


def test_bench_runs_on_one_host_and_on_two(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    """The batch grows with the hosts, and `--nproc` counts, not the devices that the YAML gives a host."""
    path = config(tmp_path, model, ssh, {"hosts": ["a:2", "b:2"]}, batch={"global_samples": 2})
    line = (
        "bench",
        path,
        "--nodes",
        "1,2",
        "--nproc",
        "1",
        "--weak",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--to",
        tmp_path / "bench",
    )
    code, out = ended(two["a"].start(sys.executable, "-m", "drumline", *line), 280)
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert code == 0 and [len(row["rounds"]) for row in rows] == [1, 1], out
    plans = [
        json.loads((tmp_path / "bench" / f"config-{nodes}x1-round1" / "plan.json").read_text())
        for nodes in (1, 2)
    ]
    assert [
        (plan["batch"]["global_samples"], plan["config"]["launch"]["hosts"]) for plan in plans
    ] == [(2, ["a"]), (4, ["a", "b"])]
    assert not left(two, tmp_path / "bench")


def test_the_doctor_looks_at_both_hosts(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, model, ssh)
    _, out = ended(
        two["a"].start(sys.executable, "-m", "drumline", "doctor", path, "--bandwidth", "--json"),
        280,
    )
    found = {
        host["name"]: {check["name"]: check for check in host["checks"]}
        for host in json.loads(out[out.index("{") :])["hosts"]
    }
    assert (
        found.keys() == {"a", "b", "all"}
        and {"versions", "peer name", "run folder", "model", "data"} <= found["b"].keys()
    ), out
    assert found["all"].keys() == {"hosts", "all-reduce", "clocks", "a ↔ b"}, out
    assert all(
        found["all"][name]["verdict"] == "ok" for name in ("hosts", "all-reduce", "clocks")
    ), out
    assert not left(two, path)


def test_a_killed_rank_is_named_with_its_host_and_the_losses_are_the_same(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    steps = {"steps": 20, "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"]}
    path, run = config(tmp_path, model, ssh, checkpoint={"every": 3}, run=steps), tmp_path / "run"
    # It has not ended before it is killed, however slow this test is.
    (tmp_path / "slow").write_text("2")
    process = two["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    two["b"].run("kill", "-9", rank_on(two["b"]))
    (tmp_path / "slow").unlink()
    code, out = ended(process, 280)
    assert code == 0, out
    (fault,) = events(run, "fault")
    assert (fault["rank"], fault["host"], fault["signal"], fault["action"]) == (
        1,
        "b",
        "SIGKILL",
        "restart",
    ), out
    assert "rank 1 on host b: killed by SIGKILL" in out
    reference = local(path, tmp_path / "local")
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    same_weights(run, reference, 1e-5)
    assert not left(two, run)


def test_a_host_that_is_cut_off_is_noticed_and_writes_nothing_any_more(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    path = config(
        tmp_path,
        model,
        ssh,
        launch={"max_restarts": 0},
        checkpoint={"every": 1},
        run={"steps": 100000},
    )
    run = tmp_path / "run"
    process = two["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    two["b"].link(up=False)
    try:
        cut = time.time()
        code, out = ended(process, 120)
        (fault,) = events(run, "fault")
        assert code == 1 and (fault["rank"], fault["host"]) == (1, "b"), out
        assert "its host has given no sign" in fault["error"] and "cut off" in out
        assert fault["t"] - cut < 3 * 10
        until = time.time() + 3 * SILENT_SECONDS
        while two["b"].processes("drumline.train.entry"):
            assert time.time() < until, "the ranks of the host that was cut off end by themselves"
            time.sleep(0.2)
        seen = {each: each.stat().st_mtime for each in run.rglob("*")}
        time.sleep(2.0)
        assert {each: each.stat().st_mtime for each in run.rglob("*")} == seen
    finally:
        two["b"].link(up=True)
    assert not left(two, run, 30.0)


def test_sigterm_saves_on_all_hosts(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, model, ssh, run={"steps": 100000})
    run = tmp_path / "run"
    process = two["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    launcher = next(
        line.split()[0]
        for line in two["a"].run("ps", "-ww", "-eo", "pid,args").splitlines()
        if "-m drumline train" in line
    )
    two["a"].run("kill", "-TERM", launcher)
    code, out = ended(process, 120)
    assert code == 75 and events(run, "preempt"), out
    assert not left(two, run)


def test_a_killed_launcher_leaves_nothing(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, model, ssh, run={"steps": 100000})
    process = two["a"].start(*TRAIN, path)
    wait_for(tmp_path / "run", "step", 3, process)
    launcher = next(
        line.split()[0]
        for line in two["a"].run("ps", "-ww", "-eo", "pid,args").splitlines()
        if "-m drumline train" in line
    )
    two["a"].run("kill", "-KILL", launcher)
    ended(process, 60)
    assert not left(two, tmp_path / "run", 3 * SILENT_SECONDS)


def other_torch(folder: Path) -> Path:
    """An interpreter that has another version of torch, as far as its packages say."""
    info = folder / "fake" / "torch-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    python = folder / "other-python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={folder}/fake:$PYTHONPATH exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def test_another_torch_on_a_host_is_one_line(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    two["b"].run("mount", "--bind", other_torch(tmp_path), python)
    code, out = ended(
        two["a"].start(*TRAIN, config(tmp_path, model, ssh, launch={"python": str(python)})), 120
    )
    assert (
        code == 2
        and out.count("error:") == 1
        and "host b has torch 9.9, and this one" in out
        and "Traceback" not in out
    ), out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ({"hosts": ["a:1", "no-such-host.invalid:1"]}, "the host 'no-such-host.invalid' has no address"),
        ({"options": ["-F", "SSH", "-o", "IdentityFile=WRONG"]}, "host b: .*Permission denied"),
        ({"workdir": "/no/such/folder"}, "/no/such/folder"),
        ({"interface": "eth7"}, "this host has no interface 'eth7' with an address"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    launch: dict[str, Any], line: str, two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "wrong")],
        check=True,
        timeout=60,
    )
    wrong = tmp_path / "ssh_config"
    wrong.write_text(ssh.read_text().replace(f"{ssh.parent}/id", str(tmp_path / "wrong")))
    places = {"SSH": str(wrong), "IdentityFile=WRONG": "ConnectionAttempts=1"}
    launch = {
        key: [places.get(v, v) for v in value]
        if isinstance(value, list)
        else places.get(value, value)
        for key, value in launch.items()
    }
    code, out = ended(two["a"].start(*TRAIN, config(tmp_path, model, ssh, launch=launch)), 120)
    assert code == 2, out
    errors = [each for each in out.splitlines() if each.startswith("error:")]
    assert len(errors) == 1 and re.search(line, errors[0]) and "Traceback" not in out, out
    assert not (tmp_path / "run").exists() and not left(two, tmp_path / "run")


def test_files_of_the_model_that_differ_are_named_with_their_host(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    two["b"].run("mount", "--bind", other, model)
    try:
        code, out = ended(two["a"].start(*TRAIN, config(tmp_path, model, ssh)), 120)
    finally:
        two["b"].run("umount", model)
    assert code == 2 and f"error: {model}: host b has other files there" in out, out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_would_be_run_on_each_host(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    env = {**ENV, "NCCL_DEBUG": "WARN", "NCCL_TIMEOUT": "1800"}
    code, out = ended(
        two["a"].start(*TRAIN, config(tmp_path, model, ssh), "--dry-run", env=env), 120
    )
    assert code == 0, out
    assert (
        "# host b: ssh -o BatchMode=yes" in out
        and "drumline_hosts.agent" in out
        and "# host a: " in out
    )
    assert (
        "# environment NCCL_DEBUG=WARN" in out
        and "NCCL_TIMEOUT=1800 is read by nobody: launch.timeout_seconds" in out
    )
    assert (
        "#   ranks 1 to 1 of 2: " in out
        and not left(two, tmp_path / "run")
        and not (tmp_path / "run").exists()
    )


def test_no_secret_is_on_a_command_line_or_in_a_file(
    two: dict[str, Host], ssh: Path, model: Path, tmp_path: Path
) -> None:
    """The secret of the launcher is in the memory of its agents alone."""
    path = config(tmp_path, model, ssh, run={"steps": 100000})
    process = two["a"].start(*TRAIN, path)
    wait_for(tmp_path / "run", "step", 3, process)
    try:
        hexes = r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])"
        shown = "".join(
            host.run(
                "sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null || true"
            )
            for host in two.values()
        )
        assert not re.search(hexes, shown)
        for file in (tmp_path / "run").rglob("*.log"):
            assert not re.search(hexes, file.read_text())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not left(two, tmp_path / "run", 3 * SILENT_SECONDS)

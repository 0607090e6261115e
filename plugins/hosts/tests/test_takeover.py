"""The host with the launcher and the store goes, too: another one takes over, one alone, and the run is that of one host left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from plugins.hosts.tests.runs import (
    STEPS,
    TRAIN,
    require_no_ranks,
    same_as_alone,
    train_here,
    write_elastic_config,
)
from tests.faults.live import wait_for
from tests.harness import ENV, events, losses, same_weights
from tests.hosts.namespaces import Host, await_sshd, ended, hosts

pytestmark = pytest.mark.full
STORE = "http://d:5555"
STORE_ENV = {
    "AWS_ENDPOINT_URL": STORE,
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}
SLOW = "2"  # seconds of a step, for as long as hosts go and come
GONE_SECONDS = 3 * 60.0  # that agents look for another launcher


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b", "c", "d"], STORE_ENV) as made:
        yield made


@pytest.fixture
def four(net: dict[str, Host]) -> Iterator[dict[str, Host]]:
    """All up, whatever the test did."""
    yield net
    for host in net.values():
        if host.dead:
            host.boot()
            await_sshd(host)
        host.link(up=True)


def wait_for_end(found: list[Host], run: Path) -> None:
    """A run whose launcher is not this process's child has finished, and nothing of it is left on these hosts."""
    assert wait_for(run, "run_end", STEPS)["status"] == "finished"
    none_left(found)
    assert not (run / "run.lock").exists()


def none_left(found: list[Host]) -> None:
    """Soon no process is left on these hosts; an agent that has lost its launcher looks for another meanwhile."""
    until, left = time.time() + GONE_SECONDS, [""]
    while left and time.time() < until:
        left = [line for host in found for line in host.processes("-m drumline")]
        time.sleep(0.2)
    assert not left


def test_the_launcher_s_host_dies_and_comes_back_and_the_next_one_dies(
    four: dict[str, Host], tmp_path: Path
) -> None:
    path, run = write_elastic_config(tmp_path, four["a"].ssh_config), tmp_path / "run"
    (tmp_path / "slow").write_text(SLOW)
    process = four["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    died = time.time()
    four["a"].die()
    process.communicate(timeout=60)
    taken = wait_for(run, "takeover", 0)
    assert (
        taken["host"] in "bcd"
        and taken["from"] == "a"
        and taken["why"] == "the lease of the run folder"
        and taken["t"] > died
    )
    assert wait_for(run, "run_start", 0, after=taken["t"])["world_size"] == 3
    four["a"].boot()
    await_sshd(four["a"])
    again = wait_for(run, "save", 0, after=time.time())
    grown = wait_for(run, "run_start", 0, after=again["t"])
    assert grown["world_size"] == 4
    wait_for(run, "step", 0, after=grown["t"])
    four[taken["host"]].die()
    second = wait_for(run, "takeover", 0, after=grown["t"])
    assert second["from"] == taken["host"] != second["host"]
    assert wait_for(run, "run_start", 0, after=second["t"])["world_size"] == 3
    left = [host for host in four.values() if not host.dead]
    hexes = r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])"  # the secret of the agents, which the new launcher has, too
    for host in left:
        assert not re.search(
            hexes,
            host.run(
                "sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null || true"
            ),
        )
    assert not [
        path
        for path in (*run.glob("run.lock*"), *run.glob("logs/*.log"))
        if re.search(hexes, path.read_text())
    ]
    (tmp_path / "slow").unlink()
    wait_for_end(left, run)
    assert len(events(run, "takeover")) == 2
    said = (run / "logs" / f"launcher-{taken['host']}.log").read_text()
    assert (
        f"host {taken['host']} goes on with the run" in said and "goes on with 3 of 4 hosts" in said
    )
    same_as_alone(path, run)


def test_the_launcher_s_host_is_cut_off_and_keeps_the_lease(
    four: dict[str, Host], tmp_path: Path
) -> None:
    """Its disk is not cut off: no other host gets the folder, and those that are cut off from the launcher have no ranks."""
    path, run = write_elastic_config(tmp_path, four["a"].ssh_config), tmp_path / "run"
    (tmp_path / "slow").write_text(SLOW)
    process = four["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    cut = time.time()
    four["a"].link(up=False)
    for name in "bcd":
        require_no_ranks(four[name])
    shrunk = wait_for(run, "run_start", 0, process, after=cut)
    assert shrunk["world_size"] == 1
    wait_for(run, "save", 0, process, after=shrunk["t"])
    four["a"].link(up=True)
    grown = wait_for(run, "run_start", 0, process, after=shrunk["t"] + 1)
    while grown["world_size"] < 4:  # they may come one after the other
        grown = wait_for(run, "run_start", 0, process, after=grown["t"] + 1)
    (tmp_path / "slow").unlink()
    code, out = ended(process, 280)
    assert code == 0 and not events(run, "takeover"), out
    same_as_alone(path, run)


def test_a_launcher_that_is_cut_off_from_most_leaves_the_run_to_them(
    four: dict[str, Host], tmp_path: Path
) -> None:
    path, run = (
        write_elastic_config(tmp_path, four["a"].ssh_config, nodes={"min": 2}),
        tmp_path / "run",
    )
    (tmp_path / "slow").write_text(SLOW)
    process = four["a"].start(*TRAIN, path)
    wait_for(run, "step", 5, process)
    four["a"].link(up=False)
    code, out = ended(process, GONE_SECONDS)
    assert code == 1 and "error: 1 host of 4 is there: left to the others" in out, out
    none_left([four["a"]])
    taken = wait_for(run, "takeover", 0)
    assert wait_for(run, "run_start", 0, after=taken["t"])["world_size"] == 3
    (tmp_path / "slow").unlink()
    wait_for_end([four[name] for name in "bcd"], run)
    same_as_alone(path, run)


def apart(folder: Path, four: dict[str, Host]) -> dict[str, Path]:
    """Host → its run folder, each on a disk of its own at one place."""
    (folder / "own").mkdir()
    for name, host in four.items():
        (folder / name).mkdir()
        (folder / name / "slow").write_text(SLOW)
        host.run("mount", "--bind", folder / name, folder / "own")
    return {name: folder / name / "run" for name in four}


def apart_config(folder: Path, ssh: Path, keep: str = "replicas: 1") -> Path:
    path = write_elastic_config(folder, ssh)
    text = path.read_text().replace(f"dir: {folder}/run", f"dir: {folder}/own/run")
    path.write_text(
        text.replace("every: 3", f"every: 3\n  {keep}").replace("export: none", "export: last")
    )
    return path


@contextmanager
def store(host: Host) -> Iterator[None]:
    """One that speaks S3, on a host, with a bucket."""
    # It writes a line for each request, and would wait for ever once nobody reads a pipe that is full.
    port = STORE.rpartition(":")[2]
    process = host.start(
        *("bash", "-c", f"exec {sys.executable} -m moto.server -H 0.0.0.0 -p {port} &> /dev/null")
    )
    make = f"import urllib.request as u; u.urlopen(u.Request('{STORE}/bucket', method='PUT'), timeout=10)"
    try:
        until = time.time() + 60
        while time.time() < until:
            with suppress(subprocess.CalledProcessError):
                host.run(sys.executable, "-c", make)
                break
            time.sleep(0.2)
        yield
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def unmount(folder: Path, found: list[Host]) -> None:
    for host in found:
        host.run("umount", "-l", folder / "own")


@pytest.mark.parametrize("keep", ["replicas: 1", "url: s3://bucket/one"])
def test_without_a_shared_folder_a_majority_goes_on(
    four: dict[str, Host], tmp_path: Path, keep: str
) -> None:
    with nullcontext() if keep.startswith("replicas") else store(four["d"]):
        a_majority_goes_on(four, tmp_path, keep)


def a_majority_goes_on(four: dict[str, Host], tmp_path: Path, keep: str) -> None:
    path, runs = apart_config(tmp_path, four["a"].ssh_config, keep), apart(tmp_path, four)
    process = four["a"].start(*TRAIN, path, env=ENV | STORE_ENV)
    wait_for(runs["a"], "step", 5, process)
    four["a"].die()
    process.communicate(timeout=60)
    others = [four[name] for name in "bcd"]
    try:
        taken = next(iter(taken_over(runs)))
        run = runs[taken["host"]]
        assert taken["from"] == "a" and taken["why"] == "votes of a majority, term 2"
        assert wait_for(run, "run_start", 0)["world_size"] == 3
        for name in "bcd":
            (tmp_path / name / "slow").unlink()
        wait_for_end(others, run)
    finally:
        unmount(tmp_path, others)
    assert (
        sum(
            len(events(each, "takeover"))
            for each in runs.values()
            if (each / "events.jsonl").exists()
        )
        == 1
    )
    path.write_text(path.read_text().replace(f"  {keep}\n", ""))
    reference = train_here(path, tmp_path / "alone", 1)
    assert {**losses(runs["a"]), **losses(run)} == pytest.approx(losses(reference), rel=1e-5)
    same_weights(run, reference, 1e-5)


def taken_over(runs: dict[str, Path]) -> list[dict[str, Any]]:
    """The first of such events on any disk."""
    until, found = time.time() + GONE_SECONDS, list[dict[str, Any]]()
    while not found:
        found = [
            event
            for run in runs.values()
            if (run / "events.jsonl").exists()
            for event in events(run, "takeover")
        ]
        assert time.time() < until
        time.sleep(0.2)
    return found


def test_a_side_without_a_majority_stops(four: dict[str, Host], tmp_path: Path) -> None:
    path, runs = apart_config(tmp_path, four["a"].ssh_config), apart(tmp_path, four)
    process = four["a"].start(*TRAIN, path)
    wait_for(runs["a"], "step", 5, process)
    for name in "ab":
        four[name].die()
    process.communicate(timeout=60)
    others = [four[name] for name in "cd"]
    try:
        none_left(others)
    finally:
        unmount(tmp_path, others)
    for name in "cd":
        assert not (runs[name] / "events.jsonl").exists()
        said = (runs[name] / "logs" / f"launcher-{name}.log").read_text()
        assert "fewer than a majority of the 4 hosts that took part last are here" in said

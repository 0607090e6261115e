"""The host with the launcher and the store is lost, too, and another host takes the run over.

The run is that of one host left alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from plugins.hosts.tests.runs import (
    SLOW,
    STEPS,
    TRAIN,
    require_end,
    require_no_ranks,
    require_no_secret,
    require_none_left,
    same_as_alone,
    train_here,
    write_elastic_config,
)
from tests.faults.live import wait_for
from tests.harness import ENV, events, losses, same_weights
from tests.hosts.namespaces import Host, await_sshd, hosts

pytestmark = pytest.mark.full
PORT = "5555"
STORE = f"http://d:{PORT}"
STORE_ENV = {
    "AWS_ENDPOINT_URL": STORE,
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}
MAKE_BUCKET = f"""
import urllib.request
request = urllib.request.Request('{STORE}/bucket', method='PUT')
urllib.request.urlopen(request, timeout=10)
"""
GONE_SECONDS = 3 * 60.0  # that agents look for another launcher


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with hosts(tmp_path_factory.mktemp("net"), ["a", "b", "c", "d"], STORE_ENV) as made:
        yield made


@pytest.fixture
def four(net: dict[str, Host]) -> Iterator[dict[str, Host]]:
    """Four hosts, which are up again after the test."""
    yield net
    for host in net.values():
        if host.dead:
            host.boot()
            await_sshd(host)
        host.link(up=True)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """The file that makes the steps of a shared run folder slow."""
    path = tmp_path / "slow"
    path.write_text(SLOW)
    return path


def start_run(
    four: dict[str, Host], path: Path, run: Path, env: dict[str, str] = ENV
) -> subprocess.Popen[str]:
    """Start a run on host a, and wait for its fifth step."""
    process = four["a"].start(*TRAIN, path, env=env)
    wait_for(run, "step", 5, process)
    return process


def wait_for_end(found: Sequence[Host], run: Path) -> None:
    """Wait until a run whose launcher is no child of this process has ended on these hosts."""
    end = wait_for(run, "run_end", STEPS)
    assert end["status"] == "finished"
    require_run_gone(found)
    assert not (run / "run.lock").exists()


def require_run_gone(found: Sequence[Host]) -> None:
    """Assert that these hosts soon have no process of a run.

    An agent that has lost its launcher looks for another one meanwhile.
    """
    require_none_left(found, ["-m drumline"], GONE_SECONDS)


def require_world_size(run: Path, size: int, after: float = 0.0) -> dict[str, Any]:
    """Assert that the next start of a run has so many ranks, and return its event."""
    start = wait_for(run, "run_start", 0, after=after)
    assert start["world_size"] == size
    return start


def read_launcher_log(run: Path, name: str) -> str:
    """Return what the launcher printed that took a run over on a host."""
    return (run / "logs" / f"launcher-{name}.log").read_text()


def test_the_launcher_s_host_dies_and_comes_back_and_the_next_one_dies(
    four: dict[str, Host], tmp_path: Path, slow: Path
) -> None:
    path = write_elastic_config(tmp_path, four["a"].ssh_config)
    run = tmp_path / "run"
    process = start_run(four, path, run)

    died = time.time()
    four["a"].die()
    process.communicate(timeout=60)

    taken = wait_for(run, "takeover", 0)
    heir = taken["host"]
    assert heir in "bcd"
    assert taken["from"] == "a"
    assert taken["why"] == "the lease of the run folder"
    assert taken["t"] > died
    require_world_size(run, 3, after=taken["t"])

    four["a"].boot()
    await_sshd(four["a"])

    again = wait_for(run, "save", 0, after=time.time())
    grown = require_world_size(run, 4, after=again["t"])
    wait_for(run, "step", 0, after=grown["t"])

    four[heir].die()
    second = wait_for(run, "takeover", 0, after=grown["t"])
    assert second["from"] == heir
    assert second["host"] != heir
    require_world_size(run, 3, after=second["t"])

    left = [host for host in four.values() if not host.dead]
    files = [*run.glob("run.lock*"), *run.glob("logs/*.log")]
    require_no_secret(left, files)  # the new launcher has it, too

    slow.unlink()
    wait_for_end(left, run)
    assert len(events(run, "takeover")) == 2
    log = read_launcher_log(run, heir)
    assert f"host {heir} goes on with the run" in log
    assert "goes on with 3 of 4 hosts" in log
    same_as_alone(path, run)


def test_the_launcher_s_host_is_cut_off_and_keeps_the_lease(
    four: dict[str, Host], tmp_path: Path, slow: Path
) -> None:
    """Its disk is not cut off, so no other host gets the folder.

    Hosts that are cut off from the launcher have no ranks.
    """
    path = write_elastic_config(tmp_path, four["a"].ssh_config)
    run = tmp_path / "run"
    process = start_run(four, path, run)

    cut = time.time()
    four["a"].link(up=False)
    for name in "bcd":
        require_no_ranks(four[name])
    shrunk = wait_for(run, "run_start", 0, process, after=cut)
    assert shrunk["world_size"] == 1
    wait_for(run, "save", 0, process, after=shrunk["t"])

    four["a"].link(up=True)
    start = shrunk
    while start["world_size"] < 4:  # they may come one after the other
        start = wait_for(run, "run_start", 0, process, after=start["t"] + 1)

    slow.unlink()
    out = require_end(process, 0, 280)
    assert not events(run, "takeover"), out
    same_as_alone(path, run)


def test_a_launcher_that_is_cut_off_from_most_leaves_the_run_to_them(
    four: dict[str, Host], tmp_path: Path, slow: Path
) -> None:
    path = write_elastic_config(tmp_path, four["a"].ssh_config, nodes={"min": 2})
    run = tmp_path / "run"
    process = start_run(four, path, run)

    four["a"].link(up=False)
    out = require_end(process, 1, GONE_SECONDS)
    assert "error: 1 host of 4 is there: left to the others" in out
    require_run_gone([four["a"]])

    taken = wait_for(run, "takeover", 0)
    require_world_size(run, 3, after=taken["t"])

    slow.unlink()
    wait_for_end([four[name] for name in "bcd"], run)
    same_as_alone(path, run)


class Apart:
    """A run whose hosts have a folder each, on disks of their own that are mounted at one path."""

    def __init__(self, folder: Path, four: dict[str, Host], keep: str) -> None:
        """Write the config and mount the folders. `keep`: where else the checkpoints are kept."""
        self.folder = folder
        self.four = four
        self.own = folder / "own"
        self.own.mkdir()

        self.runs = {}
        for name, host in four.items():
            disk = folder / name
            disk.mkdir()
            (disk / "slow").write_text(SLOW)
            host.run("mount", "--bind", disk, self.own)
            self.runs[name] = disk / "run"

        self.path = write_elastic_config(folder, four["a"].ssh_config)
        self.replace(f"dir: {folder}/run", f"dir: {self.own}/run")
        self.replace("every: 3", f"every: 3\n  {keep}")
        self.replace("export: none", "export: last")

    def replace(self, old: str, new: str) -> None:
        """Change the config."""
        self.path.write_text(self.path.read_text().replace(old, new))

    def start(self) -> subprocess.Popen[str]:
        """Start the run on host a, and wait for its fifth step."""
        return start_run(self.four, self.path, self.runs["a"], ENV | STORE_ENV)

    def unmount(self, names: str) -> None:
        """Take the disks of such hosts away; a host that is down has none."""
        for name in names:
            self.four[name].run("umount", "-l", self.own)

    def takeovers(self) -> list[dict[str, Any]]:
        """Return such events on any disk."""
        found = []
        for run in self.runs.values():
            if (run / "events.jsonl").exists():
                found += events(run, "takeover")
        return found


@contextmanager
def store(host: Host) -> Iterator[None]:
    """Run a store that speaks S3 on a host, with a bucket."""
    # It writes a line for each request, and would wait for ever once nobody reads a full pipe.
    serve = f"exec {sys.executable} -m moto.server -H 0.0.0.0 -p {PORT} &> /dev/null"
    process = host.start("bash", "-c", serve)
    try:
        until = time.time() + 60
        while time.time() < until:
            with suppress(subprocess.CalledProcessError):
                host.run(sys.executable, "-c", MAKE_BUCKET)
                break
            time.sleep(0.2)
        yield
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("keep", ["replicas: 1", "url: s3://bucket/one"])
def test_without_a_shared_folder_a_majority_goes_on(
    four: dict[str, Host], tmp_path: Path, keep: str
) -> None:
    place: Any = nullcontext()
    if keep.startswith("url"):
        place = store(four["d"])
    with place:
        apart = Apart(tmp_path, four, keep)
        require_majority_goes_on(apart)

    apart.replace(f"  {keep}\n", "")
    reference = train_here(apart.path, tmp_path / "alone", 1)

    (taken,) = apart.takeovers()
    run = apart.runs[taken["host"]]
    found = {**losses(apart.runs["a"]), **losses(run)}
    assert found == pytest.approx(losses(reference), rel=1e-5)
    same_weights(run, reference, 1e-5)


def require_majority_goes_on(apart: Apart) -> None:
    """Assert that hosts b, c and d take the run of a over, and end it."""
    process = apart.start()
    apart.four["a"].die()
    process.communicate(timeout=60)

    try:
        until = time.time() + GONE_SECONDS
        while not apart.takeovers():
            assert time.time() < until
            time.sleep(0.2)

        taken = apart.takeovers()[0]
        run = apart.runs[taken["host"]]
        assert taken["from"] == "a"
        assert taken["why"] == "votes of a majority, term 2"
        require_world_size(run, 3)

        for name in "bcd":
            (apart.folder / name / "slow").unlink()
        wait_for_end([apart.four[name] for name in "bcd"], run)
    finally:
        apart.unmount("bcd")


def test_a_side_without_a_majority_stops(four: dict[str, Host], tmp_path: Path) -> None:
    apart = Apart(tmp_path, four, "replicas: 1")
    process = apart.start()
    for name in "ab":
        four[name].die()
    process.communicate(timeout=60)

    try:
        require_run_gone([four[name] for name in "cd"])
    finally:
        apart.unmount("cd")

    for name in "cd":
        run = apart.runs[name]
        assert not (run / "events.jsonl").exists()
        log = read_launcher_log(run, name)
        assert "fewer than a majority of the 4 hosts that took part last are here" in log

"""The lease of a run folder: one holder at a time; a dead one's is taken over, a living one's never."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import EnvironmentFault
from drumline.launch import lease
from drumline.launch.lease import NAME, STOP, Lease, has_lease
from drumline.system.process import ProcessId, host_identity, process, process_named, this_process

pytestmark = pytest.mark.slow

HOLD = "import sys, time; from pathlib import Path; from drumline.launch.lease import Lease\n"
HOLD += "with Lease(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lease of tmp_path/run."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.kill()


def write(folder: Path, **changed: Any) -> Path:
    """A lease as another process would have left it."""
    host, boot, space = host_identity()
    said = {
        "token": "x",
        "host": host,
        "boot": boot,
        "space": space,
        "pid": os.getpid(),
        "start": 1,
        "since": "then",
        **changed,
    }
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(said) + "\n" + "0" * 20 + "\n")
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(EnvironmentFault) as fault, Lease(folder):
        raise AssertionError("it was had")
    return fault.value.line()


def test_held_renewed_and_given_back(tmp_path: Path) -> None:
    with Lease(tmp_path / "run") as held:
        before = (tmp_path / "run" / NAME).read_bytes()
        assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]
        assert has_lease(held.token, tmp_path / "run", 0.0) and not has_lease(
            "another", tmp_path / "run", 0.0
        )
        line = refused(tmp_path / "run")
        assert (
            f"pid {os.getpid()} on host {host_identity()[0]}" in line
            and str(tmp_path / "run") in line
            and "run.dir=" in line
        )
        until = time.monotonic() + 30
        while (tmp_path / "run" / NAME).read_bytes() == before and time.monotonic() < until:
            time.sleep(0.05)
        assert (tmp_path / "run" / NAME).read_bytes() != before, "the counter stands still"
    assert not (tmp_path / "run").exists(), "it made the folder, and nothing came into it"


def test_a_living_holder_is_not_overtaken_even_when_it_is_suspended(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    assert f"pid {holder.pid} " in refused(tmp_path / "run")
    holder.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert f"pid {holder.pid} " in refused(tmp_path / "run")


@pytest.mark.claim("one run in a folder; a dead one's lease is taken over")
def test_a_killed_holder_is_followed_at_once(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 3600.0)
    holder.kill()
    # A zombie, as nobody has asked for its end yet.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with Lease(tmp_path / "run") as held:
        assert has_lease(held.token, tmp_path / "run", 0.0)


@pytest.mark.parametrize(
    "other",
    [
        {"host": "elsewhere"},
        {"boot": "another"},
        {"space": "pid:[1]"},
        {"space": ""},
        {"pid": -1},
        {"pid": "7"},
        {"pid": 10**5000},
    ],
    ids=["host", "boot", "container", "no namespace", "no pid", "text", "huge"],
)
def test_one_that_cannot_be_seen_is_judged_by_its_counter(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Its pid is a living process's here, and its start is none's: neither says anything of another place."""
    sys.set_int_max_str_digits(0)
    try:
        folder = write(tmp_path / "run", **other)
    finally:
        sys.set_int_max_str_digits(4300)
    path, ended = folder / NAME, threading.Event()

    def renew() -> None:
        count = 0
        while not ended.wait(0.05):
            path.write_text(path.read_text().splitlines()[0] + f"\n{(count := count + 1):020d}\n")

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        assert "in use" in refused(folder)
    finally:
        ended.set()
        thread.join()
    os.utime(path, (2e9, 2e9))  # clocks differ: the time of the file says nothing
    with Lease(folder) as held:
        assert has_lease(held.token, folder, 0.0)


@pytest.mark.parametrize(
    "text",
    [b"", b"\0" * 40, b"[1]", b"{}", b"lock of another program\n", b'{"pid": 1}', b"[" * 5000],
)
def test_what_is_no_lease_is_waited_for_and_taken_away(tmp_path: Path, text: bytes) -> None:
    (tmp_path / NAME).write_bytes(text)
    began = time.monotonic()
    with Lease(tmp_path) as held:
        assert time.monotonic() - began >= 0.6 and has_lease(held.token, tmp_path, 0.0)


GUARDED = "import sys, time; from pathlib import Path; from drumline.launch import lease\nlease.RENEW_SECONDS = 0.05\n"
GUARDED += "with lease.guard_run_folder(Path(sys.argv[2])):\n    time.sleep(0.1)\n"
GUARDED += "with lease.guard_run_folder(Path(sys.argv[1])):\n    print('guarded', flush=True)\n    time.sleep(600)"


def test_a_rank_ends_when_another_launcher_has_its_folder(tmp_path: Path) -> None:
    """Its own is suspended, and cannot end it."""
    write(tmp_path, token="mine")
    before = write(tmp_path / "before", token="mine")  # of a run that the same process has ended
    command = [sys.executable, "-c", GUARDED, str(tmp_path), str(before)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout and rank.stderr and rank.stdout.readline() == "guarded\n"
        write(before, token="another")
        (tmp_path / NAME).rename(tmp_path / "aside")
        time.sleep(0.3)
        assert rank.poll() is None, "a lease is away for a moment while it changes hands"
        write(tmp_path, token="another")
        assert (
            rank.wait(30) == 1
            and f"another launcher has taken {tmp_path} over" in rank.stderr.read()
        )


def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    for number, make in enumerate(
        (
            lambda path: path.mkdir(),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: os.mkfifo(path),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / NAME)
        assert "no lock of Drumline" in refused(folder)
    (tmp_path / "file").touch()
    assert "cannot write the run folder" in refused(tmp_path / "file")


@pytest.mark.claim("one run in a folder; a dead one's lease is taken over")
def test_one_of_many_has_it(tmp_path: Path) -> None:
    """A dead holder's lease, and eight who want it."""
    folder, had, gate = write(tmp_path / "run", host="elsewhere"), [], threading.Barrier(8)

    def want() -> None:
        gate.wait()
        try:
            with Lease(folder) as held:
                had.append(held.token)
                gate.wait(20)
        except EnvironmentFault:
            gate.wait(20)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(had) == 1


@pytest.mark.slow
def test_a_holder_that_lost_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr and process.stdout.readline() == "held\n"
        new = write(tmp_path / "new", host="elsewhere") / NAME
        new.rename(tmp_path / "run" / NAME)
        try:
            assert process.wait(3 * 2.0 + 20) == 1
        finally:
            process.kill()
        assert "taken over by pid" in process.stderr.read()
    assert "elsewhere" in (tmp_path / "run" / NAME).read_text()


@pytest.mark.parametrize(
    "make",
    [lambda path: path.write_bytes(b"\xff\xfe"), Path.mkdir, os.mkfifo],
    ids=["bytes", "folder", "pipe"],
)
def test_it_is_renewed_whatever_is_in_the_place_of_a_request_to_stop(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    with Lease(tmp_path / "run") as held:
        make(tmp_path / "run" / STOP)
        time.sleep(0.3)
        before, until = held.path.read_bytes(), time.monotonic() + 30
        while held.path.read_bytes() == before:
            assert time.monotonic() < until, "its counter stands still"
            time.sleep(0.05)


def test_it_comes_back_when_somebody_removes_it(tmp_path: Path) -> None:
    with Lease(tmp_path) as held:
        (tmp_path / NAME).unlink()
        assert has_lease(held.token, tmp_path, 30.0)
    assert not (tmp_path / NAME).exists()


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    with Lease(tmp_path) as held:
        assert has_lease(held.token, tmp_path, 0.0)
        assert "in use" in refused(tmp_path)


def test_a_process_has_a_name() -> None:
    mine = this_process()
    assert mine.alive() and process(mine.pid) == mine and process_named(f"{mine.name}-ab12") == mine
    assert (
        process_named("1-old") is None
        and process_named(f"{mine.pid}-{mine.start}-00000000-ab") is None
        and process_named("") is None
    )
    assert ProcessId(*host_identity(), mine.pid, mine.start + 1).alive() is False, (
        "the id is another's by now"
    )

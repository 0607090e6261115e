"""What is printed may be lost, and a secret may have any name; neither changes how a run goes on or ends."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from drumline.dist import start
from drumline.doctor.host import Question, check_interfaces, check_names
from drumline.hardware.detect import Machine
from drumline.launch.agent import Agent
from drumline.launch.local import report_failure
from drumline.launch.postmortem import RankEnd
from drumline.system.files import PERIOD_SECONDS, follow_file
from drumline.system.redact import redact
from drumline.telemetry.events import Fault, RunEnd, read
from drumline.telemetry.trackers import Callbacks
from tests.unit.report_runs import write_run

CPU = Machine([], 2, 2**34, "cpu", False)


class Gone(io.StringIO):
    """A terminal that has gone."""

    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")

    flush = write  # type: ignore[assignment]


def test_a_failure_is_noted_though_has_lost_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    cause = RankEnd(1, 1, None, tmp_path / "rank-1.log")
    report_failure(cause, [cause], 0, 4, None, "2 restarts left", tmp_path / "events.jsonl", None)
    assert [type(event) for event in read(tmp_path / "events.jsonl")] == [Fault]


def test_who_follows_a_file_may_fail_to_show_it(tmp_path: Path) -> None:
    seen, shown = [], threading.Event()

    def show(piece: bytes) -> None:
        seen.append(piece)
        shown.set()
        raise BrokenPipeError

    with follow_file(tmp_path / "log", show), (tmp_path / "log").open("wb", buffering=0) as file:
        for piece in (b"one", b"two"):
            shown.clear()
            file.write(piece)
            assert shown.wait(100 * PERIOD_SECONDS), "it goes on"
    assert seen == [b"one", b"two"]


PLACES = ["gone", *["full"] * Path("/dev/full").exists()]
LATE = "import sys; from drumline.system.output import flush_or_drop_output; sys.stdout.write('x'); flush_or_drop_output()"
BY_ALL = """
import sys
from drumline.system.output import flush_or_drop_output, lossy, has_lost_reader
from drumline.report.bars import stderr_bars
from rich.console import Console
with stderr_bars(True) as on_progress:
    on_progress("model", 0, 1)
with lossy():
    for _ in range(2):
        print("x" * 10_000, flush=True)
        print("x", file=sys.stderr)
        Console().print("x")
        Console(stderr=True).print("x")
    assert has_lost_reader() == (sys.argv[1] == "gone")
assert sys.stdout is sys.__stdout__
flush_or_drop_output()
"""


def run_unread(place: str, *arguments: str) -> int:
    """The exit code of Python where what it prints is lost: nobody reads the pipe (`gone`), or the disk is full (`full`)."""
    if place == "gone":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            stdout=writer,
            stderr=writer,
            env=env,
            timeout=60,
            check=False,
        ).returncode
    finally:
        os.close(writer)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", [LATE, BY_ALL])
def test_the_exit_code_does_not_hang_on_a_reader(code: str, place: str) -> None:
    assert run_unread(place, "-c", code, place) == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.slow
def test_a_command_ends_as_if_it_were_read(place: str, tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, lr=lr)) for name, lr in (("a", 1e-3), ("b", 2e-3))]
    assert run_unread(place, "-m", "drumline", "compare", *runs) == 0
    assert run_unread(place, "-m", "drumline", "compare", runs[0]) == 2


def test_sys_exit_in_a_callback_ends_the_callback_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\nclass Mine:\n    def on_end(self, values):\n        sys.exit()\n"
    )
    callbacks = Callbacks(["mine.py:Mine"], tmp_path, 0)
    callbacks.event(RunEnd(status="finished", exit_code=0, step=1, goodput={}))
    assert not callbacks.called and "raised SystemExit" in capsys.readouterr().err


def test_a_rank_that_left_by_sys_exit_has_failed(tmp_path: Path) -> None:
    agent: Any = Agent.__new__(Agent)
    agent.logs, agent.hang, agent.killed, agent._ended = tmp_path, None, {}, {}
    noted = '{"message": {"message": "SystemExit", "drumline": {"message": "SystemExit", "time": 1.0, "exit_code": 1}}}'
    (tmp_path / "rank-0.json").write_text(noted)
    assert (
        agent._end(0, 0, (None, None)).exitcode == 1
        and agent._end(1, 0, (None, None)).exitcode == 0
    )


def test_any_variable_may_look_like_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_SECRET_FILE", "/home/me/.drumline-secret")
    assert redact("it is /home/me/.drumline-secret, you know") == "it is [redacted], you know"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on loopback")
def test_hosts_may_have_addresses_of_version_6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        check
        for check in check_names(Question(peers=("::1", "no-such.invalid")), CPU, {})
        if check.name == "peer name"
    ]
    assert [check.verdict for check in found] == ["ok", "fail"]
    assert (
        "lo ::1" in next(check_interfaces(Question(peers=("::1",), interface="lo"), CPU, {})).found
    )
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "_store", None)
    store = start.rendezvous()
    store.set("key", "value")
    assert store.get("key") == b"value"

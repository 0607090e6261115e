"""What the launcher reads of its surroundings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drumline.errors import EnvironmentFault
from drumline.launch.asked import Asked
from drumline.launch.environment import launched_by, listen, port_holder

ALL = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def test_who_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ALL, "TORCHELASTIC_RUN_ID"]:
        monkeypatch.delenv(name, raising=False)
    assert launched_by() is None
    for name, value in ALL.items():
        assert launched_by() is None, "one variable alone may be left over from anything"
        monkeypatch.setenv(name, value)
    assert launched_by() == "environment"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launched_by() == "torchrun"


def test_any_free_port_is_on_loopback_and_ours() -> None:
    with listen(None) as held:
        address, port = held.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(EnvironmentFault):
            listen(port)
    listen(port).close()


def test_a_held_port_names_pid_and_command_without_its_secrets(tmp_path: Path) -> None:
    code = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "--api-key", "hunter2hunter2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout
        try:
            port = int(holder.stdout.readline())
            with pytest.raises(EnvironmentFault) as fault:
                listen(port)
        finally:
            holder.stdin.close()
    line = fault.value.line()
    assert f"port {port} is held by pid {holder.pid} (" in line and "python" in line and "hunter2" not in line
    assert "launch.port" in line and len(line.splitlines()) == 1
    assert port_holder(port) is None


def test_a_port_that_may_not_be_had_says_why() -> None:
    with socket.socket() as client, socket.create_server(("127.0.0.1", 0)) as server:
        client.bind(("127.0.0.1", 0))
        client.connect(server.getsockname())  # in use, but nobody listens on it
        with pytest.raises(EnvironmentFault, match="cannot be had"):
            listen(client.getsockname()[1])


def test_signals_are_noted_once_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)}
    with Asked() as asked:
        assert asked.number == 0
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert asked.number == signal.SIGUSR1 and not asked.at_once, "repeated signals are no hurry"
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.number == signal.SIGUSR1 and asked.at_once
    with Asked() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        assert asked.number == signal.SIGTERM, "ranks have no handler for a lost terminal"
    assert before == {number: signal.getsignal(number) for number in before}


def test_without_prctl_a_rank_dies_with_its_parent_all_the_same() -> None:
    """On macOS a thread looks after the parent."""
    rank = (
        "import os, sys, time; sys.platform = 'darwin'; from drumline.launch.worker import die_with_parent; die_with_parent(os.getppid())"
    )
    rank += "; print(os.getpid(), flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {rank!r}], stdout=subprocess.PIPE).stdout.readline())"
    said = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=60).stdout
    process = int("".join(filter(str.isdigit, said)))
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process).wait(timeout=30)
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_who_holds_a_port_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    with listen(None) as held, pytest.raises(EnvironmentFault, match="cannot be had"):
        listen(held.getsockname()[1])

"""What the launcher reads of its surroundings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from drumline.cli import main
from drumline.errors import EnvironmentFault
from drumline.launch.environment import (
    is_first_rank,
    is_left_to_another_rank,
    launched_by,
    listen,
    port_holder,
)
from drumline.launch.tasks import JOINED
from drumline.system.signals import CtrlC, Interrupted, LauncherSignals, Stoppable

ALL = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def test_who_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ALL, "TORCHELASTIC_RUN_ID", JOINED]:
        monkeypatch.delenv(name, raising=False)
    assert launched_by() is None
    for name, value in ALL.items():
        assert launched_by() is None, "one variable alone may be left over from anything"
        monkeypatch.setenv(name, value)
    assert launched_by() == "environment"
    monkeypatch.setenv(JOINED, "srun")
    assert launched_by() == "srun"
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
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin and holder.stdout
        try:
            port = int(holder.stdout.readline())
            with pytest.raises(EnvironmentFault) as fault:
                listen(port)
        finally:
            holder.stdin.close()
    line = fault.value.line()
    assert (
        f"port {port} is held by pid {holder.pid} (" in line
        and "python" in line
        and "hunter2" not in line
    )
    assert "launch.port" in line and len(line.splitlines()) == 1
    assert port_holder(port) is None


def test_a_port_that_may_not_be_had_says_why() -> None:
    with socket.socket() as client, socket.create_server(("127.0.0.1", 0)) as server:
        client.bind(("127.0.0.1", 0))
        client.connect(server.getsockname())  # in use, but nobody listens on it
        with pytest.raises(EnvironmentFault, match="cannot be had"):
            listen(client.getsockname()[1])


@pytest.fixture
def terminal() -> Iterator[None]:
    """Also where the tests run under `nohup`, which has a lost one ignored."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)


@pytest.mark.usefixtures("terminal")
def test_signals_are_noted_once_and_handlers_come_back() -> None:
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    }
    with LauncherSignals() as asked:
        assert asked.number == 0
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)  # to this thread: kill may choose another
        assert asked.number == signal.SIGUSR1 and not asked.at_once, "repeated signals are no hurry"
        signal.raise_signal(signal.SIGINT)
        assert asked.number == signal.SIGUSR1 and asked.at_once
    with LauncherSignals() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert asked.number == signal.SIGTERM, "ranks have no handler for a lost terminal"
    assert before == {number: signal.getsignal(number) for number in before}


@pytest.mark.slow
def test_without_prctl_a_rank_dies_with_its_parent_all_the_same() -> None:
    """On macOS a thread looks after the parent."""
    rank = (
        "import os, psutil, sys, time; sys.platform = 'darwin'; "
        "from drumline.system.process import die_with_parent; die_with_parent(os.getppid())"
    )
    rank += "; print(os.getpid(), flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {rank!r}], stdout=subprocess.PIPE).stdout.readline())"
    said = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    process = int("".join(filter(str.isdigit, said)))
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process).wait(timeout=30)
    assert (
        not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    )


def test_who_holds_a_port_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    with listen(None) as held, pytest.raises(EnvironmentFault, match="cannot be had"):
        listen(held.getsockname()[1])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALL, "LOCAL_RANK", "TORCHELASTIC_RUN_ID", JOINED):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_what_one_rank_does_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert is_first_rank() and not is_left_to_another_rank("plan")
    for name, value in {**ALL, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (
        not is_first_rank()
        and is_left_to_another_rank("plan")
        and is_left_to_another_rank("prepare")
        and not is_left_to_another_rank("train")
    )
    # Not with what runs these tests.
    monkeypatch.setattr("drumline.train.command.die_with_launchers", lambda: None)
    for command in (
        ["plan", str(tmp_path / "no.yaml")],
        ["train", str(tmp_path / "no.yaml"), "--dry-run"],
    ):
        with contextlib.suppress(SystemExit):
            main(command)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--no-such-option"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == said.err == "", "rank 0 says it"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not is_left_to_another_rank("prepare"), "once on each host"


def test_signals_end_work_that_has_nothing_to_save() -> None:
    with (
        subprocess.Popen(["sleep", "600"]) as child,
        pytest.raises(Interrupted) as stop,
        Stoppable(),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert child.returncode == -signal.SIGKILL and str(stop.value) == "SIGTERM: nothing was lost"
    with Stoppable(), pytest.raises(KeyboardInterrupt), CtrlC():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)


class Deaf:
    """Python swallows what is raised while it is finalised."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_a_finaliser_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    went_on = []
    with pytest.raises(Interrupted), Stoppable():
        Deaf()
        went_on.append(True)
        raise EnvironmentFault("a consequence of killed children")
    assert went_on
    with Stoppable():  # what is launched after it takes it over
        Deaf()
        with LauncherSignals() as asked:
            assert asked.number == signal.SIGTERM
    with pytest.raises(Interrupted), Stoppable(), LauncherSignals(trial=True) as trial:
        Deaf()
        went_on.append(True)
        trial.raise_swallowed()
        went_on.append(True)
    assert len(went_on) == 2 and capfd.readouterr().err == "", "no traceback of what was swallowed"


def test_a_lost_terminal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LauncherSignals() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
        assert asked.number == 0 and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# A chain as of deepspeed: a runner starts a launcher, which starts a rank with one more argument; a shell stands above them.
RANK = "import sys, time; from drumline.launch.environment import die_with_launchers, launchers; die_with_launchers()\n"
RANK += "print(*[p.pid for p in launchers()], flush=True); time.sleep(600)"
INNER = "import subprocess, sys, os; print(os.getpid(), flush=True)\n"
INNER += (
    "subprocess.Popen([sys.executable, '-c', {rank!r}, '--local_rank=0', *sys.argv[-2:]]).wait()"
)
OUTER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}, *sys.argv[-2:]]).wait()"


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the runner", "the launcher"])
def test_a_rank_dies_with_each_launcher_above_it(who: str, tmp_path: Path) -> None:
    outer = OUTER.format(inner=INNER.format(rank=RANK))
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", outer, "train", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout
        inner = int(shell.stdout.readline())
        watched = [int(pid) for pid in shell.stdout.readline().split()]
        (runner,) = psutil.Process(shell.pid).children()
        family = [runner, *runner.children(recursive=True)]
        try:
            assert watched == [inner, runner.pid], (
                "not the shell, which may end before what it started"
            )
            os.kill(runner.pid if who == "the runner" else inner, signal.SIGKILL)
            rank = family[-1]
            assert not psutil.wait_procs([rank], timeout=3 * 1.0 + 10)[1], "it goes on by itself"
        finally:
            os.killpg(shell.pid, signal.SIGKILL)

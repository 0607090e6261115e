"""What the launcher of several hosts needs of each host.

It needs a secret, the same versions and files, and a name that ssh reaches.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.config.load import load_values
from drumline.errors import ConfigError, EnvironmentFault
from drumline.launch.environment import listen
from drumline.planner.cluster import cluster_here
from drumline_hosts import link
from drumline_hosts.facts import facts, machine_of, require_same_versions
from drumline_hosts.ssh.spec import SSHLauncher
from drumline_hosts.ssh.start import _target, _targets, ssh_command

DATA = {"data": {"train": [{"kind": "digits"}]}}
needs_ssh = pytest.mark.skipif(
    shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)"
)


def load_launch(**launch: Any) -> Any:
    return load_values({**DATA, "launch": {"kind": "ssh", **launch}}, [])


def write_ssh_config(folder: Path, text: str) -> tuple[str, str]:
    """Return the options for ssh to read such a file."""
    path = folder / "config"
    path.write_text(text)
    return "-F", str(path)


def test_an_agent_and_a_launcher_know_each_other_by_the_secret() -> None:
    answers: list[Any] = []

    def accept_three() -> None:
        for _ in range(3):
            caller, _address = listener.accept()
            answers.append(link.answer(caller, "right"))

    with listen(None) as listener:
        thread = threading.Thread(target=accept_three)
        thread.start()
        address = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionError, match="not this run's launcher"):
            link.call(*address, "wrong")
        agent = link.call(*address, "right")
        thread.join(60)
    of_stranger, of_wrong, launcher = answers
    assert of_stranger is None
    assert of_wrong is None

    agent.send({"hello": "a"})
    assert launcher.receive() == {"hello": "a"}

    closing = threading.Timer(0.1, agent.close)
    closing.start()
    assert agent.receive() is None
    assert launcher.receive() is None
    assert time.monotonic() >= agent.heard
    launcher.close()
    launcher.close()  # its other side has gone: the connection still has the socket to close
    launcher._connection.close()


def facts_with(own: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the facts of a host with another device."""
    return {**own, "machine": {**own["machine"], "device": device}}


def test_versions_and_devices_that_differ_are_named() -> None:
    mine = facts()
    require_same_versions(mine, {"b": facts()})

    other = {**mine, "versions": {**mine["versions"], "torch": "9.9"}}
    with pytest.raises(EnvironmentFault, match=r"host b has torch 9\.9, and this one"):
        require_same_versions(mine, {"a": mine, "b": other})

    with_gpu = facts_with(mine, "cuda")
    with_gpu["machine"]["devices"] = [{"name": "H200", "memory_bytes": 1}]
    assert machine_of(with_gpu).devices[0].name == "H200"
    without = facts_with(mine, "cpu")
    with pytest.raises(EnvironmentFault, match="host b has GPUs, and host a has none"):
        require_same_versions(mine, {"a": without, "b": with_gpu})


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("mps", "cpu"), "host a has the device mps, and host b cpu"),
        (("cuda", "mps"), "host a has the device cuda, and host b mps"),
        (("cpu", "xpu", "cuda"), "host a has the device cpu, and host b xpu"),
    ],
)
def test_devices_of_any_kind_that_differ_are_named(devices: tuple[str, ...], message: str) -> None:
    """A host of another version of Drumline may have one that this version does not know."""
    mine = facts()
    hosts = {}
    for name, device in zip("abc", devices, strict=False):
        hosts[name] = facts_with(mine, device)
    with pytest.raises(EnvironmentFault) as fault:
        require_same_versions(mine, hosts)
    assert fault.value.what == message
    require_same_versions(mine, {"a": hosts["a"]})


@pytest.mark.parametrize(
    "hosts", [["-oProxyCommand=x"], ["a", "a:2"], ["a:0"], ["a b"], ["a;b"], []]
)
def test_what_is_no_host_is_refused(hosts: list[str]) -> None:
    with pytest.raises(ConfigError, match="launch"):
        load_launch(hosts=hosts)


@needs_ssh
def test_a_port_that_is_held_is_said_before_data_are_prepared() -> None:
    with listen(None) as held:
        spec = SSHLauncher(hosts=("127.0.0.1",), port=held.getsockname()[1])
        with pytest.raises(EnvironmentFault, match=r"launch\.port: port \d+ is held by pid \d+"):
            spec.make_hosts()


@needs_ssh
def test_another_user_or_a_forwarded_port_is_another_host(tmp_path: Path) -> None:
    options = write_ssh_config(tmp_path, "Host box\n HostName localhost\n Port 2201\n")
    spec = SSHLauncher(hosts=("localhost",), options=options)
    assert _target(spec, "localhost").here
    assert not _target(spec, "nobody@localhost").here
    assert not _target(spec, "box").here


TWO_MACHINES = """
Host box crate
 HostName 192.0.2.7
 Port 2201
Host can
 HostName 192.0.2.7
 Port 2202
"""
ONE = (("localhost", "127.0.0.1"), ("box", "crate"), ("box", "me@box"))
TWO = (
    ("localhost:1", "127.0.0.1:1"),
    ("localhost:1", "127.0.0.1"),
    ("box", "can"),
    ("box", "localhost"),
)


def test_one_machine_under_two_names(tmp_path: Path) -> None:
    """Its devices would count twice, but a user who gives each name its number of ranks means it.

    Containers share an address, and differ by ports.
    """
    options = write_ssh_config(tmp_path, TWO_MACHINES)
    for pair in ONE:
        message = f"launch.hosts: {pair[0]} and {pair[1]} are one machine"
        with pytest.raises(EnvironmentFault, match=message):
            _targets(SSHLauncher(hosts=pair, options=options))
    for pair in TWO:
        targets = _targets(SSHLauncher(hosts=pair, options=options))
        assert len(targets) == 2


def test_of_hosts_that_come_and_go_those_that_are_there_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[list[str]] = []

    def check_hosts(reached: Mapping[str, Any], plan: Any) -> None:
        compared.append(sorted(reached))

    monkeypatch.setattr("drumline_hosts.gathered.compare", lambda *_: None)
    monkeypatch.setattr("drumline.launch.preflight.check_hosts", check_hosts)
    monkeypatch.setattr(SSHLauncher, "reach", lambda self: dict.fromkeys(self.hosts))
    spec = SSHLauncher(hosts=("a", "b", "c"), nodes={"min": 1})
    for there in (["a", "c"], ["a"]):
        hosts: Any = SimpleNamespace(connected_hosts=lambda there=there: there)
        spec.check_hosts(None, hosts)
    assert compared == [["a", "c"]]


def test_the_command_of_a_host_is_quoted() -> None:
    spec = SSHLauncher(
        hosts=("me@[fe80::1]:2",),
        python="/opt/my python",
        workdir="/a'b",
        options=("-p", "2222"),
    )
    line = ssh_command(spec, "me@[fe80::1]")
    assert line[0] == "ssh"
    assert "BatchMode=yes" in line
    assert line[-2] == "me@fe80::1"
    assert "-p 2222" in " ".join(line)
    assert line[-1] == """cd '/a'"'"'b' && exec '/opt/my python' -u -m drumline_hosts.agent"""


@pytest.mark.parametrize(
    "values", [{"python": "~/venv/bin/python"}, {"workdir": "~/x"}, {"workdir": "~me"}], ids=str
)
def test_a_home_that_no_shell_writes_out_is_refused(values: dict[str, str]) -> None:
    (key,) = values
    message = rf"launch\.{key}.*is read by no shell: write the whole path"
    with pytest.raises(ConfigError, match=message):
        load_launch(hosts=["a"], **values)


def ssh_settings(*options: str) -> dict[str, str]:
    """Return what ssh does with such launch.options, as `ssh -G` prints it."""
    spec = SSHLauncher(hosts=("localhost",), options=("-F", "/dev/null", *options))
    ssh, *arguments, _ = ssh_command(spec, "localhost")
    done = subprocess.run(
        [ssh, "-G", *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    settings = {}
    for line in done.stdout.splitlines():
        key, value = line.split(" ", 1)
        settings[key] = value
    return settings


@needs_ssh
def test_options_overrule_all_but_that_ssh_asks_nothing() -> None:
    given = ("-o", "ConnectTimeout=77", "-oServerAliveInterval=9", "-o", "BatchMode=no", "-A", "-X")
    wanted = {
        "connecttimeout": "77",
        "serveraliveinterval": "9",
        "batchmode": "yes",
        "forwardagent": "yes",
        "forwardx11": "yes",
    }
    assert wanted.items() <= ssh_settings(*given).items()

    defaults = {
        "connecttimeout": "10",
        "serveraliveinterval": "2",
        "batchmode": "yes",
        "forwardagent": "no",
        "forwardx11": "no",
    }
    assert defaults.items() <= ssh_settings().items()


@needs_ssh
def test_hosts_behind_a_proxy_need_the_name_of_an_interface(tmp_path: Path) -> None:
    options = write_ssh_config(tmp_path, "Host a b\n ProxyJump bastion\n")
    message = r"launch\.interface: which address of this host the others reach is not known"
    for hosts in (("a", "b"), ("localhost", "b")):
        spec = SSHLauncher(hosts=hosts, options=options)
        with pytest.raises(EnvironmentFault, match=message):
            spec.make_hosts()
        with pytest.raises(EnvironmentFault, match=message):
            spec.reach()

    reached = SSHLauncher(hosts=("localhost", "b"), options=options, interface="lo").reach()
    assert reached["localhost"].address == "127.0.0.1"
    assert reached["b"].address == ""


def test_a_plan_is_of_as_many_hosts_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_of(facts())
    config = load_launch(hosts=["a:4", "b:8"]).config
    monkeypatch.setattr(SSHLauncher, "host_ranks", lambda self: (4, 8))
    here, _ = cluster_here(config, machine, "cpu", 12)
    assert here.nodes == 3
    assert here.per_node == 4
    assert here.device.memory_bytes == machine.memory_bytes // 4

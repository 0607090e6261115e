"""What the launcher of several hosts needs of each: a secret, the same versions and files, and a name that ssh reaches."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
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


def test_an_agent_and_a_launcher_know_each_other_by_the_secret() -> None:
    with listen(None) as listener:
        answers: list[Any] = []

        def accept() -> None:
            for _ in range(3):
                answers.append(link.answer(listener.accept()[0], "right"))

        thread = threading.Thread(target=accept)
        thread.start()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionError, match="not this run's launcher"):
            link.call("127.0.0.1", port, "wrong")
        agent = link.call("127.0.0.1", port, "right")
        thread.join(60)
    assert answers[0] is None and answers[1] is None
    agent.send({"hello": "a"})
    assert answers[2].receive() == {"hello": "a"}
    closing = threading.Timer(0.1, agent.close)
    closing.start()
    assert agent.receive() is None and answers[2].receive() is None
    assert time.monotonic() >= agent.heard
    answers[2].close()
    answers[2].close()  # its other side has gone: the connection still has the socket to close
    answers[2]._connection.close()


def test_versions_and_devices_that_differ_are_named() -> None:
    mine = facts()
    require_same_versions(mine, {"b": facts()})
    other = {**mine, "versions": {**mine["versions"], "torch": "9.9"}}
    with pytest.raises(EnvironmentFault, match=r"host b has torch 9\.9, and this one"):
        require_same_versions(mine, {"a": mine, "b": other})
    devices = {
        **mine,
        "machine": {
            **mine["machine"],
            "device": "cuda",
            "devices": [{"name": "H200", "memory_bytes": 1}],
        },
    }
    assert machine_of(devices).devices[0].name == "H200"
    with pytest.raises(EnvironmentFault, match="host b has GPUs, and host a has none"):
        require_same_versions(
            mine, {"a": {**mine, "machine": {**mine["machine"], "device": "cpu"}}, "b": devices}
        )


@pytest.mark.parametrize(
    "hosts", [["-oProxyCommand=x"], ["a", "a:2"], ["a:0"], ["a b"], ["a;b"], []]
)
def test_what_is_no_host_is_refused(hosts: list[str]) -> None:
    with pytest.raises(ConfigError, match="launch"):
        load_values({**DATA, "launch": {"kind": "ssh", "hosts": hosts}}, [])


@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)"
)
def test_a_port_that_is_held_is_said_before_data_are_prepared() -> None:
    with (
        listen(None) as held,
        pytest.raises(EnvironmentFault, match=r"launch\.port: port \d+ is held by pid \d+"),
    ):
        SSHLauncher(hosts=("127.0.0.1",), port=held.getsockname()[1]).make_hosts()


@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)"
)
def test_another_user_or_a_forwarded_port_is_another_host(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host box\n HostName localhost\n Port 2201\n")
    spec = SSHLauncher(hosts=("localhost",), options=("-F", str(tmp_path / "config")))
    assert [_target(spec, place).here for place in ("localhost", "nobody@localhost", "box")] == [
        True,
        False,
        False,
    ]


def test_one_machine_under_two_names(tmp_path: Path) -> None:
    """Its devices would count twice; who gives each its number of ranks means it. Containers share an address, by ports."""
    (tmp_path / "config").write_text(
        "Host box crate\n HostName 192.0.2.7\n Port 2201\nHost can\n HostName 192.0.2.7\n Port 2202\n"
    )

    def targets(*hosts: str) -> dict[str, Any]:
        return _targets(SSHLauncher(hosts=hosts, options=("-F", str(tmp_path / "config"))))

    for pair in (("localhost", "127.0.0.1"), ("box", "crate"), ("box", "me@box")):
        with pytest.raises(
            EnvironmentFault, match=f"launch.hosts: {pair[0]} and {pair[1]} are one machine"
        ):
            targets(*pair)
    for pair in (
        ("localhost:1", "127.0.0.1:1"),
        ("localhost:1", "127.0.0.1"),
        ("box", "can"),
        ("box", "localhost"),
    ):
        assert len(targets(*pair)) == 2


def test_of_hosts_that_come_and_go_those_that_are_there_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[list[str]] = []
    monkeypatch.setattr("drumline_hosts.gathered.compare", lambda *_: None)
    monkeypatch.setattr(
        "drumline.launch.preflight.check_hosts",
        lambda reached, plan: compared.append(sorted(reached)),
    )
    monkeypatch.setattr(SSHLauncher, "reach", lambda self: dict.fromkeys(self.hosts))
    spec = SSHLauncher(hosts=("a", "b", "c"), nodes={"min": 1})  # type: ignore[arg-type]
    for there in (["a", "c"], ["a"]):
        hosts = SimpleNamespace(connected_hosts=lambda there=there: there)
        spec.compare(None, hosts)  # type: ignore[arg-type]
    assert compared == [["a", "c"]]


def test_the_command_of_a_host_is_quoted() -> None:
    spec = SSHLauncher(
        hosts=("me@[fe80::1]:2",), python="/opt/my python", workdir="/a'b", options=("-p", "2222")
    )
    line = ssh_command(spec, "me@[fe80::1]")
    assert (
        line[0] == "ssh"
        and "BatchMode=yes" in line
        and line[-2] == "me@fe80::1"
        and "-p 2222" in " ".join(line)
    )
    assert line[-1] == """cd '/a'"'"'b' && exec '/opt/my python' -u -m drumline_hosts.agent"""


@pytest.mark.parametrize(
    "values", [{"python": "~/venv/bin/python"}, {"workdir": "~/x"}, {"workdir": "~me"}], ids=str
)
def test_a_home_that_no_shell_writes_out_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"launch\.{next(iter(values))}.*is read by no shell: write the whole path",
    ):
        load_values({**DATA, "launch": {"kind": "ssh", "hosts": ["a"], **values}}, [])


@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)"
)
def test_options_overrule_all_but_that_ssh_asks_nothing() -> None:
    def known(*options: str) -> dict[str, str]:
        *line, _ = ssh_command(
            SSHLauncher(hosts=("localhost",), options=("-F", "/dev/null", *options)), "localhost"
        )
        done = subprocess.run(
            [line[0], "-G", *line[1:]], capture_output=True, text=True, check=True, timeout=20
        )
        return dict(each.split(" ", 1) for each in done.stdout.splitlines())

    given = ("-o", "ConnectTimeout=77", "-oServerAliveInterval=9", "-o", "BatchMode=no", "-A", "-X")
    wanted = {
        "connecttimeout": "77",
        "serveraliveinterval": "9",
        "batchmode": "yes",
        "forwardagent": "yes",
        "forwardx11": "yes",
    }
    assert wanted.items() <= known(*given).items()
    wanted = {
        "connecttimeout": "10",
        "serveraliveinterval": "2",
        "batchmode": "yes",
        "forwardagent": "no",
        "forwardx11": "no",
    }
    assert wanted.items() <= known().items()


@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)"
)
def test_hosts_behind_a_proxy_need_the_name_of_an_interface(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a b\n ProxyJump bastion\n")
    options = ("-F", str(tmp_path / "config"))
    for hosts in (("a", "b"), ("localhost", "b")):
        spec = SSHLauncher(hosts=hosts, options=options)
        for call in (spec.make_hosts, spec.reach):
            with pytest.raises(
                EnvironmentFault,
                match=r"launch\.interface: which address of this host the others reach is not known",
            ):
                call()
    reached = SSHLauncher(hosts=("localhost", "b"), options=options, interface="lo").reach()
    assert (reached["localhost"].address, reached["b"].address) == ("127.0.0.1", "")


def test_a_plan_is_of_as_many_hosts_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_of(facts())
    config = load_values({**DATA, "launch": {"kind": "ssh", "hosts": ["a:4", "b:8"]}}, []).config
    monkeypatch.setattr(SSHLauncher, "host_ranks", lambda self: (4, 8))
    here, _ = cluster_here(config, machine, "cpu", 12)
    assert (here.nodes, here.per_node) == (
        3,
        4,
    ) and here.device.memory_bytes == machine.memory_bytes // 4

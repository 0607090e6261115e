"""What hosts of one run need of each other: names, interfaces, secrets, the same versions and files."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore

from drumline.config.load import load_values
from drumline.dist import start
from drumline.errors import ConfigError, EnvironmentFault
from drumline.launch.agent import open_store
from drumline.launch.environment import listen
from drumline.launch.hosts import link
from drumline.launch.hosts.facts import facts, machine_of, require_same_versions
from drumline.launch.spec import LocalLauncher
from drumline.launch.ssh.spec import SSHLauncher
from drumline.launch.ssh.start import _target, _targets, ssh_command
from drumline.planner.cluster import cluster_here
from drumline.system import network
from drumline.system.files import digest
from drumline.system.munge import SECRET
from drumline.system.process import SECRET_COMES

DATA = {"data": {"train": [{"kind": "digits"}]}}


def test_interfaces_are_found_by_route_and_by_name() -> None:
    assert network.addresses("localhost")[0] == "127.0.0.1" and not network.addresses(
        "no-such-host.invalid"
    )
    assert network.source_address("127.0.0.1") == "127.0.0.1" and network.is_here("127.0.0.1")
    assert network.address_of("lo") == "127.0.0.1" and network.interface_of("127.0.0.1") == "lo"
    assert network.interface_to(["127.0.0.1"]) is None and network.interface_to([], "ib0") == "ib0"
    LocalLauncher(interface="lo").require()
    with pytest.raises(EnvironmentFault, match="no interface 'nosuch0'"):
        LocalLauncher(interface="nosuch0").require()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"NCCL_DEBUG": "INFO"}, "environment NCCL_DEBUG=INFO: handed on to all ranks"),
        (
            {"NCCL_TIMEOUT": "1800"},
            "NCCL_TIMEOUT=1800 is read by nobody: launch.timeout_seconds=600",
        ),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "would never end"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "contradicts the overlap"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, "is less than launch.timeout_seconds=600"),
        (
            {"GLOO_SOCKET_IFNAME": "eth1"},
            "GLOO_SOCKET_IFNAME=eth1 goes before launch.interface=eth0",
        ),
    ],
)
def test_variables_of_nccl_and_gloo_are_shown_and_held_against_the_plan(
    variables: dict[str, str], line: str
) -> None:
    assert any(line in each for each in network.why({**variables, "HOME": "/"}, 600.0, "eth0"))
    assert network.why({"HOME": "/"}, 600.0, "eth0") == []


def test_a_limit_of_nccl_is_read_by_nobody_where_the_plan_sets_none_either() -> None:
    (_, line) = network.why({"NCCL_TIMEOUT": "600"}, None, None)
    assert (
        line
        == "environment NCCL_TIMEOUT=600 is read by nobody: launch.timeout_seconds is the limit of a collective"
    )


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process is rank 1 of two, of a launcher that has the store."""
    names = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "_store", None)
    monkeypatch.setattr(start, "CONNECT", timedelta(seconds=1))
    yield monkeypatch


@pytest.mark.slow
def test_a_stranger_at_the_port_of_rank_0_is_one_line(rank_1: pytest.MonkeyPatch) -> None:
    rank_1.setattr(start, "ANSWER_SECONDS", 1.0)
    with listen(None) as mute:
        rank_1.setenv("MASTER_PORT", str(mute.getsockname()[1]))
        with pytest.raises(
            EnvironmentFault, match=r"something listens at 127\.0\.0\.1:.* that is not rank 0"
        ):
            start.rendezvous()
    with pytest.raises(
        EnvironmentFault, match="rank 0 is not there after 1 s"
    ):  # nobody listens now
        start.rendezvous()


@pytest.mark.claim("a rank without the secret joins no run")
@pytest.mark.parametrize("by", ["standard input", "a variable"])
def test_a_rank_without_the_secret_does_not_meet_the_others(
    by: str, rank_1: pytest.MonkeyPatch
) -> None:
    store = open_store(listen(None))
    PrefixStore("the secret", store).set("drumline-round", "drawn")  # by rank 0
    rank_1.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(EnvironmentFault, match="did not come in time"):
        start.rendezvous()
    if by == "a variable":
        rank_1.setenv(SECRET, "the secret")
    else:
        rank_1.setenv(SECRET_COMES, "1")
        rank_1.setattr("sys.stdin", io.StringIO("the secret\n"))
    answers = threading.Thread(target=_answer, args=(PrefixStore("the secret", store),))
    answers.start()
    start.rendezvous().set("found", "1")
    answers.join()
    assert PrefixStore("drumline-drawn", PrefixStore("the secret", store)).get("found") == b"1"


def test_a_rank_that_lacks_rank_0_s_secret_says_so(rank_1: pytest.MonkeyPatch) -> None:
    """Under a launcher without a store of its own: rank 0 has made this one."""
    store = open_store(listen(None))
    PrefixStore("drumline-first", PrefixStore("the secret", store)).set("here", "")
    rank_1.delenv("TORCHELASTIC_USE_AGENT_STORE")
    rank_1.setenv("MASTER_PORT", str(store.port))
    rank_1.setattr(start, "ANSWER_SECONDS", 1.0)
    with pytest.raises(
        EnvironmentFault,
        match="rank 0 has a secret that rank 1 does not know — set DRUMLINE_SECRET",
    ):
        start.rendezvous()
    rank_1.setenv(SECRET, "the secret")
    start.rendezvous()


def _answer(store: PrefixStore) -> None:
    """Rank 0's part."""
    store.set("drawn-answer-1", store.get("drawn-hello-1"))


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


def test_a_digest_is_of_names_sizes_and_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.system.files.PIECE", 16)
    assert digest(tmp_path / "none") is None
    (tmp_path / "large").write_bytes(bytes(1000))
    seen = {digest(tmp_path)}
    (tmp_path / ".cache").write_text("x")
    assert digest(tmp_path) in seen
    for change in (bytes(999) + b"1", b"1" + bytes(999), bytes(1001)):
        (tmp_path / "large").write_bytes(change)
        seen.add(digest(tmp_path))
    (tmp_path / "large").rename(tmp_path / "other")
    seen.add(digest(tmp_path))
    assert len(seen) == 5


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
    monkeypatch.setattr("drumline.launch.hosts.gathered.compare", lambda *_: None)
    monkeypatch.setattr(
        "drumline.launch.preflight.require",
        lambda reached, plan: compared.append(sorted(reached)),
    )
    monkeypatch.setattr(SSHLauncher, "reach", lambda self: dict.fromkeys(self.hosts))
    spec = SSHLauncher(hosts=("a", "b", "c"), nodes={"min": 1})  # type: ignore[arg-type]
    for there in (["a", "c"], ["a"]):
        spec.compare(None, SimpleNamespace(there=lambda there=there: there))  # type: ignore[arg-type]
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
    assert (
        line[-1] == """cd '/a'"'"'b' && exec '/opt/my python' -u -m drumline.launch.hosts.agent"""
    )


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

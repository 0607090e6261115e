"""What ranks of several hosts need of each other: names, interfaces and secrets, and digests of the files that they share."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

from drumline.dist import start
from drumline.errors import EnvironmentFault
from drumline.launch.agent import open_store
from drumline.launch.environment import listen
from drumline.launch.spec import LocalLauncher
from drumline.system import network
from drumline.system.files import digest
from drumline.system.munge import SECRET
from drumline.system.process import SECRET_ON_STDIN


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
    assert any(
        line in each
        for each in network.explain_environment({**variables, "HOME": "/"}, 600.0, "eth0")
    )
    assert network.explain_environment({"HOME": "/"}, 600.0, "eth0") == []


def test_a_limit_of_nccl_is_read_by_nobody_where_the_plan_sets_none_either() -> None:
    (_, line) = network.explain_environment({"NCCL_TIMEOUT": "600"}, None, None)
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
    monkeypatch.setattr(start, "JOIN_TIMEOUT", timedelta(seconds=1))
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
        rank_1.setenv(SECRET_ON_STDIN, "1")
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

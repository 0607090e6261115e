"""Strangers at a listening socket take nothing of a run: real connections on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from drumline.dist import start
from drumline.launch.agent import open_store
from drumline.launch.environment import listen
from drumline.system import sockets
from tests.loopback import free_ports

# Hears lines, one a caller, with few descriptors, and says them back.
HEARS = """
import resource, sys
from drumline.system import sockets
from drumline.launch.environment import listen

def line(connected):
    with connected, connected.makefile("rw") as file:
        connected.settimeout(10)
        file.write(file.readline())

resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
sockets.MOST_STRANGERS = int(sys.argv[1])
listener = listen(None)
print(listener.getsockname()[1], flush=True)
sockets.serve_callers(listener, line, print)
"""


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", HEARS, str(request.param)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield int(process.stdout.readline())
        assert process.poll() is None
        process.kill()


def says_back(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 30) as caller, caller.makefile("rw") as file:
        file.write("drum\n")
        file.flush()
        return file.readline() == "drum\n"


@pytest.mark.parametrize("port", [1000], indirect=True)
def test_who_listens_outlives_a_lack_of_descriptors(port: int) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    for each in strangers:
        each.close()
    assert says_back(port)


@pytest.mark.parametrize("port", [4], indirect=True)
def test_more_strangers_than_may_be_met_wait(port: int) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    for each in strangers[:-1]:
        each.close()
    assert says_back(port)
    strangers[-1].close()


def test_a_handshake_has_an_end_and_who_is_met_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(sockets, "MOST_STRANGERS", 1)
    served = threading.Event()

    def meet(connected: socket.socket) -> socket.socket | None:
        return connected if connected.recv(1) else None

    def serve(connected: socket.socket) -> None:
        assert connected.recv(1) == b"b"
        served.set()

    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    thread = threading.Thread(target=sockets.serve_callers, args=(listener, meet, serve))
    thread.start()
    with (
        socket.create_connection(place) as stranger,
        socket.create_connection(place) as one,
        socket.create_connection(place) as other,
    ):
        assert stranger.recv(1) == b"", "it has said nothing"
        one.sendall(b"a")
        other.sendall(b"ab")
        assert served.wait(30), "one that is met takes no place of the others"
        one.sendall(b"b")
    sockets.stop_listening(listener)
    thread.join(30)
    assert not thread.is_alive()
    socket.create_server(place).close()


def of_launcher(port: int) -> object:
    return open_store(listen(port))


def of_rank_0(port: int) -> object:
    return start.rendezvous()


@pytest.mark.parametrize("make", [of_launcher, of_rank_0])
def test_half_a_message_does_not_hold_up_the_ranks_store(
    make: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says nothing for longer than a message may take, or waits for a key, is not hurt."""
    monkeypatch.setattr(sockets, "STORE_SECONDS", 1.0)
    monkeypatch.setattr(start, "_store", None)
    (port,) = free_ports(1)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    store = make(port)

    def client() -> TCPStore:
        return TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=20), False)

    idle, waits, found = client(), client(), list[Any]()
    getter = threading.Thread(target=lambda: found.append(waits.get("late")), daemon=True)
    getter.start()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\0")
        stranger.settimeout(20)
        assert stranger.recv(1) == b"", "it has gone on without this one"
        idle.set("late", "1")
        getter.join(20)
    assert found == [b"1"] and store is not None

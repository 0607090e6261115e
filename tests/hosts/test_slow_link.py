"""The link of `tests.hosts.slow_link` is as slow as it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hosts.namespaces import Host, ended, hosts
from tests.hosts.slow_link import slow_link

SEND = """
import socket, sys, time
s, began = socket.create_connection((sys.argv[1], 5555)), time.time()
s.sendall(bytes(int(sys.argv[2])))
s.shutdown(socket.SHUT_WR)
s.recv(1)
print(time.time() - began)
"""
TAKE = """
import socket
with socket.create_server(("", 5555)) as listener:
    print("ready", flush=True)
    for _ in range(2):
        with listener.accept()[0] as taken:
            while taken.recv(2**20):
                pass
            taken.sendall(b"1")
"""


def seconds(one: Host, address: str, bytes_: int) -> float:
    return float(one.run(sys.executable, "-c", SEND, address, bytes_))


@pytest.mark.full
def test_it_takes_as_long_as_its_rate_and_delay(tmp_path: Path) -> None:
    """At least: a machine that is busy takes longer."""
    with hosts(tmp_path, ["a", "b"]) as made, slow_link(made["a"], made["b"]) as (_, address):
        taker = made["b"].start(sys.executable, "-c", TAKE)
        assert taker.stdout is not None
        assert taker.stdout.readline() == "ready\n"
        assert seconds(made["a"], address, 1) >= 2 * 0.05
        assert seconds(made["a"], address, 10**7) >= 8 * 10**7 / 1e8
        ended(taker, 20)

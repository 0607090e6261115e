"""The connection between the launcher and the agent of one host: JSON objects over TCP, both sides authenticated by a shared secret.

Who it is is proved by HMAC (`multiprocessing.connection`); what is sent is not encrypted, so nothing secret goes this way. The agent sends
a beat every second with its own time, and the launcher sends it back: so the agent knows, without a common clock, how long ago it sent
what the launcher has heard last. It gives up before the launcher does: a host that was given up has no rank any more.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from typing import Any

from drumline.core.sockets import wait_at_most

BEAT_SECONDS = 1.0
AGENT_SECONDS = (
    4.5  # since an agent sent the newest beat that the launcher has heard: then it kills its ranks
)
SILENT_SECONDS = 6.0  # since the launcher has heard anything of a host: then it is given up. Above AGENT_SECONDS, for the kill
IDLE_SECONDS = 60.0  # in the place of both before the first ranks: a launcher that plans, and imports torch, may have no core to answer
CONNECT_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0  # for one answer
LONGEST = 2**24  # bytes of a message

Message = dict[str, Any]


class Link:
    """One side of a connection that is there. Any thread may send; one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.heard = time.monotonic()

    def send(self, message: Message) -> None:
        """Nothing where the other side has gone: who receives learns that."""
        data = json.dumps(message).encode()
        with self._lock:
            try:
                self._connection.send_bytes(data)
            except OSError:
                return

    def receive(self) -> Message | None:
        """The next message; None where the other side has gone, or speaks otherwise."""
        try:
            message = json.loads(self._connection.recv_bytes(LONGEST))
        except (OSError, EOFError, ValueError, RecursionError):
            return None
        self.heard = time.monotonic()
        return message if isinstance(message, dict) else None

    @property
    def address(self) -> str:
        """This host's, as the other side sees it."""
        with _socket(self._connection) as ends:
            return str(ends.getsockname()[0])

    def close(self) -> None:
        """Also while another thread receives: it gets None."""
        with suppress(OSError), _socket(self._connection) as ends:  # it may have gone already
            ends.shutdown(socket.SHUT_RDWR)


def call(
    address: str,
    port: int,
    secret: str,
    reach: float = CONNECT_SECONDS,
    seconds: float | None = None,
) -> Link:
    """The agent's side. `reach`: seconds for the connection; `seconds`: for each message, where it is for one question. Raises OSError
    where nobody answers, or not who should."""
    with socket.create_connection((address, port), reach) as connected:
        connection = _limited(connected, seconds or HANDSHAKE_SECONDS)
    try:
        answer_challenge(connection, secret.encode())
        deliver_challenge(connection, secret.encode())
    except (
        AuthenticationError,
        EOFError,
        AssertionError,
    ) as error:  # the library asserts that it is its own protocol
        connection.close()
        raise ConnectionError("who listens there is not this run's launcher") from error
    return Link(connection) if seconds else _unlimited(connection)


def answer(connected: socket.socket, secret: str, seconds: float | None = None) -> Link | None:
    """The launcher's side, with `seconds` as in `call`; None where the other is not one of its agents."""
    with connected:
        connection = _limited(connected, seconds or HANDSHAKE_SECONDS)
    try:
        deliver_challenge(connection, secret.encode())
        answer_challenge(connection, secret.encode())
    except (AuthenticationError, EOFError, AssertionError, OSError):
        connection.close()
        return None
    return Link(connection) if seconds else _unlimited(connection)


def _limited(connected: socket.socket, seconds: float = HANDSHAKE_SECONDS) -> Connection:
    """One that waits for an answer no longer than a handshake may take."""
    connected.settimeout(None)
    wait_at_most(connected, seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def _unlimited(connection: Connection) -> Link:
    with _socket(connection) as ends:
        wait_at_most(ends, 0.0)
    return Link(connection)


@contextmanager
def _socket(connection: Connection) -> Iterator[socket.socket]:
    """Of a connection, which stays the one to close it."""
    ends = socket.socket(fileno=connection.fileno())
    try:
        yield ends
    finally:
        ends.detach()


def store_secret(secret: str, attempt: str) -> str:
    """What the ranks of an attempt must know to meet. Each agent makes it by itself: it is never sent."""
    return hmac.new(secret.encode(), attempt.encode(), hashlib.sha256).hexdigest()

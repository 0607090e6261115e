"""Connect the launcher with the agent of one host: JSON objects over TCP.

Each side proves by HMAC that it knows a shared secret (`multiprocessing.connection`). Messages are
not encrypted, so nothing secret goes this way.

The agent sends a beat every second with its own time, and the launcher sends it back. So the agent
knows, without a common clock, how long ago it sent the newest beat that the launcher has heard. It
gives up before the launcher does, so a host that the launcher has given up has no ranks any more
(rules A2 and L2 of docs/explanations/elastic_hosts.md).
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

from drumline.system.sockets import wait_at_most
from drumline_hosts.timing import (
    CONNECT_SECONDS,
    HANDSHAKE_SECONDS,
)

LONGEST = 2**24  # bytes of a message

Message = dict[str, Any]


class Link:
    """One side of an open connection. Any thread may send; one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # held to send
        self.heard = time.monotonic()  # when the last message came

    def send(self, message: Message) -> None:
        """Send a message.

        If the other side has gone, the message is dropped. The thread that receives notices the
        loss.
        """
        data = json.dumps(message).encode()
        with self._lock:
            try:
                self._connection.send_bytes(data)
            except OSError:
                return

    def receive(self) -> Message | None:
        """Return the next message; None if the other side has gone, or has sent something else."""
        try:
            message = json.loads(self._connection.recv_bytes(LONGEST))
        except (OSError, EOFError, ValueError, RecursionError):
            return None
        self.heard = time.monotonic()
        if isinstance(message, dict):
            return message
        return None

    @property
    def address(self) -> str:
        """The address of this host, as the other side sees it."""
        with _socket(self._connection) as ends:
            return str(ends.getsockname()[0])

    def close(self) -> None:
        """Close the connection. A thread that receives at the moment gets None."""
        with suppress(OSError), _socket(self._connection) as ends:  # it may have gone already
            ends.shutdown(socket.SHUT_RDWR)


def call(
    address: str,
    port: int,
    secret: str,
    reach: float = CONNECT_SECONDS,
    seconds: float | None = None,
) -> Link:
    """Connect as the agent.

    Args:
        address: Address of the launcher, or of another host's voter.
        port: Port at which it listens.
        secret: Secret of the run.
        reach: Seconds that the connection may take.
        seconds: Seconds that each message may take, for a link of one question; None for a link
            that stays open.

    Raises:
        OSError: Nobody answers, or the other side does not know the secret.
    """
    with socket.create_connection((address, port), reach) as connected:
        connection = _set_limit(connected, seconds or HANDSHAKE_SECONDS)
    try:
        answer_challenge(connection, secret.encode())
        deliver_challenge(connection, secret.encode())
    except (AuthenticationError, EOFError, AssertionError) as error:
        # The library asserts that the other side speaks its own protocol.
        connection.close()
        raise ConnectionError("who listens there is not this run's launcher") from error
    except OSError:
        connection.close()
        raise
    if seconds:
        return Link(connection)
    return _remove_limit(connection)


def answer(connected: socket.socket, secret: str, seconds: float | None = None) -> Link | None:
    """Answer a caller as the launcher, and return the link; None if the caller is no agent of it.

    `seconds` is as in `call`.
    """
    with connected:
        connection = _set_limit(connected, seconds or HANDSHAKE_SECONDS)
    try:
        deliver_challenge(connection, secret.encode())
        answer_challenge(connection, secret.encode())
    except (AuthenticationError, EOFError, AssertionError, OSError):
        connection.close()
        return None
    if seconds:
        return Link(connection)
    return _remove_limit(connection)


def _set_limit(connected: socket.socket, seconds: float = HANDSHAKE_SECONDS) -> Connection:
    """Return a connection that waits for each answer for at most so many seconds."""
    connected.settimeout(None)
    wait_at_most(connected, seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def _remove_limit(connection: Connection) -> Link:
    """Return a link that waits for messages without a limit."""
    with _socket(connection) as ends:
        wait_at_most(ends, 0.0)
    return Link(connection)


@contextmanager
def _socket(connection: Connection) -> Iterator[socket.socket]:
    """Yield the socket of a connection. The connection still closes it."""
    ends = socket.socket(fileno=connection.fileno())
    try:
        yield ends
    finally:
        ends.detach()


def store_secret(secret: str, attempt: str) -> str:
    """Return the secret that the ranks of an attempt must know to meet.

    Each agent makes it by itself: it is never sent.
    """
    return hmac.new(secret.encode(), attempt.encode(), hashlib.sha256).hexdigest()

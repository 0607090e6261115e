"""Sockets that listen for other ranks and hosts, and that strangers on the network reach, too."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

# The most handshakes at a time. Each takes two descriptors and two threads.
MOST_STRANGERS = 64
# Limit of a whole handshake in seconds: a stranger could send one byte now and then for ever.
HANDSHAKE_SECONDS = 60.0
# Seconds until the next attempt, if this process has no descriptors or threads left.
AGAIN_SECONDS = 0.2
# Limit in seconds for the rest of a message to the ranks' store.
STORE_SECONDS = 5.0

Caller = TypeVar("Caller")


def serve_callers(
    listener: socket.socket,
    handshake: Callable[[socket.socket], Caller | None],
    serve: Callable[[Caller], object],
) -> None:
    """Serve each caller of `listener` in a thread of its own, until the listener is closed.

    `handshake`: checks who calls and returns what `serve` takes; for a stranger it returns None, or
    raises OSError. At most MOST_STRANGERS handshakes are under way. Further callers wait, so that
    they take no descriptors from the run.
    """
    free = threading.BoundedSemaphore(MOST_STRANGERS)

    def serve_one(connected: socket.socket) -> None:
        caller = None
        try:
            # `handshake` owns `connected`, and may close it. The timer has an object of its own.
            with suppress(OSError, RuntimeError), connected.dup() as connection:
                limit = threading.Timer(HANDSHAKE_SECONDS, _shut, (connection,))
                limit.daemon = True
                limit.start()
                try:
                    caller = handshake(connected)
                finally:
                    limit.cancel()
        finally:
            free.release()
        if caller is not None:
            serve(caller)

    while listener.fileno() >= 0:
        free.acquire()
        try:
            connected, _ = listener.accept()
            threading.Thread(
                target=serve_one, args=(connected,), daemon=True, name="drumline-caller"
            ).start()
        except (OSError, RuntimeError):
            # No descriptors or threads are left now, or the caller has gone.
            free.release()
            time.sleep(AGAIN_SECONDS)


def stop_listening(listener: socket.socket) -> None:
    """Close a listener so that its port is free at once.

    If it were only closed, it would stay for as long as a thread waits for a caller.
    """
    _shut(listener)
    listener.close()


def _shut(connection: socket.socket) -> None:
    """End both directions of a connection, and whatever waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def wait_at_most(
    connection: socket.socket,
    seconds: float,
    directions: Sequence[int] = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO),
) -> None:
    """Let each read and write of a socket fail after some seconds; 0: they wait for ever.

    It also holds for reads and writes by the socket's descriptor, and for the connections that a
    listener accepts. `directions`: options of a socket, for reads and for writes.
    """
    whole_seconds, microseconds = divmod(round(1e6 * seconds), 1_000_000)
    # The kernel's timeval.
    limit = struct.pack("@ll", whole_seconds, microseconds)
    for direction in directions:
        connection.setsockopt(socket.SOL_SOCKET, direction, limit)


def detach_for_store(listener: socket.socket) -> int:
    """Return the descriptor of a listener for torch's store; the socket object lets go of it.

    The store reads from all callers in one thread. Without the limit that is set here, a caller
    that sends half a message would hold up all ranks.
    """
    wait_at_most(listener, STORE_SECONDS)
    return listener.detach()

"""Sockets that listen for other ranks and hosts, and that strangers on the network reach, too."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

# Handshakes that are under way at a time: each takes two descriptors and two threads.
MOST_STRANGERS = 64
# For a whole handshake: a stranger could send one byte now and then for ever.
MEET_SECONDS = 60.0
# Before the next attempt, if this process has no descriptors or threads left.
AGAIN_SECONDS = 0.2
# For the rest of a message to the ranks' store.
STORE_SECONDS = 5.0

Met = TypeVar("Met")


def each_caller(
    listener: socket.socket,
    meet: Callable[[socket.socket], Met | None],
    serve: Callable[[Met], object],
) -> None:
    """Meet and serve each caller of `listener` in a thread of its own, until it is closed.

    `meet`: makes the handshake and returns what `serve` takes. It returns None, or raises OSError,
    for a stranger. At most MOST_STRANGERS handshakes are under way; further callers wait, so that
    they take no descriptors from the run.
    """
    free = threading.BoundedSemaphore(MOST_STRANGERS)

    def one(connected: socket.socket) -> None:
        met = None
        try:
            # `meet` owns `connected`, and may close it. The timer has an object of its own.
            with suppress(OSError, RuntimeError), connected.dup() as ends:
                limit = threading.Timer(MEET_SECONDS, _shut, (ends,))
                limit.daemon = True
                limit.start()
                try:
                    met = meet(connected)
                finally:
                    limit.cancel()
        finally:
            free.release()
        if met is not None:
            serve(met)

    while listener.fileno() >= 0:
        free.acquire()
        try:
            connected, _ = listener.accept()
            threading.Thread(
                target=one, args=(connected,), daemon=True, name="drumline-caller"
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


def _shut(ends: socket.socket) -> None:
    """End both directions of a connection, and whatever waits for it."""
    with suppress(OSError):
        ends.shutdown(socket.SHUT_RDWR)


def wait_at_most(
    ends: socket.socket,
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
        ends.setsockopt(socket.SOL_SOCKET, direction, limit)


def detach_for_store(listener: socket.socket) -> int:
    """Return the descriptor of a listener for torch's store; the socket object lets go of it.

    The store reads from all callers in one thread. Without the limit that is set here, a caller
    that sends half a message would hold up all ranks.
    """
    wait_at_most(listener, STORE_SECONDS)
    return listener.detach()

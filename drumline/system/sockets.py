"""What this host listens with: strangers reach it, too. No torch here."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

MOST_STRANGERS = 64  # that are met at a time: each takes two descriptors and two threads
MEET_SECONDS = 60.0  # for all of a handshake: who sends a byte now and then is no caller
AGAIN_SECONDS = 0.2
STORE_SECONDS = 5.0  # for the rest of a message to the ranks' store

Met = TypeVar("Met")


def each_caller(
    listener: socket.socket,
    meet: Callable[[socket.socket], Met | None],
    serve: Callable[[Met], object],
) -> None:
    """Until `listener` is closed: `serve` what `meet` makes of a caller, in a thread of its own. `meet`: None, or OSError, for who is none
    of ours. Callers beyond MOST_STRANGERS wait, so that they take no descriptors of the run."""
    free = threading.BoundedSemaphore(MOST_STRANGERS)

    def one(connected: socket.socket) -> None:
        met = None
        try:
            with suppress(OSError, RuntimeError), connected.dup() as ends:  # `meet` takes the other
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
        except (
            OSError,
            RuntimeError,
        ):  # no descriptors or threads are left now, or the caller has gone
            free.release()
            time.sleep(AGAIN_SECONDS)


def stop_listening(listener: socket.socket) -> None:
    """Its port is free then: closed alone, a listener stays for as long as a thread waits for a caller."""
    _shut(listener)
    listener.close()


def _shut(ends: socket.socket) -> None:
    with suppress(OSError):
        ends.shutdown(socket.SHUT_RDWR)


def wait_at_most(
    ends: socket.socket,
    seconds: float,
    directions: Sequence[int] = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO),
) -> None:
    """Of each read and write of a socket, also by its number; of a listener's callers as well; 0: for ever."""
    for direction in directions:
        ends.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", int(seconds), 0))


def for_store(listener: socket.socket) -> int:
    """Its number, for torch's store, which reads from all in one thread: who sends half a message would hold up all ranks."""
    wait_at_most(listener, STORE_SECONDS)
    return listener.detach()

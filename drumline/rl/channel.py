"""Messages between a rank and a process of rewards: one line of JSON each, over a pair of sockets. No torch.

A reward shares its process with one end, and may write on any file descriptor there: what the rank reads is not trusted.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

LONGEST_ANSWER = 2**20  # bytes; a reward's value or its reason take a few hundred


class Garbled(Exception):
    """What came is no message."""


class Channel:
    """One end. `longest`: bytes of a message that is read; None: any."""

    def __init__(self, end: socket.socket, longest: int | None = None) -> None:
        self.end, self.longest = end, longest
        self._rest = bytearray()

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Raises OSError where the other end is gone, TimeoutError where it does not read."""
        self.end.settimeout(seconds)
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next one. Raises TimeoutError where none comes within `seconds`, EOFError or OSError where the other end is gone, Garbled."""
        until = None if seconds is None else time.monotonic() + seconds
        while (size := self._rest.find(b"\n")) < 0:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self.end.settimeout(left)
            more = self.end.recv(2**16)
            if not more:
                raise EOFError
            self._rest += more
            if self.longest is not None and len(self._rest) > self.longest:
                raise Garbled
        line = bytes(self._rest[:size])
        del self._rest[: size + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Garbled from None
        if not isinstance(message, dict):
            raise Garbled
        return message

    @property
    def ended(self) -> bool:
        """Whether the other end is closed."""
        try:
            self.end.settimeout(0)
            return self.end.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.end.close()

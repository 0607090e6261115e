"""Being asked to stop: a handler that only sets a flag, for the loop to find between two steps."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """While it is entered, SIGTERM, SIGUSR1 and SIGINT set `requested` instead of ending the process."""

    def __init__(self) -> None:
        self.requested = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        self._old = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = number

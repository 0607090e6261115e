"""What the launcher was asked from outside."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Asked:
    """Signals to the launcher, noted while it is entered; old handlers come back at the end.

    `number`: the first one (a lost terminal counts as SIGTERM), 0 before. `at_once`: a Ctrl-C came after it. Other signals that
    follow are no hurry: batch systems and wrappers repeat theirs while the ranks are still saving.
    """

    def __init__(self) -> None:
        self.number = 0
        self.at_once = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Asked:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.at_once |= number == signal.SIGINT
        else:
            self.number = signal.SIGTERM if number == signal.SIGHUP else number

"""What was asked from outside: signals that are noted instead of ending the process, in the launcher and in each rank."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Signals:
    """Hands `numbers` to `_note` while it is entered in the main thread; old handlers come back at the end."""

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in self.numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class Asked(Signals):
    """Signals to the launcher.

    `number`: the first one (a lost terminal counts as SIGTERM), 0 before. `at_once`: a Ctrl-C came after it. Other signals that
    follow are no hurry: batch systems and wrappers repeat theirs while the ranks are still saving.
    """

    numbers = (*Signals.numbers, signal.SIGHUP)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.at_once |= number == signal.SIGINT
        else:
            self.number = signal.SIGTERM if number == signal.SIGHUP else number

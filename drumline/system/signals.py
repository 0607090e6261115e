"""Signals that are noted, or raised, instead of ending the process: in the launcher and in each rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, Self

LEFT = 130  # the exit code after Ctrl-C, as shells have it
NOTHING_LOST = 75  # the exit code after a signal, as of errors.Preempted


class Signals:
    """Hands `numbers` to `_note` while it is entered in the main thread; old handlers come back at the end."""

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    number = 0  # the first that came
    _old: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # `nohup` has a lost terminal ignored, and so it stays.
            heard = [
                n
                for n in self.numbers
                if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
            ]
            self._old = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class LauncherSignals(Signals):
    """Signals to the launcher. `number`: the first one (a lost terminal counts as SIGTERM), 0 before. `at_once`: a Ctrl-C came after it.
    Other signals that follow are no hurry: batch systems and wrappers repeat theirs while the ranks
    are still saving."""

    at_once = False
    _around: Stoppable | None = None

    def __init__(self, trial: bool = False) -> None:
        """`trial`: nothing that is launched is worth saving; signals are left to the Stoppable around it."""
        self.numbers = () if trial else (*Signals.numbers, signal.SIGHUP)

    def __enter__(self) -> Self:
        handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        super().__enter__()
        if isinstance(handler, Stoppable) and not self.numbers:
            self._around = handler
        elif isinstance(handler, Stoppable) and handler.number:
            # The signal that Python swallowed goes to what is launched now.
            self.number, handler.number = (
                handler.number,
                0,
            )
        return self

    def raise_swallowed(self) -> None:
        """Raises Interrupted where a trial's ranks were killed by the Stoppable around it, and Python swallowed what that raised."""
        if self._around is not None and self._around.number:
            raise Interrupted(self._around.number)

    def note(self, number: int) -> None:
        """A signal that came to the launcher, in the agent of one of its hosts."""
        self._note(number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.at_once |= number == signal.SIGINT
        else:
            self.number = signal.SIGTERM if number == signal.SIGHUP else number


class StopFlag(Signals):
    """Signals to a rank: they set `requested` (the number of the last one, or 0), for the loop to find between two steps."""

    requested = 0

    def __init__(self, alone: bool = False) -> None:
        """`alone`: no launcher repeats a Ctrl-C, so a second one is a KeyboardInterrupt: what is between two steps may take long."""
        self.alone = alone

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.alone and number == self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = number


class Interrupted(BaseException):
    """A signal came while there was nothing to save. No Exception: it is no failure that could be tried again."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: nothing was lost")
        self.number = number


class Stoppable(Signals):
    """Around work that has nothing to save, such as planning and tokenising: the first signal kills the processes that were started for it
    and raises Interrupted in the main thread, which removes what is half written. A Ctrl-C after it
    does not wait for that. Python swallows what is raised while it runs a finaliser or another
    callback, and prints a traceback. Here it prints none, and Interrupted is raised at the end
    instead."""

    numbers = (*Signals.numbers, signal.SIGHUP)

    def __enter__(self) -> Self:
        self._hook = sys.unraisablehook
        sys.unraisablehook = lambda swallowed: (
            None if isinstance(swallowed.exc_value, Interrupted) else self._hook(swallowed)
        )
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        super().__exit__(kind, *more)
        sys.unraisablehook = self._hook
        if self.number and not (kind and issubclass(kind, Interrupted)):
            raise Interrupted(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            os._exit(NOTHING_LOST)
        if not self.number:
            self.number = number
            _kill_children()
            raise Interrupted(number)


class CtrlC(Signals):
    """Within a Stoppable: Ctrl-C is a KeyboardInterrupt all the same, for who makes use of it."""

    numbers = (signal.SIGINT,)

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def _kill_children() -> None:
    """SIGKILL whatever this process has started, and what that has. Python's own keeper of semaphores ends by itself, after tidying up."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                child.kill()
        except psutil.Error:  # it has ended
            continue

"""Signals that are noted, or raised, in place of ending the process.

The launcher has its own, and so has each rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, Self

# The exit code after Ctrl-C, by the convention of shells (128 + SIGINT).
EXIT_INTERRUPTED = 130
# The exit code after a signal that cost no work: the same command goes on later. It is EX_TEMPFAIL
# of sysexits.h, and also that of errors.Preempted.
EXIT_TEMPFAIL = 75


class Signals:
    """A context in which `_note` handles the signals `numbers`.

    At its end the old handlers are back. It has no effect outside of the main thread, as Python
    allows handlers there alone.
    """

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    _old: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            old: dict[int, Any] = {}
            for number in self.numbers:
                # Under `nohup` a process ignores that its terminal is lost: keep ignoring it.
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                old[number] = signal.signal(number, self._note)
            self._old = old
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        raise NotImplementedError


class LauncherSignals(Signals):
    """The signals to the launcher.

    `number`: the first signal, and 0 if none came; a lost terminal counts as SIGTERM. `at_once`: a
    Ctrl-C came after it, so ranks are killed. Other signals that follow hurry nothing: batch
    systems and wrappers repeat theirs while the ranks are still saving.
    """

    number = 0
    at_once = False
    _around: Stoppable | None = None

    def __init__(self, trial: bool = False) -> None:
        """`trial`: nothing that is launched is worth saving.

        The Stoppable around it handles the signals then.
        """
        self.numbers = () if trial else (*Signals.numbers, signal.SIGHUP)

    def __enter__(self) -> Self:
        handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        super().__enter__()
        if isinstance(handler, Stoppable) and not self.numbers:
            self._around = handler
        elif isinstance(handler, Stoppable) and handler.number:
            # Python swallowed the Interrupted of this signal. The launch takes it over.
            self.number = handler.number
            handler.number = 0
        return self

    def raise_swallowed(self) -> None:
        """Raise Interrupted again for a trial, if Python has swallowed it.

        The Stoppable around the trial has killed its ranks by then.
        """
        if self._around is not None and self._around.number:
            raise Interrupted(self._around.number)

    def note(self, number: int) -> None:
        """Handle a signal that came to the launcher in the agent of one of its hosts."""
        self._note(number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.at_once |= number == signal.SIGINT
        else:
            self.number = signal.SIGTERM if number == signal.SIGHUP else number


class StopFlag(Signals):
    """The signals that ask a rank to stop. The loop reads `requested` between two steps.

    `requested`: the number of the last signal; 0 if none came.
    """

    requested = 0

    def __init__(self, alone: bool = False) -> None:
        """`alone`: the rank has no launcher, so a second Ctrl-C raises KeyboardInterrupt.

        Under a launcher a rank may get the same Ctrl-C twice. Alone, the user presses it again if
        the step takes long.
        """
        self.alone = alone

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.alone and number == self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = number


class Interrupted(BaseException):
    """A signal came while there was nothing to save.

    It is no Exception, because nobody should handle it as a failure and try again.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: nothing was lost")
        self.number = number


class Stoppable(Signals):
    """The signals during work that has nothing to save, such as planning and tokenising.

    The first signal kills the processes that the work has started, and raises Interrupted in the
    main thread, which removes what is half written. A Ctrl-C after it ends the process without
    waiting.

    Python swallows what is raised while it runs a finaliser or another callback, and prints a
    traceback. Here it prints none, and Interrupted is raised at the end instead.
    """

    numbers = (*Signals.numbers, signal.SIGHUP)
    # The first signal; 0 if none came.
    number = 0

    def __enter__(self) -> Self:
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._report_swallowed
        return super().__enter__()

    def _report_swallowed(self, swallowed: Any) -> None:
        """Print what Python has swallowed, unless it is Interrupted."""
        if not isinstance(swallowed.exc_value, Interrupted):
            self._hook(swallowed)

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        super().__exit__(kind, *more)
        sys.unraisablehook = self._hook
        if self.number and not (kind and issubclass(kind, Interrupted)):
            raise Interrupted(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            os._exit(EXIT_TEMPFAIL)
        if not self.number:
            self.number = number
            _kill_children()
            raise Interrupted(number)


class CtrlC(Signals):
    """Makes Ctrl-C a KeyboardInterrupt inside a Stoppable, for work that handles it."""

    numbers = (signal.SIGINT,)

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def _kill_children() -> None:
    """Kill all processes that descend from this one by SIGKILL.

    Python's own resource tracker is left out: it ends by itself, after it has removed semaphores.
    """
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                child.kill()
        except psutil.Error:
            # It has ended already.
            continue

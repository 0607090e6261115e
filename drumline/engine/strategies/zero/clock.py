"""Measure how long a process waits in DeepSpeed's collectives on a CPU.

There a collective runs while it is called, or ends while it is waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from drumline.system.heartbeat import note_collective


class CollectiveClock:
    """Seconds in collectives since the last `take`.

    Only those during a step count, not saves or evaluations.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_running = False

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Count the collectives in a `with` block."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts the seconds of `call` and of waiting for its result."""

        def wrapper(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **named)
            if self.is_running:
                seconds = time.perf_counter() - began
                self.seconds += seconds
                note_collective(seconds)
            if hasattr(result, "wait"):
                return Work(result, self)
            return result

        return wrapper

    def take(self) -> float:
        """Return the seconds, and start again at 0."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds


class Backend:
    """A stand-in for DeepSpeed's backend, which DeepSpeed calls for each collective."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.clock = CollectiveClock()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.backend, name)
        if callable(attribute):
            return self.clock.wrap(attribute)
        return attribute


class Work:
    """A collective that has begun, whose `wait` is timed."""

    def __init__(self, work: Any, clock: CollectiveClock) -> None:
        self.work = work
        self.wait = clock.wrap(work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def clock_of_backend(comm: Any) -> CollectiveClock:
    """Return the clock of DeepSpeed's backend, set to 0: one for all engines of a process.

    `comm`: DeepSpeed's module that holds the backend.
    """
    if not isinstance(comm.cdb, Backend):
        comm.cdb = Backend(comm.cdb)
    clock: CollectiveClock = comm.cdb.clock
    clock.take()
    return clock

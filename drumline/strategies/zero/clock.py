"""How long a process waits in DeepSpeed's collectives, on a CPU: there they run where they are called, or end where they are waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


class Clock:
    """Seconds in collectives since the last `take`, as long as a step runs: saves and evaluations do not count."""

    def __init__(self) -> None:
        self.seconds, self.runs = 0.0, False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.runs = True
        try:
            yield
        finally:
            self.runs = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            made = call(*args, **named)
            self.seconds += time.perf_counter() - began if self.runs else 0.0
            return Work(made, self) if hasattr(made, "wait") else made

        return wrapper

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Backend:
    """What stands in the place of DeepSpeed's backend, of which it asks every collective."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.clock = backend, Clock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.backend, name)
        return self.clock.timed(found) if callable(found) else found


class Work:
    """A collective on its way."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self.work, self.wait = work, clock.timed(work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def clock(comm: Any) -> Clock:
    """Of the backend that DeepSpeed uses: one for all engines of a process, set to 0. `comm`: DeepSpeed's module that holds it."""
    if not isinstance(comm.cdb, Backend):
        comm.cdb = Backend(comm.cdb)
    comm.cdb.clock.take()
    return comm.cdb.clock

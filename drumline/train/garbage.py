"""Python's garbage collector, run by all ranks after the same steps.

By itself it would run on each rank at another moment, and all other ranks would wait for that rank
in their next collective. With more ranks that happens more often. torchtitan does the same.
"""

from __future__ import annotations

import gc
from typing import Self

YOUNG = 1  # generation of objects that survived at most one collection; the model is older
FULL_EVERY = 10  # every so many collections one is full: over all objects, in tenths of a second


class GarbageCollection:
    """A context in which Python collects cycles of objects only when `collect_if_due` is called."""

    def __init__(self, every: int) -> None:
        """`every`: steps between two collections; 0: Python decides, as it does without this."""
        self.every = every
        self.was_enabled = False

    def __enter__(self) -> Self:
        if self.every:
            self.was_enabled = gc.isenabled()
            gc.collect()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()

    def collect_if_due(self, step: int) -> None:
        """Collect if it is time.

        `step`: steps done since the run began, the same on all ranks.
        """
        if not self.every or step % self.every:
            return
        if step % (FULL_EVERY * self.every) == 0:
            gc.collect()
        else:
            gc.collect(YOUNG)

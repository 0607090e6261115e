"""Python's garbage collector, run by all ranks after the same steps.

Left to itself it runs on each rank at a moment of its own, and all other ranks wait for that rank
in their next collective: the more ranks, the more often. torchtitan takes it in hand likewise.
"""

from __future__ import annotations

import gc
from typing import Self

YOUNG = 1  # objects that have survived at most one collection; the model is not among them
WHOLE = 10  # each so many collections one looks at all objects, which takes tenths of a second


class GarbageCollection:
    """A context in which Python collects cycles of objects only when `after` says so."""

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

    def after(self, step: int) -> None:
        """Collect, where it is time.

        `step`: steps done since the run began, the same on all ranks.
        """
        if not self.every or step % self.every:
            return
        if step % (WHOLE * self.every) == 0:
            gc.collect()
        else:
            gc.collect(YOUNG)

"""Where a run stands, and where its time went: the little that a checkpoint holds besides tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """The trainer's own state. `position` counts samples drawn from the global order since step 0; `tokens` are real ones, all ranks.
    `stream`: what a stream of rollouts goes on from besides."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    best: float | None = None
    skips: int = 0
    stream: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, values: dict[str, Any]) -> TrainState:
        return cls(**values)


class Goodput:
    """Seconds of this process by what they were spent on; what no category claims is start-up until the first step, then `other`."""

    CATEGORIES = ("productive", "recompute", "eval", "save", "restore", "startup")

    def __init__(self, started: float) -> None:
        self.started = started
        self.seconds = dict.fromkeys(self.CATEGORIES, 0.0)
        self._first_step = False

    @contextmanager
    def spend(self, category: str) -> Iterator[None]:
        before = time.time()
        try:
            yield
        finally:
            self.seconds[category] += time.time() - before

    def first_step(self) -> None:
        """Start-up ends here: all time so far that nothing else has claimed."""
        if not self._first_step:
            self._first_step = True
            claimed = sum(self.seconds.values())
            self.seconds["startup"] = time.time() - self.started - claimed

    def report(self) -> dict[str, float]:
        elapsed = time.time() - self.started
        other = max(0.0, elapsed - sum(self.seconds.values()))
        return {k: round(v, 3) for k, v in {"elapsed": elapsed, **self.seconds, "other": other}.items()}

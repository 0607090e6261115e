"""Where a run stands, and where its time went: the little that a checkpoint holds besides tensors."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.signals import StopFlag

# A fresh fp16 scale of 2^16 may have to halve this often before the first step fits.
MAX_RESCALES = 20


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


class Patience:
    """How long the last save is tried again: `checkpoint.wait_seconds` from its first failure on, and once the run is asked to stop half
    of `launch.grace_seconds`: the other half is for another disk."""

    def __init__(self, config: Config, stop_flag: StopFlag) -> None:
        self.config, self.stop_flag = config, stop_flag
        self.began: float | None = None
        self.hurried = False
        self.limit = config.checkpoint.wait_seconds

    @property
    def waited(self) -> float:
        """Seconds since the first failure."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    @property
    def over(self) -> bool:
        """Whether to give up; to be asked after each failure."""
        self.began = self.began or time.monotonic()
        if self.stop_flag.requested and not self.hurried:
            self.limit = min(self.limit, self.waited + self.config.launch.grace_seconds / 2)
            self.hurried = True
        return self.waited >= self.limit


def fallback_folder(config: Config, run_dir: str) -> Path | None:
    """Where the last checkpoint of a run goes whose own disk is full: a folder of the run's own in `checkpoint.fallback_dir`."""
    if config.checkpoint.fallback_dir is None:
        return None
    run = Path(run_dir).absolute()
    own = f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"
    return Path(config.checkpoint.fallback_dir).expanduser().absolute() / own


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

"""Ranks that are started before there is a plan: they import what training needs while the launcher plans. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from drumline.core.config import Config
from drumline.core.process import Early
from drumline.core.resolve import default_processes
from drumline.hardware.detect import likely_gpus, usable_cores


class EarlyRanks:
    """As many ranks as there will most likely be, if each has a core. Those that nobody began are killed at the end of the `with`."""

    def __init__(self, config: Config, plan_path: Path) -> None:
        number, cores = default_processes(config, 0 if config.run.device == "cpu" else likely_gpus()), usable_cores()
        self.env = {"OMP_NUM_THREADS": str(cores // number), **os.environ}
        imported = "drumline.train.build" if config.plain else "drumline.train.preload"
        started = range(number if number <= cores else 0)
        self.waiting = [Early(imported, "drumline.train.entry", str(plan_path), env=self.env) for _ in started]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill those that still wait."""
        for early in self.waiting:
            early.kill()
        for early in self.waiting:
            early.communicate()
        self.waiting.clear()

    def take(
        self, usual: Callable[..., Any], args: list[str], *, env: dict[str, str], stdout: IO[str], stderr: IO[str], **options: Any
    ) -> Any:
        """In the place of `usual`, which is Popen: a rank that waits already, unless its environment, in which it has imported torch, is
        not that of the plan: another number of ranks has other numbers of threads."""
        while self.waiting and self.env.items() <= env.items():
            early = self.waiting.pop(0)
            if early.begin(args, env, stdout.name, stderr.name):
                return early
            early.wait()
        return usual(args=args, env=env, stdout=stdout, stderr=stderr, **options)

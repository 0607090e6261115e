"""Ranks that are there before there is a plan: forks of the launcher, which has imported what they need. No torch at the top."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, Self

from drumline.core.config import Config
from drumline.core.process import Early, in_a_fork, uncollected
from drumline.core.resolve import default_processes
from drumline.hardware.detect import likely_gpus, usable_cores

THREADS = "OMP_NUM_THREADS"


class EarlyRanks:
    """As many ranks as there will most likely be. Those that nobody began are killed at the end of the `with`.

    The launcher and its ranks then import torch and transformers once, not each for itself. There are none where a fork would not be
    safe: beside other threads, or where this process has used torch already; and none where a library that was imported has asked CUDA
    for its devices: torch's optimizers ask for the current one on a CPU too, and raise in a fork of such a process.
    """

    def __init__(self, config: Config) -> None:
        known = os.environ.get(THREADS)
        number = default_processes(config, 0 if config.run.device == "cpu" else likely_gpus())
        self.threads = known or str(max(1, usable_cores() // number))
        self.waiting: list[Early] = []
        if sys.platform != "linux" or threading.active_count() > 1 or "torch" in sys.modules:
            return
        os.environ[THREADS] = self.threads  # which torch reads as it is imported
        with uncollected():
            importlib.import_module(
                "drumline.train.build" if config.plain else "drumline.train.preload"
            )
        if known is None:
            del os.environ[THREADS]
        if not _can_forks_use_cuda():
            return
        gc.freeze()
        self.waiting += [Early() for _ in range(number)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill those that still wait."""
        for early in self.waiting:
            early.kill()
        for early in self.waiting:
            early.join()
        self.waiting.clear()

    def take(
        self,
        usual: Callable[..., Any],
        args: list[str],
        *,
        env: dict[str, str],
        stdout: IO[str],
        stderr: IO[str],
        **options: Any,
    ) -> Any:
        """In the place of `usual`, which is Popen: a rank that waits already, unless the plan's ranks have another number of threads."""
        while self.waiting and env[THREADS] == self.threads:
            early = self.waiting.pop(0)
            if early.begin(args, env, stdout.name, stderr.name):
                return early
            early.join()
        return usual(args=args, env=env, stdout=stdout, stderr=stderr, **options)


def _can_forks_use_cuda() -> bool:
    """Whether torch lets a fork of this process ask CUDA anything, by a fork that looks: it lets none where CUDA was asked before."""
    from drumline.vendor.torch import is_in_bad_fork

    return in_a_fork(lambda: not is_in_bad_fork())

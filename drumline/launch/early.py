"""Fork ranks off the launcher before there is a plan, after it has imported what ranks need.

Torch is not imported at the top of this module.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, Self

from drumline.config.config import Config
from drumline.hardware.detect import likely_gpus, usable_cores
from drumline.plan.resolve import default_processes
from drumline.system.process import Early, in_a_fork, uncollected

THREADS = "OMP_NUM_THREADS"


class EarlyRanks:
    """Ranks that wait for a plan, as many as there will most likely be. At the end of the `with` the ranks that still wait are killed.

    So the launcher and its ranks import torch and transformers once, and not each for itself. There
    are no such ranks if a fork would not be safe: beside other threads, or if this process has used
    torch already. Nor are there any if an imported library has asked CUDA for its devices: torch's
    optimizers ask for the current device on a CPU too, and raise in a fork of such a process.
    """

    def __init__(self, config: Config) -> None:
        users_threads = os.environ.get(THREADS)
        gpus = 0
        if config.run.device != "cpu":
            gpus = likely_gpus()
        number = default_processes(config, gpus)
        self.threads = users_threads or str(max(1, usable_cores() // number))
        self.waiting: list[Early] = []
        if sys.platform != "linux" or threading.active_count() > 1 or "torch" in sys.modules:
            return
        if config.plain:
            module = "drumline.train.build"
        else:
            module = "drumline.train.preload"
        # Torch reads the number of threads as it is imported.
        os.environ[THREADS] = self.threads
        with uncollected():
            importlib.import_module(module)
        if users_threads is None:
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
        """Kill the ranks that still wait."""
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
        """Return a rank that waits already, if it has as many threads as the plan's ranks.

        Otherwise start a process by `usual`, which is Popen: this function takes its place.
        """
        while self.waiting and env[THREADS] == self.threads:
            early = self.waiting.pop(0)
            if early.begin(args, env, stdout.name, stderr.name):
                return early
            early.join()
        return usual(args=args, env=env, stdout=stdout, stderr=stderr, **options)


def _can_forks_use_cuda() -> bool:
    """Return whether torch lets a fork of this process use CUDA, by a fork that tries. It does not if this process has used CUDA."""
    from drumline.vendor.torch import is_in_bad_fork

    return in_a_fork(lambda: not is_in_bad_fork())

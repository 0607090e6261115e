"""Fork processes before there is a plan, so that ranks start without importing torch again.

The launcher imports what ranks need and then forks. Torch is not imported at the top of this
module.
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
from drumline.system.process import EarlyRank, holds_in_fork, pause_garbage_collection

THREADS = "OMP_NUM_THREADS"


class EarlyRanks:
    """Forked processes that wait for a plan, as many as the plan will most likely have ranks.

    The launcher imports torch and transformers once, and the forks share them. Processes that still
    wait at the end of the `with` block are killed.

    No process is forked if that would not be safe: beside other threads, if this process has used
    torch already, or if an imported library has asked CUDA for its devices. Torch's optimizers ask
    for the current device on a CPU too, and raise in a fork of such a process.
    """

    def __init__(self, config: Config) -> None:
        users_threads = os.environ.get(THREADS)
        gpus = 0
        if config.run.device != "cpu":
            gpus = likely_gpus()
        number = default_processes(config, gpus)
        self.threads = users_threads or str(max(1, usable_cores() // number))
        self.waiting: list[EarlyRank] = []
        if sys.platform != "linux" or threading.active_count() > 1 or "torch" in sys.modules:
            return
        if config.has_own_module:
            module = "drumline.train.build"
        else:
            module = "drumline.train.preload"
        # Torch reads the number of threads as it is imported.
        os.environ[THREADS] = self.threads
        with pause_garbage_collection():
            importlib.import_module(module)
        if users_threads is None:
            del os.environ[THREADS]
        if not _can_forks_use_cuda():
            return
        # What is imported by now is never garbage. A collection in a fork that looked at it would
        # copy the memory that the forks share.
        gc.freeze()
        self.waiting += [EarlyRank() for _ in range(number)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the ranks that still wait."""
        # All are killed before any is waited for, so that they end at the same time.
        for early in self.waiting:
            early.kill()
        for early in self.waiting:
            early.join()
        self.waiting.clear()

    def start_rank(
        self,
        original_popen: Callable[..., Any],
        args: list[str],
        *,
        env: dict[str, str],
        stdout: IO[str],
        stderr: IO[str],
        **options: Any,
    ) -> Any:
        """Turn a waiting process into a rank, or start a new process if none is fit.

        A waiting process is fit if it has as many threads as the plan's ranks: torch has read the
        number at its import. This method replaces `Popen` and has the same arguments.

        Args:
            original_popen: The original `Popen`.
            args: Command line of the rank.
            env: Environment of the rank.
            stdout: Open file whose path the rank writes its output to.
            stderr: Open file whose path the rank writes its errors to.
            options: All other arguments of `Popen`.
        """
        while self.waiting and env[THREADS] == self.threads:
            early = self.waiting.pop(0)
            if early.begin(args, env, stdout.name, stderr.name):
                return early
            # It has died while it waited.
            early.join()
        return original_popen(args=args, env=env, stdout=stdout, stderr=stderr, **options)


def _can_forks_use_cuda() -> bool:
    """Return whether torch lets a fork of this process use CUDA.

    Torch refuses if this process has used CUDA. A trial fork asks, since only a fork can tell.
    """
    from drumline.vendor.torch import is_in_bad_fork

    return holds_in_fork(lambda: not is_in_bad_fork())

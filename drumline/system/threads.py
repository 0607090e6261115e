"""Threads of a rank that compute beside its main thread. No torch at the top."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def on_this_gpu(work: Callable[P, T]) -> Callable[P, T]:
    """Return `work` for another thread, with the current GPU of the thread that calls this.

    A new thread begins on GPU 0. If this process uses no GPU, `work` is returned as it is.
    """
    import torch

    if not torch.cuda.is_initialized():
        return work
    number = torch.cuda.current_device()

    @functools.wraps(work)
    def there(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(number)
        return work(*args, **kwargs)

    return there

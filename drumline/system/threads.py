"""Threads of a rank that compute beside its first one. No torch at the top."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def on_this_gpu(work: Callable[P, T]) -> Callable[P, T]:
    """`work` for another thread, which begins on GPU 0: there it begins on the GPU of the thread that calls this, if that uses any."""
    import torch

    if not torch.cuda.is_initialized():
        return work
    number = torch.cuda.current_device()

    @functools.wraps(work)
    def there(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(number)
        return work(*args, **kwargs)

    return there

"""Threads of a rank that compute beside its main thread. torch is only imported if one is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def bind_to_gpu(work: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `work` on the GPU that is current now, from any thread.

    A new thread would begin on GPU 0. If this process uses no GPU, `work` itself is returned.
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

"""Tensors without memory: torch's FakeTensorMode, and answers to what a run asks of values that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from drumline.vendor.torch import FakeTensorMode, TorchDispatchMode, local_scalar_dense

_ATEN = torch.ops.aten


@contextlib.contextmanager
def faked(packs: bool) -> Iterator[FakeTensorMode]:
    """Within, what is computed has shapes and no values. `packs`: rows hold several documents, so attention gets a mask; otherwise
    transformers finds none needed, as it does in a run (told that it is traced, it would make one)."""
    from drumline.vendor.transformers import masking_utils

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    knows = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_, **__: False
    try:
        with mode, _Answers(not packs):
            yield mode
    finally:
        masking_utils.is_tracing = knows


class _Answers(TorchDispatchMode):
    """What hangs on values: every number is 1, a condition holds if `yes`, and of entries that are picked by a condition all are."""

    def __init__(self, yes: bool) -> None:
        super().__init__()
        self.yes = yes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is local_scalar_dense.default:
            dtype = args[0].dtype
            return self.yes if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _ATEN.nonzero.default:
            return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device=args[0].device)
        if func is _ATEN.index.Tensor and [i.dtype for i in args[1] if i is not None] == [torch.bool] and args[1][0] is not None:
            mask = args[1][0]
            return args[0].new_empty((mask.numel(), *args[0].shape[mask.ndim :]))
        return func(*args, **(kwargs or {}))

"""Bytes that a rank sends to others, counted at the collectives that really run, in whatever calls them: DDP's C++ reducer, FSDP2, DTensor,
pipelines, DeepSpeed. Each goes through torch's dispatcher as an operator of c10d; a dispatch mode sees it with its tensors.

A mode costs microseconds for each operator, so one step of each kind is counted, and its bytes stand for the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.dist.reduce import sum_over_ranks
from drumline.vendor.torch import TorchDispatchMode, resolve_process_group

# How often the bytes of a collective leave each of n ranks in the ring algorithm (Thakur et al. 2005; NCCL's and gloo's for large
# tensors); which argument of c10d's operators is sent, and their names; names of functional collectives (DTensor's), whose first
# argument it is. A broadcast or a reduction to one rank is passed on by all ranks but one.
_RING: tuple[tuple[Callable[[int], float], int, str, str], ...] = (
    (lambda n: 2 * (n - 1) / n, 0, "allreduce_ allreduce_coalesced_",
     "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_"),
    (lambda n: n - 1, 1, "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
     "all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out"),
    (lambda n: (n - 1) / n, 1, "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
     "reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_tensor_out"),
    # Mean over ranks: of a gather all but the root send their part; of a scatter the root alone has inputs, and keeps one.
    (lambda n: (n - 1) / n, 1, "alltoall_ alltoall_base_ gather_ scatter_", "all_to_all_single"),
    (lambda n: (n - 1) / n, 0, "broadcast_ reduce_", "broadcast broadcast_"),
    (lambda n: 1, 0, "send", ""),
)  # fmt: skip
_C10D = {name: (index, share) for share, index, names, _ in _RING for name in names.split()}
_FUNCTIONAL = {name: share for share, _, _, names in _RING for name in names.split()}


class CommunicatedBytes(TorchDispatchMode):
    """While it is entered, adds up in `total` what this rank sends by collectives of this thread and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs compiled under it

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as the collectives and local operators that it is made of
        self.total += _volume(func, args)
        return func(*args, **(kwargs or {}))


def _volume(func: Any, args: tuple[Any, ...]) -> float:
    """Bytes that one call of an operator sends from this rank."""
    name = func.overloadpacket.__name__
    if func.namespace == "c10d" and name in _C10D:
        index, share = _C10D[name]
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        return share(group.size()) * _bytes(args[index])
    if func.namespace == "_c10d_functional" and name in _FUNCTIONAL:
        return _FUNCTIONAL[name](resolve_process_group(args[-1]).size()) * _bytes(args[0])
    return 0.0


def _bytes(tensors: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(_bytes, tensors))


class Traffic:
    """Bytes that each step sends, mean over ranks. The first two steps of a process are not counted: DDP arranges its buckets in them."""

    FIRST = 2

    def __init__(self, kind: Callable[[int], str], device: str) -> None:
        """`kind`: a name for what the step after so many steps sends; the same name, the same bytes."""
        self.kind, self.device = kind, device
        self.known: dict[str, float] = {}
        self.steps = 0
        self._mode: CommunicatedBytes | None = None

    def due(self, step: int) -> bool:
        """Whether the step after `step` steps is counted."""
        return self.steps >= self.FIRST and self.kind(step) not in self.known

    def watch(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Around the parts of a step whose collectives count; it may be entered several times a step."""
        if not self.due(step) or not dist.is_initialized():
            return contextlib.nullcontext()
        self._mode = self._mode or CommunicatedBytes()
        return self._mode

    def end_step(self, step: int, whole: bool) -> int | None:
        """Bytes that the step sent; None where it is not known yet. `whole` False: it was broken off. Collective."""
        kind, due, mode = self.kind(step), self.due(step), self._mode
        self._mode, self.steps = None, self.steps + 1
        if due and whole:
            self.known[kind] = (
                0.0
                if mode is None
                else sum_over_ranks([mode.total], self.device)[0] / dist.get_world_size()
            )
        if not dist.is_initialized():
            return 0
        return round(self.known[kind]) if kind in self.known and whole else None

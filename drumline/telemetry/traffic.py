"""Count the bytes that a rank sends to others, at the collectives that really run.

All collectives (of DDP's C++ reducer, FSDP2, DTensor, pipelines, DeepSpeed) go through torch's
dispatcher as operators of c10d, and a dispatch mode sees them with their tensors. A mode costs
microseconds for each operator, so only one step of each kind is counted, and its bytes stand for
all steps of that kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.dist.reduce import sum_over_ranks
from drumline.vendor.torch import TorchDispatchMode, resolve_process_group


class _RingShare(NamedTuple):
    """Operators that send the same share of a tensor."""

    # Returns for a number of ranks how often the bytes of the tensor leave each rank.
    share: Callable[[int], float]
    # Which argument of c10d's operators is sent.
    sent_argument: int
    # Names of c10d's operators.
    c10d: tuple[str, ...]
    # Names of functional collectives (DTensor's), whose first argument is sent.
    functional: tuple[str, ...] = ()


# By the ring algorithm (Thakur et al. 2005), which is NCCL's and gloo's for large tensors.
_RING = (
    _RingShare(
        lambda n: 2 * (n - 1) / n,
        0,
        ("allreduce_", "allreduce_coalesced_"),
        ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    ),
    _RingShare(
        lambda n: n - 1,
        1,
        (
            "allgather_",
            "_allgather_base_",
            "allgather_coalesced_",
            "allgather_into_tensor_coalesced_",
        ),
        (
            "all_gather_into_tensor",
            "all_gather_into_tensor_coalesced",
            "all_gather_into_tensor_out",
        ),
    ),
    _RingShare(
        lambda n: (n - 1) / n,
        1,
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        (
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter_tensor_out",
        ),
    ),
    # Mean over ranks: of a gather all but the root send their part; of a scatter the root alone has
    # inputs, and keeps one.
    _RingShare(
        lambda n: (n - 1) / n,
        1,
        ("alltoall_", "alltoall_base_", "gather_", "scatter_"),
        ("all_to_all_single",),
    ),
    # A broadcast or a reduction to one rank is passed on by all ranks but one.
    _RingShare(
        lambda n: (n - 1) / n,
        0,
        ("broadcast_", "reduce_"),
        ("broadcast", "broadcast_"),
    ),
    _RingShare(lambda n: 1, 0, ("send",)),
)
_BY_C10D_NAME = {name: collective for collective in _RING for name in collective.c10d}
_BY_FUNCTIONAL_NAME = {name: collective for collective in _RING for name in collective.functional}


class CommunicatedBytes(TorchDispatchMode):
    """A mode that counts the bytes that this rank sends, in `total`.

    It sees the collectives of this thread and of its backward. The share of a collective that
    leaves a rank is that of the ring algorithm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code stays compiled under this mode.
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            # It comes again as the collectives and local operators that it consists of.
            return NotImplemented
        self.total += _volume(func, args)
        return func(*args, **(kwargs or {}))


def _volume(func: Any, args: tuple[Any, ...]) -> float:
    """Return the bytes that a call of an operator sends from this rank; 0 for no collective."""
    name = func.overloadpacket.__name__
    if func.namespace == "c10d" and name in _BY_C10D_NAME:
        collective = _BY_C10D_NAME[name]
        # The first such argument is the group. The operator of a reduction comes after it.
        script_object = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(script_object)
        sent = args[collective.sent_argument]
    elif func.namespace == "_c10d_functional" and name in _BY_FUNCTIONAL_NAME:
        collective = _BY_FUNCTIONAL_NAME[name]
        # Their last argument is the group's name.
        group = resolve_process_group(args[-1])
        sent = args[0]
    else:
        return 0.0
    share = collective.share(group.size())
    return share * _bytes(sent)


def _bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_bytes(inner) for inner in tensors)


class Traffic:
    """Counts the bytes that each step sends, mean over ranks.

    One step of each kind is counted, and its bytes stand for all steps of that kind.
    """

    # The first steps of a process are not counted: DDP arranges its buckets in them.
    FIRST = 2

    def __init__(self, kind: Callable[[int], str], device: str) -> None:
        """Make a counter that knows nothing yet.

        Args:
            kind: Returns the kind of the step after so many steps. Steps of one kind send the same
                bytes.
            device: Device of the tensors in which ranks add up their bytes.
        """
        self.kind = kind
        self.device = device
        # Bytes by kind of step, for the kinds that were counted.
        self.known: dict[str, float] = {}
        # Number of steps of this process.
        self.steps = 0
        self._mode: CommunicatedBytes | None = None

    def due(self, step: int) -> bool:
        """Return whether the step after `step` steps is counted."""
        return self.steps >= self.FIRST and self.kind(step) not in self.known

    def watch(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context that counts the collectives of a part of a step, which may have several."""
        if not self.due(step) or not dist.is_initialized():
            return contextlib.nullcontext()
        if self._mode is None:
            self._mode = CommunicatedBytes()
        return self._mode

    def end_step(self, step: int, whole: bool) -> int | None:
        """End the step after `step` steps, and return the bytes that it sent.

        Collective. The bytes are None if they are not known yet. `whole` is False for a step that
        was interrupted, which is not counted.
        """
        kind = self.kind(step)
        is_counted = self.due(step) and whole
        mode = self._mode
        self._mode = None
        self.steps += 1
        if is_counted and mode is None:
            # A single process, or a step without any watched part.
            self.known[kind] = 0.0
        elif is_counted and mode is not None:
            of_all_ranks = sum_over_ranks([mode.total], self.device)[0]
            self.known[kind] = of_all_ranks / dist.get_world_size()
        if not dist.is_initialized():
            return 0
        if not whole or kind not in self.known:
            return None
        return round(self.known[kind])

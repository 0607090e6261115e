"""Count the bytes that a rank sends to others, at the collectives that really run.

All collectives (of DDP's C++ reducer, FSDP2, DTensor, pipelines, DeepSpeed) go through torch's
dispatcher as operators of c10d, and a dispatch mode sees them with their tensors. A mode costs
microseconds for each operator, so only one step of each type is counted, and its bytes stand for
all steps of that type. Local SGD, for example, has steps that average the weights and steps that
do not (`Strategy.step_kind`).
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


class _RingCost(NamedTuple):
    """Operators that send the same number of bytes for each byte of their argument."""

    # Number of ranks → bytes that each rank sends, divided by the bytes of the sent argument.
    sent_factor: Callable[[int], float]
    # Which argument of c10d's operators is sent.
    sent_argument: int
    # Names of c10d's operators.
    c10d: tuple[str, ...]
    # Names of functional collectives (DTensor's), whose first argument is sent.
    functional: tuple[str, ...] = ()


# By the ring algorithm (Thakur et al. 2005), which is NCCL's and gloo's for large tensors.
_RING = (
    _RingCost(
        lambda n: 2 * (n - 1) / n,
        0,
        ("allreduce_", "allreduce_coalesced_"),
        ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    ),
    _RingCost(
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
    _RingCost(
        lambda n: (n - 1) / n,
        1,
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        (
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter_tensor_out",
        ),
    ),
    # Mean over ranks. Gather: each rank but the root sends its tensor. Scatter: the root sends n - 1
    # of its n inputs.
    _RingCost(
        lambda n: (n - 1) / n,
        1,
        ("alltoall_", "alltoall_base_", "gather_", "scatter_"),
        ("all_to_all_single",),
    ),
    # A broadcast or a reduction to one rank is passed on by all ranks but one.
    _RingCost(
        lambda n: (n - 1) / n,
        0,
        ("broadcast_", "reduce_"),
        ("broadcast", "broadcast_"),
    ),
    _RingCost(lambda n: 1, 0, ("send",)),
)
_BY_C10D_NAME = {name: collective for collective in _RING for name in collective.c10d}
_BY_FUNCTIONAL_NAME = {name: collective for collective in _RING for name in collective.functional}


class CommunicatedBytes(TorchDispatchMode):
    """A mode that counts the bytes that this rank sends, in `total`.

    It sees the collectives of this thread and of its backward. What a rank sends of a collective
    is computed by the ring algorithm.
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
        # The first ScriptObject is the ProcessGroup. A ReduceOp, if there is one, comes after it.
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
    factor = collective.sent_factor(group.size())
    return factor * _bytes(sent)


def _bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_bytes(inner) for inner in tensors)


class Traffic:
    """Counts the bytes that each step sends, mean over ranks.

    One step of each type is counted, and its bytes stand for all steps of that type.
    """

    # The first steps of a process are not counted: DDP arranges its buckets in them.
    FIRST = 2

    def __init__(self, step_type: Callable[[int], str], device: str) -> None:
        """Make a counter that knows nothing yet.

        Args:
            step_type: Returns the type of a step by the number of steps before it, as
                `Strategy.step_kind` does. Steps of one type send the same bytes.
            device: Device of the tensors in which ranks add up their bytes.
        """
        self.step_type = step_type
        self.device = device
        # Bytes that a rank sends by type of step, for the types that were counted.
        self.known: dict[str, float] = {}
        # Number of steps of this process.
        self.steps = 0
        self._mode: CommunicatedBytes | None = None

    def due(self, steps_done: int) -> bool:
        """Return whether the step after `steps_done` steps is counted."""
        return self.steps >= self.FIRST and self.step_type(steps_done) not in self.known

    def watch(self, steps_done: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context that counts the collectives of a part of a step, which may have several."""
        if not self.due(steps_done) or not dist.is_initialized():
            return contextlib.nullcontext()
        if self._mode is None:
            self._mode = CommunicatedBytes()
        return self._mode

    def end_step(self, steps_done: int, made_update: bool) -> int | None:
        """End a step, and return the bytes that a rank sends in a step of its type.

        Collective. None until a step of this type was counted, and for a step without an update,
        which sends less and is not counted; 0 without torch.distributed.
        """
        step_type = self.step_type(steps_done)
        is_counted = self.due(steps_done) and made_update
        mode = self._mode
        self._mode = None
        self.steps += 1
        if is_counted and mode is None:
            # A single process, or a step without any watched part.
            self.known[step_type] = 0.0
        elif is_counted and mode is not None:
            of_all_ranks = sum_over_ranks([mode.total], self.device)[0]
            self.known[step_type] = of_all_ranks / dist.get_world_size()
        if not dist.is_initialized():
            return 0
        if not made_update or step_type not in self.known:
            return None
        return round(self.known[step_type])

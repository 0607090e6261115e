"""Follow the bytes of tensors on a CPU through one step: their peak, and the phase of the peak.

    live = LiveBytes()
    with live:
        engine.forward_backward(…)
        live.phase = "clip"
        norm = engine.grad_norm()
        live.phase = "step"
        engine.step(…)
    live.peak   # bytes
    live.peaks  # bytes by phase: forward, backward, clip, step

The phases forward and backward come from autograd itself. The first time `live` is entered, it
searches for tensors that exist already; it may be entered several times.

A CPU has no allocator that counts. Here storages are counted, as in
torch.distributed._tools.mem_tracker: several views may share one. Each storage has a weak
reference, whose callback runs when the storage is freed. A step takes several times as long as
without the tracker. It may be entered beside `telemetry.traffic.CommunicatedBytes`, in either
order.

Not seen are memory that a kernel allocates and frees itself, and tensors that compiled code
(torch.compile) keeps for its own backward.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import compress
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from drumline.vendor.torch import (
    FakeTensor,
    TorchDispatchMode,
    current_graph_task_id,
    is_traceable_wrapper_subclass,
    tree_leaves,
)

Phase = Literal["forward", "backward", "clip", "step"]
# The longest time for which a search for tensors keeps other threads waiting. It takes about a
# tenth of a second for a million objects.
SEARCH_SECONDS = 5.0


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that follows the bytes of all storages on the CPU while it is entered.

    While any dispatch mode is on, autograd adds the gradients of a weight that is used twice in a
    new tensor, and not in place. If the peak is at the end of backward, a tied embedding therefore
    has one gradient more here than in a run without the mode.

    Attributes:
        current: Bytes of all storages now.
        base: Bytes of all storages when the mode was first entered.
        peak: Most bytes at once, after any operator.
        peaks: Most bytes at once in each phase.
        phase: The phase, set by the caller to `clip` or `step`. None leaves it to autograd:
            `backward` within its engine, recomputation included, else `forward`.
    """

    def __init__(self, fake: bool = False) -> None:
        """Make a tracker. `fake`: count only FakeTensors; otherwise only real tensors."""
        super().__init__()
        self.fake = fake
        self.phase: Phase | None = None
        self.base = 0
        self.current = 0
        self.peak = 0
        self.peaks: dict[Phase, int] = {}
        # Bytes by the address of the storage's object, while that lives.
        self._sizes: dict[int, int] = {}
        # Bytes of storages that were first seen as an argument of an operator, so they were
        # allocated earlier or inside a kernel. They are not in `current` yet, see `_settle`.
        self._preexisting: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._depth = 0
        self._has_searched = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        if not self._has_searched:
            self._has_searched = True
            self._follow_existing()
        if self._depth == 0:
            self._resize = resize = torch.UntypedStorage.resize_

            def resize_(storage: torch.UntypedStorage, size: int) -> Any:
                """Resize a storage and count it. FSDP2 frees gathered weights this way."""
                out = resize(storage, size)
                if id(storage) in self._references:
                    self._note_size(id(storage), storage.nbytes())
                    self._note()
                return out

            torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
            self._settle()
        super().__exit__(*error)

    def _follow_existing(self) -> None:
        """Count the storages of all tensors that Python finds."""
        for tensor in existing_tensors():
            self._follow(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                self._follow(tensor.grad)
        self.base = self.current
        self.peak = self.current

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            # It comes again as the local operators that it consists of.
            return NotImplemented
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf, is_argument=True)
        result = func(*args, **(kwargs or {}))
        # Arguments again: some operators give them another size.
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        self._note()
        return result

    def _follow(self, tensor: torch.Tensor, is_argument: bool = False) -> None:
        """Count the storage of a tensor.

        Args:
            tensor: The tensor.
            is_argument: Whether it is an argument of an operator. A storage that is first seen there
                was allocated earlier.
        """
        for part in plain_parts(tensor):
            if isinstance(part, FakeTensor):
                counts = self.fake and part.fake_device.type == "cpu"
            else:
                counts = (
                    not self.fake and part.device.type == "cpu" and part.layout is torch.strided
                )
            if counts:
                storage = part.untyped_storage()
                key = id(storage)
                if key not in self._references:
                    self._references[key] = weakref.ref(storage, partial(self._forget, key))
                    if is_argument:
                        self._preexisting[key] = 0
                # An int: torch caches the sizes of fakes across modes, and a compiled function may
                # have made a symbol of one.
                self._note_size(key, int(storage.nbytes()))

    def _note_size(self, key: int, bytes_: int) -> None:
        """Note the size of a storage."""
        if key in self._preexisting:
            self._preexisting[key] = bytes_
        else:
            self.current += bytes_ - self._sizes.get(key, 0)
            self._sizes[key] = bytes_

    def _forget(self, key: int, _: Any) -> None:
        """Forget a storage that was freed."""
        del self._references[key]
        if self._preexisting.pop(key, None) is None:
            self.current -= self._sizes.pop(key)

    def _settle(self) -> None:
        """Add the storages that were first seen as arguments to all counts, if they still exist.

        Those that still exist, such as DDP's buckets, existed all the time. Those that were freed,
        such as gloo's buffers, belonged to a kernel and are ignored.
        """
        more = sum(self._preexisting.values())
        self._sizes |= self._preexisting
        self._preexisting.clear()
        self.base += more
        self.current += more
        self.peak += more
        self.peaks = {phase: peak + more for phase, peak in self.peaks.items()}

    def _note(self) -> None:
        """Note the current bytes as the peak if they are more than before."""
        phase = self.phase
        if phase is None:
            is_in_backward = current_graph_task_id() != -1
            phase = "backward" if is_in_backward else "forward"
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.current)
        self.peak = max(self.peak, self.current)


def existing_tensors() -> list[torch.Tensor]:
    """Return all tensors that Python's garbage collector knows.

    `gc.get_objects()` takes a reference to every tuple. If another thread is still growing one,
    CPython raises SystemError in that thread. So other threads wait while the list of all objects
    exists, for less than SEARCH_SECONDS.
    """
    ids = {id(cls) for cls in _with_subclasses(torch.Tensor)}
    gc.collect()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SEARCH_SECONDS)
    try:
        # Threads run now that have been waiting by the old interval.
        time.sleep(2 * interval)
        # When this returns nothing refers to the list any more.
        return _objects_of_types(ids)
    finally:
        sys.setswitchinterval(interval)


def _objects_of_types(ids: set[int]) -> list[Any]:
    """Return all objects that the garbage collector knows and whose type has one of these ids."""
    objects = gc.get_objects()
    # By their types: some objects answer `isinstance` by running code.
    is_wanted = map(ids.__contains__, map(id, map(type, objects)))
    return list(compress(objects, is_wanted))


def _with_subclasses(cls: type) -> set[type]:
    """Return a class and all classes that derive from it."""
    found = {cls}
    subclasses: list[type] = type.__subclasses__(cls)
    for subclass in subclasses:
        found |= _with_subclasses(subclass)
    return found


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with storages that a tensor consists of, as a DTensor's local shard."""
    # First, since any call on a FakeTensor would go through its mode, which takes long.
    if isinstance(tensor, FakeTensor):
        return [tensor]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = cast(Any, tensor).__tensor_flatten__()
        parts: list[torch.Tensor] = []
        for name in names:
            inner = getattr(tensor, name)
            # A mesh may be among them.
            if isinstance(inner, torch.Tensor):
                parts += plain_parts(inner)
        return parts
    return [] if tensor.is_meta else [tensor]


class MemoryStats(NamedTuple):
    """Bytes of storages that a rank holds of a model, on any device. The padding of buffers counts.

    `optimizer` is moments, and fp32 copies of weights that are kept in a lower precision. The
    optimizer's step counters (4 bytes a tensor) do not count.
    """

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def from_tensors(
        cls,
        parameters: Iterable[torch.Tensor],
        gradients: Iterable[torch.Tensor],
        optimizer: Iterable[torch.Tensor],
    ) -> MemoryStats:
        """Return the bytes of these tensors. A storage counts once, for the first that has it."""
        seen: set[int] = set()
        moments = [tensor for tensor in optimizer if tensor.ndim]
        return cls(
            _bytes_of_new_storages(parameters, seen),
            _bytes_of_new_storages(gradients, seen),
            _bytes_of_new_storages(moments, seen),
        )

    def __add__(self, other: Any) -> MemoryStats:
        return MemoryStats(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


def _bytes_of_new_storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of the storages that are not among `seen`, and add them there."""
    bytes_ = 0
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                bytes_ += storage.nbytes()
    return bytes_


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples and dictionaries."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
    return found

"""Bytes of the tensors that live on this rank, followed through one step: how many at the peak, and in which phase that was.

    live = LiveBytes() with live:                    # may be entered several times; the first time
    it searches for what lives already
        engine.forward_backward(…)          # its phases, forward and backward, come from autograd
        itself live.phase = "clip";  norm = engine.grad_norm() live.phase = "step";  engine.step(…)
    live.base, live.peak, live.peaks       # bytes; {"forward": bytes, "backward": …, "clip": …,
    "step": …}

A CPU has no allocator that counts. As torch.distributed._tools.mem_tracker does it, storages are
counted (not tensors: views share one), each with a weak reference, whose callback runs when it is
freed. It may be entered beside `telemetry.traffic.CommunicatedBytes`, in either order. A step under
it takes several times as long.

It does not see what a kernel allocates and frees inside of itself, and what compiled code
(torch.compile) keeps for its own backward.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import partial
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


class LiveBytes(TorchDispatchMode):
    """A mode that follows the bytes of all storages on the CPU while it is entered.

    `current`: bytes that live now. `base`: bytes that lived when it was entered first. `peak`: the
    most bytes at once, after any operator. `peaks`: the same of each phase. `phase`: set it to
    `clip` or `step`; None leaves it to autograd (`backward` inside of its engine, recomputation
    included, else `forward`).

    While any dispatch mode is on, autograd adds the gradients of a weight that is used twice in a
    tensor of its own, and otherwise in place. If the peak is at backward's end, a tied embedding
    has one gradient more here than in a run without the mode.
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
        # Bytes of storages that existed before they were seen, and are not in `current` yet.
        self._unknown: dict[int, int] = {}
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
                """Resize a storage and count it: FSDP2 frees gathered weights like this, without the dispatcher."""
                out = resize(storage, size)
                if id(storage) in self._references:
                    self._resized(id(storage), storage.nbytes())
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
        gc.collect()
        for item in gc.get_objects():
            # By its type: some objects answer `isinstance` by running code.
            if issubclass(type(item), torch.Tensor):
                self._follow(item)
                if item.is_leaf and item.grad is not None:
                    self._follow(item.grad)
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
                self._follow(leaf, unknown=True)
        result = func(*args, **(kwargs or {}))
        # Arguments again: some operators give them another size.
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        self._note()
        return result

    def _follow(self, tensor: torch.Tensor, unknown: bool = False) -> None:
        """Count a tensor's storage. `unknown`: a storage that is new here existed before, and was not seen."""
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
                    self._references[key] = weakref.ref(storage, partial(self._freed, key))
                    if unknown:
                        self._unknown[key] = 0
                # An int: torch caches the sizes of fakes across modes, and a compiled function may
                # have made a symbol of one.
                self._resized(key, int(storage.nbytes()))

    def _resized(self, key: int, bytes_: int) -> None:
        """Note the size of a storage."""
        if key in self._unknown:
            self._unknown[key] = bytes_
        else:
            self.current += bytes_ - self._sizes.get(key, 0)
            self._sizes[key] = bytes_

    def _freed(self, key: int, _: Any) -> None:
        """Forget a storage that was freed."""
        del self._references[key]
        if self._unknown.pop(key, None) is None:
            self.current -= self._sizes.pop(key)

    def _settle(self) -> None:
        """Count the storages that Python could not find, and that were seen when they were used.

        Storages that still exist, such as DDP's buckets, existed all the time. Freed ones belonged
        to a kernel, such as gloo's buffers.
        """
        more = sum(self._unknown.values())
        self._sizes |= self._unknown
        self._unknown.clear()
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


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with storages of their own that a tensor consists of: of a DTensor, what this rank holds."""
    # First, and nothing is called on it that would go through its mode, which takes long.
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
    """Bytes that a rank holds of a model, on any device.

    Storages count, and so does the padding of a buffer. `optimizer`: moments, and fp32 copies of
    weights that are kept in a lower precision. An optimizer's counts of steps (4 bytes a tensor)
    are left out.
    """

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(
        cls,
        parameters: Iterable[torch.Tensor],
        gradients: Iterable[torch.Tensor],
        optimizer: Iterable[torch.Tensor],
    ) -> MemoryStats:
        """Return the bytes of these tensors. Each storage counts once, under the first name that it has."""
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

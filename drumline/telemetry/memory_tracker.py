"""Bytes of the tensors that live on this rank, followed through one step: how many at the peak, and in which phase that was.

    live = LiveBytes()
    with live:                    # may be entered several times; the first time it looks around for what lives already
        engine.forward_backward(…)          # its phases, forward and backward, come from autograd itself
        live.phase = "clip";  norm = engine.grad_norm()
        live.phase = "step";  engine.step(…)
    live.base, live.peak, live.peaks       # bytes; {"forward": bytes, "backward": …, "clip": …, "step": …}

A CPU has no allocator that counts. As torch.distributed._tools.mem_tracker does it, storages are counted (not tensors: views share one),
each with a weak reference, whose callback runs when it is freed. It may be entered beside `telemetry.traffic.CommunicatedBytes`, in either
order. A step under it takes several times as long.

Not seen: what a kernel takes and gives back inside of itself; what compiled code (torch.compile) keeps for its own backward.
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
    """While it is entered, follows the bytes of all storages on the CPU.

    `current`: bytes that live now. `base`: those that lived when it was entered first. `peak`: the most there have been at once, after
    any operator; `peaks`: the same of each phase. `phase`: set it to `clip` or `step`; None leaves it to autograd
    (`backward` inside of its engine, recomputation included, else `forward`).

    While any dispatch mode is on, autograd adds the gradients of a weight that is used twice in a tensor of its own, and otherwise in
    place: where backward's end is the peak, a tied embedding is seen with one gradient more than a run without the mode has.
    """

    def __init__(self, fake: bool = False) -> None:
        """`fake`: count FakeTensors alone; otherwise real ones alone."""
        super().__init__()
        self.fake = fake
        self.phase: Phase | None = None
        self.base = self.current = self.peak = 0
        self.peaks: dict[Phase, int] = {}
        self._sizes: dict[int, int] = {}  # by the address of the storage's object, while that lives
        self._unknown: dict[int, int] = {}  # of these, not in `current` yet
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._depth = 0
        self._looked = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        if not self._looked:
            self._looked = True
            gc.collect()
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.Tensor):
                    self._follow(thing)
                    if thing.is_leaf and thing.grad is not None:
                        self._follow(thing.grad)
            self.base = self.peak = self.current
        if self._depth == 0:
            self._resize = resize = torch.UntypedStorage.resize_

            def resize_(storage: torch.UntypedStorage, size: int) -> Any:
                """Past the dispatcher: FSDP2 frees what it has gathered by making it empty."""
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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as the local operators that it is made of
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf, unknown=True)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(
            (result, args)
        ):  # arguments again: some operators give them another size
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        self._note()
        return result

    def _follow(self, tensor: torch.Tensor, unknown: bool = False) -> None:
        """Count a tensor's storage. `unknown`: one that is new here existed before, and was not seen."""
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
                # An int: torch remembers what fakes gave, across modes, also where a compiled function has made a symbol of the size.
                self._resized(key, int(storage.nbytes()))

    def _resized(self, key: int, bytes_: int) -> None:
        if key in self._unknown:
            self._unknown[key] = bytes_
        else:
            self.current += bytes_ - self._sizes.get(key, 0)
            self._sizes[key] = bytes_

    def _freed(self, key: int, _: Any) -> None:
        del self._references[key]
        if self._unknown.pop(key, None) is None:
            self.current -= self._sizes.pop(key)

    def _settle(self) -> None:
        """Count the storages that Python could not find and that were seen when they were used: those that still exist, as DDP's buckets
        do, existed all the time; those that are freed belonged to a kernel, as gloo's buffers do."""
        more = sum(self._unknown.values())
        self._sizes |= self._unknown
        self._unknown.clear()
        self.base, self.current, self.peak = self.base + more, self.current + more, self.peak + more
        self.peaks = {phase: peak + more for phase, peak in self.peaks.items()}

    def _note(self) -> None:
        phase: Phase = self.phase or ("backward" if current_graph_task_id() != -1 else "forward")
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.current)
        self.peak = max(self.peak, self.current)


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages of their own that a tensor is made of: of a DTensor, what this rank holds."""
    if isinstance(
        tensor, FakeTensor
    ):  # first, and nothing is called on it that would go through its mode: that takes long
        return [tensor]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = cast(Any, tensor).__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # a mesh may be among them
        return [
            part
            for thing in inner
            if isinstance(thing, torch.Tensor)
            for part in plain_parts(thing)
        ]
    return [] if tensor.is_meta else [tensor]


class MemoryStats(NamedTuple):
    """Bytes that a rank holds of a model, wherever they lie: storages, so what a buffer is padded with counts. `optimizer`: moments, and
    fp32 copies of weights that are kept in a lower precision. An optimizer's counts of steps (4 bytes a tensor) are left out."""

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
        """Each storage counts once, under the first name that it has."""
        seen: set[int] = set()

        def new(tensors: Iterable[torch.Tensor]) -> int:
            bytes_ = 0
            for storage in (
                part.untyped_storage() for tensor in tensors for part in plain_parts(tensor)
            ):
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    bytes_ += storage.nbytes()
            return bytes_

        return cls(
            new(parameters), new(gradients), new(tensor for tensor in optimizer if tensor.ndim)
        )

    def __add__(self, other: Any) -> MemoryStats:
        return MemoryStats(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def tensors_in(*things: Any) -> list[torch.Tensor]:
    """All tensors in nested lists (and what is derived from them) and dicts."""
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, dict | list | tuple):
            found += tensors_in(*(thing.values() if isinstance(thing, dict) else thing))
    return found

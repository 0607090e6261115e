"""Activation offload: what blocks keep for backward is moved to host memory, and fetched again.

This is `memory.activation_offload`. At most two blocks have their activations on the device at
once. In forward these are the block that computes, and the one before it, whose copies are on their
way to the host. In backward these are the block that computes, and the one that is fetched ahead.
The last two blocks keep their activations on the device.

torch's saved-tensor hooks say what a block keeps (with full checkpointing, its input). A storage is
moved once, however many views of it are kept. On a GPU, copies go to pinned memory on a stream of
their own; on a CPU the same code runs without streams.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.models.blocks import blocks
from drumline.vendor.torch import FakeTensor, tree_leaves

# The fewest bytes of a storage that is moved.
LEAST_MOVED = 2**14
# The classes of tensors that have exactly one storage. Other subclasses may have several, or none.
SINGLE_STORAGE = (Tensor, nn.Parameter, FakeTensor)


class ActivationOffload:
    """Offloads the activations of all blocks of a model, whose forwards are replaced in place.

    `moved_bytes`: bytes that were copied to the host so far. `device_bytes`: bytes of such storages
    that are on the device now. `most_device_bytes`: the most that were there at once.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.moved_bytes = 0
        self.device_bytes = 0
        self.most_device_bytes = 0
        # Runs whose tensors are still on the device, oldest first.
        self.runs_on_device: list[_Run] = []
        found = blocks(model)
        # The blocks from this one on keep their activations on the device.
        self.first_kept = len(found) - 2
        for index, block in enumerate(found):
            name = "forward"
            if getattr(block, "gradient_checkpointing", False):
                # The input of a checkpointed block is saved outside of its forward, by this function.
                name = "_gradient_checkpointing_func"
            setattr(block, name, partial(self.run, index, block, getattr(block, name)))

    def run(self, index: int, block: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward `inner` of block `index`, and return its result."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        run_before = self._run_of(index - 1)
        # Only the block before may still have its activations on the device.
        while self.runs_on_device and (index == 0 or self.runs_on_device[0].index < index - 1):
            self.runs_on_device.pop(0).release_device_copies()
        if index >= self.first_kept:
            out = inner(*args, **kwargs)
        else:
            run = _Run(self, index, _storages_that_stay(block, args, kwargs))
            with torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
                out = inner(*args, **kwargs)
            run.record_last_copy()
            self.runs_on_device.append(run)
        hidden = _first_requiring_grad(out)
        if run_before is not None and hidden is not None:
            _fetch_at_backward(hidden, run_before)
        return out

    def _run_of(self, index: int) -> _Run | None:
        """Return the oldest run of a block whose tensors are still on the device."""
        for run in self.runs_on_device:
            if run.index == index:
                return run
        return None

    def count_device_bytes(self, bytes_: int) -> None:
        """Add to the bytes on the device; negative if some are released."""
        self.device_bytes += bytes_
        self.most_device_bytes = max(self.most_device_bytes, self.device_bytes)

    def copy_stream_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context on the copy stream, which first waits for the work given to the device."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


def _storages_that_stay(block: nn.Module, args: Any, kwargs: Any) -> set[int]:
    """Return the storages that are not moved: those of a block's weights, and of shared inputs.

    All blocks share the masks and positions: all tensors among the inputs but the first one, the
    hidden states.
    """
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    storages: set[int] = set()
    for tensor in (*block.parameters(), *inputs[1:]):
        if type(tensor) in SINGLE_STORAGE:
            storages.add(tensor.untyped_storage()._cdata)
    return storages


def _first_requiring_grad(out: Any) -> Tensor | None:
    """Return the first tensor of a block's result that has a gradient: the hidden states."""
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf
    return None


def _fetch_at_backward(hidden: Tensor, run_before: _Run) -> None:
    """Fetch what the block before needs when the backward of `hidden` begins."""
    fetch = run_before.fetch

    def on_gradient(_: Tensor) -> None:
        fetch()

    hidden.register_hook(on_gradient)


class _MovedStorage:
    """A storage that is moved, as tensors of uint8.

    `device_copy`: its bytes on the device; None while only the host has them. `host_copy`: its
    bytes in host memory; None for FakeTensors, which the planner traces with. `uses`: saved tensors
    in it that a graph still has.
    """

    def __init__(self, device_copy: Tensor) -> None:
        self.device_copy: Tensor | None = device_copy
        self.device = device_copy.device
        self.bytes_ = device_copy.numel()
        self.host_copy: Tensor | None = None
        self.uses = 0


class _Saved:
    """What a graph has in the place of a saved tensor.

    It is deleted when no backward needs the tensor any more, however often it was read.
    """

    def __init__(self, run: _Run, key: tuple[int, int], tensor: Tensor) -> None:
        self.run = run
        self.key = key
        self.dtype = tensor.dtype
        self.view = tensor.size(), tensor.stride(), tensor.storage_offset()
        run.moved[key].uses += 1

    def __del__(self) -> None:
        self.run.release_use(self.key)


class _Run:
    """One forward of a block, up to the end of its backward."""

    def __init__(self, owner: ActivationOffload, index: int, stays: set[int]) -> None:
        """`stays`: storages that are not moved."""
        self.owner = owner
        self.index = index
        self.stays = stays
        # By the storage's address and the tensor's version.
        self.moved: dict[tuple[int, int], _MovedStorage] = {}
        # Recorded after the last copy of this run, to the host or back.
        self.event: Any = None

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """Return what the graph keeps of a tensor that it saves: the tensor, or what stands for it.

        Several saved tensors that are views of one storage move it once.
        """
        if not self._is_movable(tensor):
            return tensor
        # The version, because an in-place operation puts other values into the same storage.
        key = tensor.untyped_storage()._cdata, tensor._version
        if key not in self.moved:
            self._move(key, tensor)
        return _Saved(self, key, tensor)

    def _is_movable(self, tensor: Tensor) -> bool:
        """Return whether the storage of a saved tensor is to be moved."""
        if type(tensor) not in SINGLE_STORAGE:
            return False
        storage = tensor.untyped_storage()
        bytes_ = storage.nbytes()
        if bytes_ < LEAST_MOVED or bytes_ % tensor.element_size():
            return False
        return storage._cdata not in self.stays and not _is_cast_weight(tensor)

    def _move(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Begin to copy the storage of a tensor to the host."""
        size = tensor.untyped_storage().nbytes()
        entries = size // tensor.element_size()
        bytes_N = tensor.as_strided((entries,), (1,), 0).view(torch.uint8)
        moved = _MovedStorage(bytes_N)
        self.moved[key] = moved
        self.owner.count_device_bytes(size)
        self.owner.moved_bytes += size
        if not isinstance(tensor, FakeTensor):
            is_pinned = self.owner.stream is not None
            moved.host_copy = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
            with self.owner.copy_stream_context():
                moved.host_copy.copy_(bytes_N, non_blocking=True)

    def record_last_copy(self) -> None:
        """Record that all copies of this run have been started."""
        self.event = None
        if self.owner.stream:
            self.event = self.owner.stream.record_event()

    def release_device_copies(self) -> None:
        """Release the device's copies, as soon as the host has them."""
        self.wait_for_copies()
        for moved in list(self.moved.values()):
            self._release_device_copy(moved)

    def release_use(self, key: tuple[int, int]) -> None:
        """Count that a saved tensor is gone, and release its storage with the last one.

        Another storage may come to lie at the same address, under the same key, afterwards.
        """
        moved = self.moved[key]
        moved.uses -= 1
        if moved.uses == 0:
            del self.moved[key]
            if moved.device_copy is not None:
                self.wait_for_copies()
            self._release_device_copy(moved)

    def _release_device_copy(self, moved: _MovedStorage) -> None:
        """Drop the device's copy of a storage, if there is one."""
        if moved.device_copy is not None:
            self.owner.count_device_bytes(-moved.bytes_)
            moved.device_copy = None

    def wait_for_copies(self) -> None:
        """Let the device's current stream wait for the copies; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring back what the backward of this run needs."""
        absent = [moved for moved in list(self.moved.values()) if moved.device_copy is None]
        for moved in absent:
            moved.device_copy = torch.empty(moved.bytes_, dtype=torch.uint8, device=moved.device)
            self.owner.count_device_bytes(moved.bytes_)
        with self.owner.copy_stream_context():
            for moved in absent:
                if moved.host_copy is not None and moved.device_copy is not None:
                    moved.device_copy.copy_(moved.host_copy, non_blocking=True)
        if absent:
            self.record_last_copy()

    @torch.no_grad()
    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that backward asks for. `packed`: what `pack` returned.

        Usually the storage is there already, or on its way; otherwise it is fetched now.
        """
        if isinstance(packed, Tensor):
            return packed
        moved = self.moved[packed.key]
        if moved.device_copy is None:
            self.fetch()
        self.wait_for_copies()
        assert moved.device_copy is not None
        storage = moved.device_copy.view(packed.dtype)
        return storage.as_strided(*packed.view)


def _is_cast_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is the low copy of a weight that autocast keeps until backward.

    All uses of the weight share it.
    """
    base = tensor._base if tensor._is_view() else tensor
    if base is None or base.grad_fn is None:
        return False
    cast: Any = base.grad_fn
    if cast.name() != "ToCopyBackward0":
        return False
    source = cast.next_functions[0][0]
    return bool(source.name() == "torch::autograd::AccumulateGrad")

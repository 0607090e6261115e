"""What blocks keep for their backward, moved to host memory and back beside computing (`memory.activation_offload`).

Of two blocks it is on the device at once. In forward these are the block that computes and the one before, whose copies are on their
way; in backward the block that computes and the one that is fetched ahead. The last two blocks keep theirs where it is. torch's
saved-tensor hooks say what a block keeps: with full checkpointing its input. A storage is moved once, however many views of it are
kept. On a GPU copies go to pinned memory on a stream of their own; on a CPU the same code runs without streams.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.models.blocks import blocks
from drumline.vendor.torch import FakeTensor, tree_leaves

LEAST_MOVED = 2**14  # bytes of a storage; smaller ones stay on the device
PLAIN = (Tensor, nn.Parameter, FakeTensor)


class ActivationOffload:
    """Of all blocks of a model, changed in place. `moved`: bytes that went to the host, in all; `here`, `most`: bytes of what is moved that
    are on the device, now and at most."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.moved = self.here = self.most = 0
        self.under_way: list[_Run] = []  # runs whose tensors are still on the device
        found = blocks(model)
        self.stay = len(found) - 2  # from this block on
        for index, block in enumerate(found):
            # What is checkpointed keeps its input outside of the checkpoint.
            name = (
                "_gradient_checkpointing_func"
                if getattr(block, "gradient_checkpointing", False)
                else "forward"
            )
            setattr(block, name, partial(self.run, index, block, getattr(block, name)))

    def run(self, index: int, block: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The block's forward `inner`."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        before = next((run for run in self.under_way if run.index == index - 1), None)
        while self.under_way and (index == 0 or self.under_way[0].index < index - 1):
            self.under_way.pop(0).leave()
        if index >= self.stay:
            out = inner(*args, **kwargs)
        else:
            # Weights, and what all blocks share: masks, positions. The first tensor is what the block works on.
            shared = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)][1:]
            stays = [*block.parameters(), *shared]
            run = _Run(
                self,
                index,
                {tensor.untyped_storage()._cdata for tensor in stays if type(tensor) in PLAIN},
            )
            with torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
                out = inner(*args, **kwargs)
            run.end()
            self.under_way.append(run)
        hidden = next(
            (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad),
            None,
        )
        if before is not None and hidden is not None:
            fetch = before.fetch
            hidden.register_hook(lambda _: fetch())  # its backward begins
        return out

    def count(self, bytes_: int) -> None:
        self.here += bytes_
        self.most = max(self.most, self.here)

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """On the stream of copies, behind all that is under way."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


class _Moved:
    """A storage as uint8. `device`: None while only the host has it; `host`: None of FakeTensors, which the planner traces with; `uses`:
    saved tensors in it that a graph still has."""

    def __init__(self, device: Tensor) -> None:
        self.device: Tensor | None = device
        self.place, self.bytes_ = device.device, device.numel()
        self.host: Tensor | None = None
        self.uses = 0


class _Saved:
    """What a graph has in the place of a tensor: it goes when no backward wants it any more, however often it was read."""

    def __init__(self, run: _Run, key: tuple[int, int], tensor: Tensor) -> None:
        self.run, self.key, self.dtype = run, key, tensor.dtype
        self.view = tensor.size(), tensor.stride(), tensor.storage_offset()
        run.moved[key].uses += 1

    def __del__(self) -> None:
        self.run.let_go(self.key)


class _Run:
    """One forward of a block, up to the end of its backward."""

    def __init__(self, owner: ActivationOffload, index: int, stays: set[int]) -> None:
        """`stays`: storages that are not moved."""
        self.owner, self.index, self.stays = owner, index, stays
        self.moved: dict[tuple[int, int], _Moved] = {}
        self.event: Any = None  # of the last copy of it

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage() if type(tensor) in PLAIN else None
        if (
            storage is None
            or storage.nbytes() < LEAST_MOVED
            or storage.nbytes() % tensor.element_size()
        ):
            return tensor
        if storage._cdata in self.stays or _of_weight(tensor):
            return tensor
        key = storage._cdata, tensor._version  # an operator in place makes another one of it
        if key not in self.moved:
            bytes_N = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(
                torch.uint8
            )
            moved = self.moved[key] = _Moved(bytes_N)
            self.owner.count(storage.nbytes())
            self.owner.moved += storage.nbytes()
            if not isinstance(tensor, FakeTensor):
                moved.host = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=self.owner.stream is not None
                )
                with self.owner.beside():
                    moved.host.copy_(bytes_N, non_blocking=True)
        return _Saved(self, key, tensor)

    def end(self) -> None:
        """All of it is on its way."""
        self.event = self.owner.stream.record_event() if self.owner.stream else None

    def leave(self) -> None:
        """The device's copy goes, once the host has it."""
        self.wait()
        for moved in [*self.moved.values()]:
            self.drop(moved)

    def let_go(self, key: tuple[int, int]) -> None:
        """A saved tensor is gone. After the last one of a storage another may come to lie where it was, under the same key."""
        moved = self.moved[key]
        moved.uses -= 1
        if not moved.uses:
            del self.moved[key]
            if moved.device is not None:
                self.wait()
            self.drop(moved)

    def drop(self, moved: _Moved) -> None:
        if moved.device is not None:
            self.owner.count(-moved.bytes_)
            moved.device = None

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring back what its backward wants."""
        absent = [moved for moved in [*self.moved.values()] if moved.device is None]
        for moved in absent:
            moved.device = torch.empty(moved.bytes_, dtype=torch.uint8, device=moved.place)
            self.owner.count(moved.bytes_)
        with self.owner.beside():
            for moved in absent:
                if moved.host is not None and moved.device is not None:
                    moved.device.copy_(moved.host, non_blocking=True)
        if absent:
            self.end()

    @torch.no_grad()
    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved = self.moved[packed.key]
        if moved.device is None:
            self.fetch()
        self.wait()
        assert moved.device is not None
        return moved.device.view(packed.dtype).as_strided(*packed.view)


def _of_weight(tensor: Tensor) -> bool:
    """Whether it is the low copy of a weight that autocast keeps until backward, for all who use it."""
    base = tensor._base if tensor._is_view() else tensor
    made: Any = None if base is None else base.grad_fn
    return (
        made is not None
        and made.name() == "ToCopyBackward0"
        and made.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    )

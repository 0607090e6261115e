"""What lives while a model runs forward and backward, by where it is: in which block, ahead of them, in the loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.telemetry.memory_tracker import LiveBytes, plain_parts
from drumline.vendor.torch import current_graph_task_id, to_copy

Tags = dict[int, weakref.ref[torch.UntypedStorage]]
_COPIES = {to_copy.default, torch.ops.aten.to.dtype}


class Watch(LiveBytes):
    """Follows one micro-batch of a model on FakeTensors.

    A place is `ahead` (of the blocks), a block's number, `behind` them, or `loss`; in backward the same with a minus (`-0`, `-loss`).
    `peaks_at`: bytes at the peak in each place; `saved_at`: bytes where each place of forward begins. Both are of activations: what
    lived before, gradients of weights (`gradients`), and copies of weights in a lower precision (`copies`) are counted apart.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__(fake=True)
        self.blocks = blocks
        self.place = "ahead"
        self.copies_at_loss = 0
        self.saved_at: dict[str, int] = {}
        self.peaks_at: dict[str, int] = {}
        self._gradients: Tags = {}
        self._copies: Tags = {}
        self._weights: set[int] = set()
        for parameter in model.parameters():
            self._weights |= self._keys(parameter.data)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self._tag(p.grad, self._gradients))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._begins(index), with_kwargs=True)
        blocks[-1].register_forward_hook(self._ends)

    def objective(self, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def watched(outputs: Any, batch: Any) -> Any:
            self.at("loss")
            self.copies_at_loss = self.copies
            return inner(outputs, batch)

        return watched

    def at(self, place: str) -> None:
        self.place = place
        if not place.startswith("-"):
            self.saved_at[place] = self.activations

    @property
    def gradients(self) -> int:
        return self._bytes(self._gradients)

    @property
    def copies(self) -> int:
        return self._bytes(self._copies)

    @property
    def activations(self) -> int:
        return self.current - self.base - self.gradients - self.copies

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _COPIES and isinstance(result, torch.Tensor) and self._keys(args[0]) & self._weights:
            self._tag(result, self._copies)
        return result

    def _tag(self, tensor: torch.Tensor, table: Tags) -> None:
        for key in self._keys(tensor) - self._weights:
            if key in self._references:
                table[key] = self._references[key]

    def _keys(self, tensor: torch.Tensor) -> set[int]:
        return {id(part.untyped_storage()) for part in plain_parts(tensor)}

    def _bytes(self, table: Tags) -> int:
        """Of those storages that still live (another may have come to the same address)."""
        return sum(self._sizes.get(key, 0) for key, reference in table.items() if self._references.get(key) is reference)

    def _note(self) -> None:
        super()._note()
        self.peaks_at[self.place] = max(self.peaks_at.get(self.place, 0), self.activations)

    def _begins(self, index: int) -> Callable[..., None]:
        def begins(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if current_graph_task_id() != -1:
                return  # computed again
            self.at(str(index))
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self.at("-ahead" if index == 0 else f"-{index - 1}"))

        return begins

    def _ends(self, _module: Any, _args: Any, output: Any) -> None:
        if current_graph_task_id() != -1:
            return
        self.at("behind")
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self.at(f"-{len(self.blocks) - 1}"))

"""Random weights, drawn piece by piece by the model's own initialisation: the same however the model is sharded, and never all at once.

A piece is a block (a member of a list of modules), or a module outside of them with its own weights. Its random numbers depend only on the
seed and its name: a rank with some pieces, or parts of them, draws the same as a rank with the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from drumline.dist.seeds import derive, drawing
from drumline.models.shards import Whole, aliases, copy_part

Init = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Piece:
    """A module that is drawn at once, for a block with all its children. `init`: the initialisation of the model that it belongs to."""

    name: str
    module: nn.Module
    block: bool
    init: Init

    def draw(self) -> None:
        if self.block:
            _depth_first(self.module, self.init)
        else:
            self.init(self.module)

    def places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """(full name, the dictionary of its module that holds it, its key there) of each parameter and buffer."""
        for prefix, module in self.module.named_modules() if self.block else [("", self.module)]:
            path = ".".join(part for part in (self.name, prefix) if part)
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        yield f"{path}.{key}" if path else key, tensors, key


class Drawn:
    """Weights drawn from `seed`; a `shards.Source`. Raises Whole for a model whose initialisation does not work piece by piece."""

    def __init__(self, model: Any, seed: int) -> None:
        """`model`: laid out on the meta device, before any transform."""
        # A copy: transforms put other modules into the model, and stages of a pipeline lose some.
        self.model, self.seed = copy.deepcopy(model), seed
        self.first = {name: names[0] for names in aliases(self.model) for name in names}
        self._require_pieces()

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        # A rank that trains on a GPU draws there, also weights that it then keeps on the host: strategies draw alike, and a host takes
        # minutes where a GPU takes seconds. The numbers of a GPU are not those of a CPU.
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        wanted: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            wanted.setdefault(self.first[name], []).append(tensor)
        for piece in _pieces(self.model):
            places = [(name, tensors, key) for name, tensors, key in piece.places() if self.first.get(name) == name]
            if not any(name in wanted for name, _, _ in places):
                continue
            empty = [(tensors, key, tensors[key]) for _, tensors, key in places]
            for _, tensors, key in places:
                full = torch.empty_like(tensors[key], device=device)
                tensors[key] = nn.Parameter(full, requires_grad=False) if isinstance(tensors[key], nn.Parameter) else full
            with torch.no_grad(), drawing(derive(self.seed, piece.name), device):
                piece.draw()
            for name, tensors, key in places:
                for tensor in wanted.get(name, ()):
                    copy_part(tensor, tensors[key].detach())
            for tensors, key, tensor in empty:
                tensors[key] = tensor

    def _require_pieces(self) -> None:
        """Run the initialisation on the meta device, where nothing is drawn, and check which tensors it writes to. Raises Whole."""
        from drumline.vendor.transformers import initialization

        drawn: set[int] = set()

        def note(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            drawn.add(id(tensor))
            return tensor

        weights = {id(tensors[key]): name for piece in _pieces(self.model) for name, tensors, key in piece.places() if name in self.first}
        functions = initialization.TORCH_INIT_FUNCTIONS
        noted = mock.patch.dict(functions, dict.fromkeys(functions, note)), mock.patch.object(initialization, "copy_", note)
        with noted[0], noted[1], torch.no_grad():
            for piece in _pieces(self.model, empty=True):
                drawn.clear()
                piece.draw()
                own = {id(tensors[key]) for _, tensors, key in piece.places()}
                if (drawn & weights.keys()) - own:
                    raise Whole(f"{type(piece.module).__name__} initialises weights of other modules")
                if missed := (weights.keys() & own) - drawn:
                    raise Whole(f"{weights[missed.pop()]} is initialised by its constructor")


def _pieces(model: Any, empty: bool = False) -> Iterator[Piece]:
    """The pieces in the model's order. `empty`: also those without a tensor."""

    def walk(name: str, module: nn.Module, init: Init) -> Iterator[Piece]:
        init = getattr(module, "_init_weights", init)
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if isinstance(module, nn.ModuleList):
                yield Piece(path, child, True, init)
            else:
                yield from walk(path, child, init)
        if empty or any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
            yield Piece(name, module, False, init)

    yield from walk("", model, model._init_weights)


def _depth_first(module: nn.Module, init: Init) -> None:
    init = getattr(module, "_init_weights", init)
    for child in module.children():
        _depth_first(child, init)
    init(module)

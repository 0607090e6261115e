"""Weights for models without memory, part by part: a rank reads from the files only its own part.

A model is built on the meta device, the transforms shard it, and then `Values.fill` gives each parameter memory and values. So a rank
never has more than its own part in memory, and one slice of one tensor while it reads.

Random weights are drawn piece by piece by the model's own initialisation: the same however the model is sharded. A piece is a block (a
member of a list of modules), or a module outside of them with its own weights. Its random numbers depend only on the seed and its name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.core.model import ModelConfig
from drumline.dist.seeds import derive, drawing
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.models.blocks import whole_layer
from drumline.models.files import find_file
from drumline.models.vocabulary import GrownRows, Growth, vocabulary_parameter_ids
from drumline.vendor.torch import compute_local_shape_and_global_offset

Init = Callable[[nn.Module], None]
NUMBERED = re.compile(r".*?\.\d+\.")  # up to the number of a block
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Whole(Exception):
    """The reason why a model's weights cannot be read part by part: each rank must build the whole model."""


class Source(Protocol):
    """A source of the weights of a model."""

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Fill `tensors`, parameters and buffers of `model` or of a part of it, by their names in files; of DTensors the local part."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]


class Loaded:
    """No source: the model was built whole, or a checkpoint fills it."""

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        assert not tensors, f"nothing to fill {next(iter(tensors))} with"


@dataclass(frozen=True)
class Values:
    """The values for a model on the meta device, after the transforms have sharded it. `device`: cpu or cuda:N. `seed`: of fresh adapters.
    `checkpoint_keys`: names to leave empty, since a checkpoint fills them."""

    source: Source
    device: str
    seed: int
    checkpoint_keys: frozenset[str] = frozenset()

    def fill(
        self, model: nn.Module, offloaded: bool = False, owners: Collection[nn.Module] | None = None
    ) -> None:
        """Give all tensors of `model` on the meta device memory and values. It may be a part of the model (a stage of a pipeline), under
        the same names. `offloaded`: parameters are in host memory, buffers on the device. `owners`: only the tensors of these modules,
        without their children's. Each tensor object stays and only its content is swapped: tied weights stay tied, and FSDP2 keeps its
        references."""
        chosen = [*(model.modules() if owners is None else owners)]
        owned = {
            id(tensor)
            for owner in chosen
            for tensor in (*owner._parameters.values(), *owner._buffers.values())
        }
        for owner in chosen:
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    owner._buffers[name] = buffer.to(self.device)
        tensors = chain(model.named_parameters(), model.named_buffers())  # tied ones once
        empty = [name for name, tensor in tensors if tensor.is_meta and id(tensor) in owned]

        def real(tensor: torch.Tensor) -> torch.Tensor:
            on_host = offloaded and isinstance(tensor, nn.Parameter)
            return (
                torch.empty_like(tensor, device="cpu" if on_host else self.device)
                if tensor.is_meta
                else tensor
            )

        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            if owners is None and empty:
                # FSDP2 checks a module's parameters after those of all its children.
                model._apply(real)
            for owner in (owners or ()) if empty else ():
                owner._apply(real, recurse=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        filled: dict[str, torch.Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
        }
        wanted = {name: filled[name] for name in empty if name not in self.checkpoint_keys}
        if getattr(self.source, "by_name", False):
            return self.source.put(wanted, model)
        self._begin(model, wanted)
        for name in filter(adapters.is_adapter, list(wanted)):
            tensor = wanted.pop(name)
            copy_part(tensor, adapters.first_values(name, tensor.shape, self.seed))
        self.source.put({file_name(name): tensor for name, tensor in wanted.items()}, model)

    def _begin(self, model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
        """Fill, and take out of `wanted`, what begins as a function of a whole weight: those are read a block at a time."""
        layers = [
            (path, layer)
            for path, layer in adapters.starting(model)
            if any(name.startswith(f"{path}.") for name in wanted)
        ]
        for _, group in groupby(layers, lambda each: (NUMBERED.match(each[0]) or [each[0]])[0]):
            here = [*group]
            bases = {path: whole_layer(layer) for path, layer in here}
            names = {
                path: f"{path}.weight" if bases[path] is layer else f"{path}.base_layer.weight"
                for path, layer in here
            }
            whole = {
                path: torch.empty(getattr(base, "shape", None) or base.weight.shape)
                for path, base in bases.items()
            }
            self.source.put(
                {file_name(names[path]): weight for path, weight in whole.items()}, model
            )
            for path, layer in here:
                for name, value in adapters.begin(layer, whole[path].to(self.device)).items():
                    if (tensor := wanted.pop(f"{path}.{name}", None)) is not None:
                        copy_part(tensor, value)


@dataclass(frozen=True)
class FromFiles:
    """safetensors files. `places`: file and key of each tensor, of tied weights under all names. `rest`: the source of all others.
    `grown`: names of tensors by token, which get the rows of `growth`."""

    places: dict[str, Stored] = field(repr=False)
    rest: Source = field(default_factory=Loaded)
    growth: Growth | None = None
    grown: frozenset[str] = frozenset()

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        by_file: dict[Path, list[str]] = {}
        for name in filter(self.places.__contains__, tensors):
            by_file.setdefault(self.places[name].file, []).append(name)
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as file_tensors:
                for name in names:
                    source = file_tensors.get_slice(self.places[name].key)
                    if self.growth is not None and name in self.grown:
                        source = GrownRows(source, self.growth)
                    copy_part(tensors[name], source)
        self.rest.put(
            {name: tensor for name, tensor in tensors.items() if name not in self.places}, model
        )


def copy_part(tensor: torch.Tensor, source: Any) -> None:
    """Fill a tensor from `source`, an unsharded tensor, slice object of safetensors or `GrownRows`; a DTensor takes its local part. Under
    FSDP2 × TP a part is contiguous too: the rows of one tensor-parallel rank, cut again."""
    local, offset = tensor, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.to_local()
        assert local.shape == torch.Size(shape), (local.shape, shape)
    if local.numel():
        place = tuple(
            slice(start, start + length) for start, length in zip(offset, local.shape, strict=True)
        )
        with torch.no_grad():
            if isinstance(source, GrownRows):
                source.copy_to(local, place)
            else:
                local.copy_(source[place])


def from_files(
    path: str,
    source: ModelConfig,
    model: Any,
    fresh: frozenset[str] = frozenset(),
    growth: Growth | None = None,
) -> FromFiles:
    """The source of `model` (whole, on the meta device) in the safetensors files of a folder or hub id, with the options of `source`.
    Raises Whole if the files' names and shapes do not match those of the model one to one; it leaves tensors of `fresh` out if they are
    missing or have another shape. With `growth` embedding and head of the model have its rows, and those of the files fewer.
    Raises ModelError where the files have different values for weights that the config ties."""
    stored = _renamed(model, _stored(path, source))
    places: dict[str, Stored] = {}
    grown = set[str]()
    tensors_by_token = set[int]()
    if growth is not None and growth.changes_rows:
        tensors_by_token = vocabulary_parameter_ids(model)
    for names in aliases(model):
        found = [stored[name] for name in names if name in stored]
        tensor = model.get_parameter_or_buffer(names[0])
        shape = tuple(tensor.shape)
        if growth is not None and id(tensor) in tensors_by_token:
            shape = (growth.stored, *shape[1:])
            grown |= {*names}
        if fresh.issuperset(names) and not any(place.shape == shape for place in found):
            continue
        if not found:
            raise Whole(f"its files have no tensor {names[0]}")
        if any(place.shape != shape for place in found):
            raise Whole(f"{found[0].key} has another shape in its files")
        if any(not _equal(found[0], other) for other in found[1:]):
            raise torn(found[0].key, found[1].key, path)
        places |= dict.fromkeys(names, found[0])
    return FromFiles(places, growth=growth, grown=frozenset(grown))


def torn(one: str, other: str, where: str) -> ModelError:
    """The error for weights that a config ties over files where they differ: nobody but the user knows which of the two models is meant."""
    what = f"its config makes {one} and {other} one weight, and its files hold two that differ"
    return ModelError(
        what,
        where=where,
        fix="set model.config.tie_word_embeddings: false to train both, or mend the files",
    )


def aliases(model: Any) -> list[list[str]]:
    """The names of each tensor to be stored: one, or more for tied weights."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def _renamed(model: Any, stored: list[Stored]) -> dict[str, Stored]:
    """Stored tensors by the model's names; transformers has tables of old names. Raises Whole if transformers would join, cut or transpose
    stored tensors."""
    from drumline.vendor.transformers import WeightRenaming, get_model_conversion_mapping

    changes = get_model_conversion_mapping(model)
    renamed = {}
    for tensor in stored:
        name = tensor.key
        for change in changes:
            if isinstance(change, WeightRenaming):
                name, _ = change.rename_source_key(name)
        if any(
            change.rename_source_key(name)[1]
            for change in changes
            if not isinstance(change, WeightRenaming)
        ):
            raise Whole(f"transformers converts {tensor.key} as it loads it")
        renamed[name] = tensor
    return renamed


def _stored(path: str, source: ModelConfig) -> list[Stored]:
    """The tensors of a model's safetensors files. Raises Whole if there are none, or they cannot be read."""
    stored = []
    try:
        # As transformers reads a folder that was saved to twice.
        index = None if find_file(path, SINGLE, source) else find_file(path, INDEX, source)
        for name in (
            sorted(set(json.loads(index.read_text())["weight_map"].values())) if index else [SINGLE]
        ):
            if (file := find_file(path, name, source)) is None:
                raise Whole("it has no safetensors files")
            with safe_open(file, framework="pt") as file_tensors:
                for key in file_tensors.keys():  # noqa: SIM118 - no dict
                    shape = tuple(file_tensors.get_slice(key).get_shape())
                    stored.append(Stored(file, key, shape))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Whole(f"its safetensors files cannot be read: {error}") from error
    return stored


def _equal(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are equal; read a few rows at a time."""
    with (
        safe_open(one.file, framework="pt") as first,
        safe_open(other.file, framework="pt") as second,
    ):
        left, right = first.get_slice(one.key), second.get_slice(other.key)
        rows = one.shape[0]
        step = max(1, rows // 64)
        return all(
            torch.equal(left[i : i + step], right[i : i + step]) for i in range(0, rows, step)
        )


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

    def __init__(self, model: Any, seed: int, device: str = "cpu") -> None:
        """`model`: laid out on the meta device, before any transform. `device`: whose generator draws.

        The numbers of a GPU's generator are not those of a CPU's, so all strategies of a run draw on
        a GPU that it trains on, even weights that are then kept on the host. Everything else draws on
        the CPU.
        """
        # A copy: transforms put other modules into the model, and stages of a pipeline lose some.
        self.model = copy.deepcopy(model)
        self.seed = seed
        self.device = device if torch.device(device).type == "cuda" else "cpu"
        self.first = {name: names[0] for names in aliases(self.model) for name in names}
        self._require_pieces()

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        wanted: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            wanted.setdefault(self.first[name], []).append(tensor)
        for piece in _pieces(self.model):
            places = [
                (name, tensors, key)
                for name, tensors, key in piece.places()
                if self.first.get(name) == name
            ]
            if not any(name in wanted for name, _, _ in places):
                continue
            empty = [(tensors, key, tensors[key]) for _, tensors, key in places]
            for _, tensors, key in places:
                full = torch.empty_like(tensors[key], device=self.device)
                tensors[key] = (
                    nn.Parameter(full, requires_grad=False)
                    if isinstance(tensors[key], nn.Parameter)
                    else full
                )
            with torch.no_grad(), drawing(derive(self.seed, piece.name), self.device):
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

        weights = {
            id(tensors[key]): name
            for piece in _pieces(self.model)
            for name, tensors, key in piece.places()
            if name in self.first
        }
        functions = initialization.TORCH_INIT_FUNCTIONS
        noted = (
            mock.patch.dict(functions, dict.fromkeys(functions, note)),
            mock.patch.object(initialization, "copy_", note),
        )
        with noted[0], noted[1], torch.no_grad():
            for piece in _pieces(self.model, empty=True):
                drawn.clear()
                piece.draw()
                own = {id(tensors[key]) for _, tensors, key in piece.places()}
                if (drawn & weights.keys()) - own:
                    raise Whole(
                        f"{type(piece.module).__name__} initialises weights of other modules"
                    )
                if missed := (weights.keys() & own) - drawn:
                    raise Whole(f"{weights[missed.pop()]} is initialised by its constructor")


def _pieces(
    module: nn.Module, empty: bool = False, name: str = "", init: Any = None
) -> Iterator[Piece]:
    """The pieces in the model's order. `empty`: also those without a tensor."""
    init = getattr(module, "_init_weights", init)
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(module, nn.ModuleList):
            yield Piece(path, child, True, init)
        else:
            yield from _pieces(child, empty, path, init)
    if empty or any(
        tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())
    ):
        yield Piece(name, module, False, init)


def _depth_first(module: nn.Module, init: Init) -> None:
    init = getattr(module, "_init_weights", init)
    for child in module.children():
        _depth_first(child, init)
    init(module)


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.<fqn>` → the model's tensor, for each trainable parameter (tied ones once, under the first name) and persistent buffer. Frozen
    parameters are left out: building the model again gives them."""
    tensors = {
        f"model.{name}": parameter.data
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return tensors | {f"model.{name}": buffer for name, buffer in _persistent(model)}


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`<fqn>` → the model's tensor, for each parameter, frozen or not (tied ones once, under the first name), and persistent buffer."""
    return dict(model.named_parameters()) | dict(_persistent(model))


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each tied parameter, by its first name, under which `all_tensors` has it."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    return {names[0]: names[1:] for names in by_parameter.values() if len(names) > 1}


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Path of a module → what its own `get_extra_state` gives, where JSON has it."""
    own = {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if has_extra_state(module)
    }
    return {path: state for path, state in own.items() if in_json(state)}


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    for path, module in model.named_modules():
        if path in states:
            module.set_extra_state(states[path])


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def in_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def file_name(name: str) -> str:
    """The name of a tensor in the model's files: without the parts for what PEFT lays over its layer."""
    return name.replace(".token_adapter.", ".").replace(".base_layer.", ".")

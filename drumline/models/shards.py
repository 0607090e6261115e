"""Fills a sharded model with its weights: each rank reads or draws only its own part.

A model is built on the meta device, the transforms shard it, and then `Values.fill` gives each
parameter memory and values from a `Source`. So a rank has no more in memory than its own part, and
one slice of one tensor while it reads.

Random weights are drawn piece by piece by the model's own initialisation, so they are the same
however the model is sharded. A piece is a block (a member of a list of modules), or a module
outside of the blocks with its own weights. Its random numbers depend only on the seed and its name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from unittest import mock

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.config.model import ModelConfig
from drumline.dist.seeds import derive, use_seed
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.models.blocks import find_base_layer
from drumline.models.files import find_file
from drumline.models.packed import PackedTensor
from drumline.models.text_part import TextNames
from drumline.models.vocabulary import GrownRows, Growth, vocabulary_parameter_ids
from drumline.vendor.torch import compute_local_shape_and_global_offset

Init = Callable[[nn.Module], None]
# The beginning of a module's path, up to the number of its block.
NUMBERED = re.compile(r".*?\.\d+\.")
# What PEFT's layers add to the name of a tensor beneath them.
ADAPTED = re.compile(r"(\.base_layer)+\.")
# The index of a model in several safetensors files, and the file of a model in one.
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class NeedsFullModel(Exception):
    """The weights cannot be read or drawn shard by shard, so each rank builds the full model.

    The message is the reason. `models.build.lay_out` and `models.tape.lay_out_module` catch it and
    log it.
    """


class Source(Protocol):
    """A source of the weights of a model."""

    @property
    def uses_module_names(self) -> bool:
        """Whether `put` takes all tensors by their names in the module.

        Otherwise it takes them by the names in a model's files (`file_name`), and no adapters,
        which `Values` fills itself.
        """

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Fill `tensors`, the parameters and buffers of `model` or of a part of it.

        Of a DTensor its local part is filled.
        """


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]


class NothingToFill:
    """The source of a model that needs no values: it was built whole, or a checkpoint fills it."""

    uses_module_names = False

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Do nothing: there is nothing left to fill."""
        assert not tensors, f"nothing to fill {next(iter(tensors))} with"


@dataclass(frozen=True)
class Values:
    """Gives a sharded model on the meta device memory and values.

    `source`: where the values come from. `device`: cpu or cuda:N. `seed`: of fresh adapters.
    `checkpoint_keys`: names of tensors that get memory but no values, since a checkpoint fills
    them.
    """

    source: Source
    device: str
    seed: int
    checkpoint_keys: frozenset[str] = frozenset()

    def fill(
        self, model: nn.Module, offloaded: bool = False, owners: Collection[nn.Module] | None = None
    ) -> None:
        """Give all tensors of `model` that are on the meta device memory and values.

        `model`: the whole model, or a stage of a pipeline with the same names. `offloaded`:
        parameters get host memory, buffers memory of the device. `owners`: only the tensors of
        these modules are filled, without their children's. Tensor objects stay the same and only
        their content is swapped, so tied weights stay tied, and references of FSDP2 stay valid.
        """
        if owners is None:
            owner_list = list(model.modules())
        else:
            owner_list = list(owners)
        self._move_buffers(owner_list)
        empty = _empty_names(model, owner_list)
        if empty:
            self._allocate(model, offloaded, owners)
        allocated: dict[str, torch.Tensor] = dict(model.named_parameters())
        allocated |= dict(model.named_buffers())
        to_fill = {name: allocated[name] for name in empty if name not in self.checkpoint_keys}
        if self.source.uses_module_names:
            self.source.put(to_fill, model)
            return
        self._fill_derived(model, to_fill)
        from_source = {}
        for name, tensor in to_fill.items():
            if adapters.is_adapter(name):
                copy_part(tensor, adapters.first_values(name, tensor.shape, self.seed))
            else:
                from_source[file_name(name)] = tensor
        self.source.put(from_source, model)

    def _move_buffers(self, owners: list[nn.Module]) -> None:
        """Move the buffers of these modules that have values to the device."""
        for owner in owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    owner._buffers[name] = buffer.to(self.device)

    def _allocate(
        self, model: nn.Module, offloaded: bool, owners: Collection[nn.Module] | None
    ) -> None:
        """Give tensors on the meta device memory: those of `owners`, or all of the model."""

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return tensor
            device = self.device
            if offloaded and isinstance(tensor, nn.Parameter):
                device = "cpu"
            return torch.empty_like(tensor, device=device)

        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            if owners is None:
                # FSDP2 checks a module's parameters after those of all its children.
                model._apply(allocate)
            else:
                for owner in owners:
                    owner._apply(allocate, recurse=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def _fill_derived(self, model: nn.Module, to_fill: dict[str, torch.Tensor]) -> None:
        """Fill the tensors whose values are computed from a whole weight.

        They are removed from `to_fill`. Whole weights are read for one block of the model at a
        time, to limit memory.
        """
        layers = []
        for path, layer in adapters.layers_derived_from_weights(model):
            if any(name.startswith(f"{path}.") for name in to_fill):
                layers.append((path, layer))
        for _, group in groupby(layers, _block_of_path):
            layers_of_block = list(group)
            whole_weights = self._read_whole_weights(layers_of_block, model)
            for (path, layer), read_weight in zip(layers_of_block, whole_weights, strict=True):
                whole_weight = read_weight.to(self.device)
                for name, value in adapters.derive_first_values(layer, whole_weight).items():
                    tensor = to_fill.pop(f"{path}.{name}", None)
                    if tensor is not None:
                        copy_part(tensor, value)

    def _read_whole_weights(
        self, layers: list[tuple[str, Any]], model: nn.Module
    ) -> list[torch.Tensor]:
        """Return the whole weight of each layer's base layer.

        They are read from the source to host memory.
        """
        whole_weights = []
        by_file_name = {}
        for path, layer in layers:
            own_name, shape = _weight_of_layer(layer)
            whole_weight = torch.empty(shape)
            whole_weights.append(whole_weight)
            by_file_name[file_name(f"{path}.{own_name}")] = whole_weight
        self.source.put(by_file_name, model)
        return whole_weights


def _weight_of_layer(layer: Any) -> tuple[str, torch.Size]:
    """Return the name of a weight within its layer, and its shape.

    `layer`: one of `adapters.layers_derived_from_weights`.
    """
    if isinstance(layer, PackedTensor):
        return layer.name, layer.shape
    base = find_base_layer(layer)
    name = "base_layer.weight"
    if base is layer:
        name = "weight"
    # A packed layer has the shape of its unpacked weight.
    return name, getattr(base, "shape", None) or base.weight.shape


def _block_of_path(named_layer: tuple[str, Any]) -> str:
    """Return the path of the block that a layer is in; its own path if it is in none."""
    path, _ = named_layer
    block = NUMBERED.match(path)
    if block is None:
        return path
    return block[0]


def _empty_names(model: nn.Module, owners: list[nn.Module]) -> list[str]:
    """Return the names of the tensors on the meta device that some modules own; tied ones once."""
    owned = set()
    for owner in owners:
        for tensor in _own_tensors(owner):
            owned.add(id(tensor))
    named_tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters()]
    named_tensors += model.named_buffers()
    return [name for name, tensor in named_tensors if tensor.is_meta and id(tensor) in owned]


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module without its children's."""
    entries = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in entries if tensor is not None]


@dataclass(frozen=True)
class FromFiles:
    """The source of weights in safetensors files.

    `places`: name of a tensor → its place in a file; tied weights are there under all names.
    `rest`: the source of tensors that are in no file. `grown`: names of the tensors that get the
    rows of `growth`, which have a row for each token.
    """

    uses_module_names: ClassVar[bool] = False
    places: dict[str, Stored] = field(repr=False)
    rest: Source = field(default_factory=NothingToFill)
    growth: Growth | None = None
    grown: frozenset[str] = frozenset()

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Fill tensors from the files, each file opened once; the others from `rest`."""
        names_by_file: dict[Path, list[str]] = {}
        not_in_files = {}
        for name, tensor in tensors.items():
            if name in self.places:
                names_by_file.setdefault(self.places[name].file, []).append(name)
            else:
                not_in_files[name] = tensor
        for file, names in names_by_file.items():
            with safe_open(file, framework="pt") as file_tensors:
                for name in names:
                    stored = file_tensors.get_slice(self.places[name].key)
                    if self.growth is not None and name in self.grown:
                        stored = GrownRows(stored, self.growth)
                    copy_part(tensors[name], stored)
        self.rest.put(not_in_files, model)


def copy_part(tensor: torch.Tensor, source: Any) -> None:
    """Fill a tensor from an unsharded one; a DTensor takes its local part.

    `source`: a tensor, a slice object of safetensors, or `GrownRows`. Under FSDP2 × TP a part is
    contiguous too, since FSDP2 cuts the rows of one tensor-parallel rank.
    """
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.to_local()
        assert local.shape == torch.Size(shape), (local.shape, shape)
    else:
        local = tensor
        offset = (0,) * tensor.ndim
    # A rank may have no rows of a tensor with fewer rows than ranks.
    if local.numel() == 0:
        return
    slices = []
    for start, length in zip(offset, local.shape, strict=True):
        slices.append(slice(start, start + length))
    place = tuple(slices)
    with torch.no_grad():
        if isinstance(source, GrownRows):
            source.copy_to(local, place)
        else:
            local.copy_(source[place])


def find_weights_in_files(
    path: str,
    source: ModelConfig,
    model: Any,
    fresh: frozenset[str] = frozenset(),
    growth: Growth | None = None,
    whole: Any = None,
) -> FromFiles:
    """Return the source of a model's weights in the safetensors files of a folder or hub id.

    `model`: whole, on the meta device. `source`: the options of the model. `fresh`: names of
    tensors that may be missing or have another shape in the files; then they are left out.
    `growth`: how the rows of the model's embedding and head differ from those in the files.
    `whole`: the vision-language model that the files are of, on the meta device, if `model` is the
    language model within it.

    Raises NeedsFullModel if the files' names and shapes do not match those of the model one to one.
    Raises ModelError if the files have different values for weights that the config ties.
    """
    names_of_text = None
    if whole is not None:
        names_of_text = TextNames(whole, model)
    listed = _list_stored_tensors(path, source)
    stored = _rename_tensors(whole or model, listed, names_of_text)
    places: dict[str, Stored] = {}
    grown = set[str]()
    tensors_by_token = set[int]()
    if growth is not None and growth.changes_rows:
        tensors_by_token = vocabulary_parameter_ids(model)
    for names in names_of_tensors(model):
        found = [stored[name] for name in names if name in stored]
        tensor = model.get_parameter_or_buffer(names[0])
        shape = tuple(tensor.shape)
        if growth is not None and id(tensor) in tensors_by_token:
            shape = (growth.stored, *shape[1:])
            grown.update(names)
        shapes = {place.shape for place in found}
        if fresh.issuperset(names) and shape not in shapes:
            continue
        if not found:
            raise NeedsFullModel(f"its files have no tensor {names[0]}")
        if shapes != {shape}:
            raise NeedsFullModel(f"{found[0].key} has another shape in its files")
        _require_equal_values(found, path)
        places |= dict.fromkeys(names, found[0])
    return FromFiles(places, growth=growth, grown=frozenset(grown))


def _require_equal_values(tied: list[Stored], path: str) -> None:
    """Raise ModelError if the stored tensors of one tied weight differ. `path`: the model's."""
    first = tied[0]
    for other in tied[1:]:
        if not _have_equal_values(first, other):
            raise tied_weights_differ(first.key, other.key, path)


def tied_weights_differ(one: str, other: str, where: str) -> ModelError:
    """Return the error for weights that the config ties but that differ in the files.

    Only the user knows whether the config or the files are meant.
    """
    what = f"its config makes {one} and {other} one weight, and its files hold two that differ"
    fix = "set model.config.tie_word_embeddings: false to train both, or fix the files"
    return ModelError(what, where=where, fix=fix)


def names_of_tensors(model: Any) -> list[list[str]]:
    """Return the list of names of each tensor in the state dictionary; tied ones have several."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def _rename_tensors(
    model: Any, stored: list[Stored], names_of_text: TextNames | None
) -> dict[str, Stored]:
    """Return name of a tensor in the model → the stored tensor.

    Files may have old names, which tables of transformers rename. `names_of_text`: only the tensors
    of the language model within `model` are returned, by their names in it. Raises NeedsFullModel if
    transformers would also join, cut or transpose stored tensors.
    """
    from drumline.vendor.transformers import WeightRenaming, get_model_conversion_mapping

    renamings = []
    conversions = []
    for change in get_model_conversion_mapping(model):
        if isinstance(change, WeightRenaming):
            renamings.append(change)
        else:
            conversions.append(change)
    by_name = {}
    for tensor in stored:
        name = tensor.key
        # As in transformers, each renaming is applied to the result of the one before.
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        own_name: str | None = name
        if names_of_text is not None:
            own_name = names_of_text.name_in_text_model(name)
        if own_name is None:
            continue
        for conversion in conversions:
            _, matched = conversion.rename_source_key(name)
            if matched:
                raise NeedsFullModel(f"transformers converts {tensor.key} as it loads it")
        by_name[own_name] = tensor
    return by_name


def _list_stored_tensors(path: str, source: ModelConfig) -> list[Stored]:
    """Return the tensors of a model's safetensors files.

    Raises NeedsFullModel if there are none, or they cannot be read.
    """
    stored = []
    try:
        for name in _file_names(path, source):
            file = find_file(path, name, source)
            if file is None:
                raise NeedsFullModel("it has no safetensors files")
            with safe_open(file, framework="pt") as file_tensors:
                for key in file_tensors.keys():  # noqa: SIM118 - no dict
                    shape = tuple(file_tensors.get_slice(key).get_shape())
                    stored.append(Stored(file, key, shape))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise NeedsFullModel(f"its safetensors files cannot be read: {error}") from error
    return stored


def _file_names(path: str, source: ModelConfig) -> list[str]:
    """Return the names of a model's safetensors files: one, or those of its index.

    Like transformers in a folder that was saved to twice, this takes the single file first.
    """
    if find_file(path, SINGLE, source):
        return [SINGLE]
    index = find_file(path, INDEX, source)
    if not index:
        return [SINGLE]
    file_of_tensor = json.loads(index.read_text())["weight_map"]
    return sorted(set(file_of_tensor.values()))


def _have_equal_values(one: Stored, other: Stored) -> bool:
    """Return whether two stored tensors are equal; they are read a few rows at a time."""
    with (
        safe_open(one.file, framework="pt") as first,
        safe_open(other.file, framework="pt") as second,
    ):
        left = first.get_slice(one.key)
        right = second.get_slice(other.key)
        rows = one.shape[0]
        # A 64th at a time: an embedding may have gigabytes.
        step = max(1, rows // 64)
        for start in range(0, rows, step):
            stop = start + step
            if not torch.equal(left[start:stop], right[start:stop]):
                return False
    return True


class Entry(NamedTuple):
    """A parameter or buffer, and the place at which its module keeps it.

    `name`: in the whole model. `holder`: the module's `_parameters` or `_buffers`. `key`: in the
    holder.
    """

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now; `DrawnWeights` exchanges it for a while."""
        tensor: torch.Tensor = self.holder[self.key]
        return tensor


@dataclass(frozen=True)
class Piece:
    """A module whose random weights are drawn together.

    `block`: whether it is a block of the model, and is drawn with all its children. `init`: the
    initialisation of the model that the module belongs to.
    """

    name: str
    module: nn.Module
    block: bool
    init: Init

    def draw(self) -> None:
        """Draw the module's weights from torch's random numbers, in place."""
        if self.block:
            _depth_first(self.module, self.init)
        else:
            self.init(self.module)

    def entries(self) -> Iterator[Entry]:
        """Yield each parameter and buffer that the piece draws."""
        modules = [("", self.module)]
        if self.block:
            modules = list(self.module.named_modules())
        for prefix, module in modules:
            path = _join(self.name, prefix)
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is not None:
                        yield Entry(_join(path, key), holder, key)


def _join(path: str, name: str) -> str:
    """Return the path of what is called `name` in the module at `path`; each may be empty."""
    return ".".join(part for part in (path, name) if part)


class DrawnWeights:
    """The source of random weights, drawn from `seed`.

    Raises NeedsFullModel for a model whose initialisation does not work piece by piece.
    """

    uses_module_names = False

    def __init__(self, model: Any, seed: int, device: str = "cpu") -> None:
        """Copy the model, and make sure that it can be drawn piece by piece.

        `model`: laid out on the meta device, before any transform. `device`: the device whose
        generator draws. A GPU's generator gives other numbers than a CPU's. So a run on GPUs draws
        on a GPU under every strategy, even weights that are kept on the host, unless the plan
        says otherwise (`draw_device` in plan.plan); all else draws on the CPU.
        """
        # A copy: transforms put other modules into the model, and stages of a pipeline lose some.
        self.model = copy.deepcopy(model)
        self.seed = seed
        self.device = "cpu"
        if torch.device(device).type == "cuda":
            self.device = device
        self.first_names: dict[str, str] = {}
        for names in names_of_tensors(self.model):
            self.first_names |= dict.fromkeys(names, names[0])
        self._require_pieces()

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Fill tensors with drawn values, with one piece of the model in memory at a time."""
        to_fill: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            to_fill.setdefault(self.first_names[name], []).append(tensor)
        for piece in _pieces(self.model):
            entries = []
            for entry in piece.entries():
                # Each tied weight belongs to the piece of its first name.
                if self.first_names.get(entry.name) == entry.name:
                    entries.append(entry)
            names = {entry.name for entry in entries}
            if to_fill.keys().isdisjoint(names):
                continue
            without_memory = [entry.tensor for entry in entries]
            for entry in entries:
                self._allocate(entry)
            # The whole piece is drawn, also what this rank does not need: its weights take random
            # numbers one after another.
            with torch.no_grad(), use_seed(derive(self.seed, piece.name), self.device):
                piece.draw()
            for entry in entries:
                for tensor in to_fill.get(entry.name, ()):
                    copy_part(tensor, entry.tensor.detach())
            # The memory of one piece is free again before the next one is drawn.
            for entry, tensor in zip(entries, without_memory, strict=True):
                entry.holder[entry.key] = tensor

    def _allocate(self, entry: Entry) -> None:
        """Replace a tensor of the copied model by one with memory."""
        tensor = torch.empty_like(entry.tensor, device=self.device)
        if isinstance(entry.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        entry.holder[entry.key] = tensor

    def _require_pieces(self) -> None:
        """Raise NeedsFullModel unless the initialisation works piece by piece.

        It runs on the meta device, where nothing is drawn, and the tensors that it writes to are
        recorded.
        """
        from drumline.vendor.transformers import initialization

        drawn: set[int] = set()

        def record(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            drawn.add(id(tensor))
            return tensor

        weights = {}
        for piece in _pieces(self.model):
            for entry in piece.entries():
                if entry.name in self.first_names:
                    weights[id(entry.tensor)] = entry.name
        functions = initialization.TORCH_INIT_FUNCTIONS
        with (
            mock.patch.dict(functions, dict.fromkeys(functions, record)),
            mock.patch.object(initialization, "copy_", record),
            torch.no_grad(),
        ):
            for piece in _pieces(self.model, empty=True):
                drawn.clear()
                piece.draw()
                own = {id(entry.tensor) for entry in piece.entries()}
                # The values would depend on which pieces a rank draws.
                foreign = (drawn & weights.keys()) - own
                if foreign:
                    owner = type(piece.module).__name__
                    raise NeedsFullModel(f"{owner} initialises weights of other modules")
                # The constructor's values were lost, since it ran on the meta device.
                missed = (weights.keys() & own) - drawn
                if missed:
                    raise NeedsFullModel(
                        f"{weights[missed.pop()]} is initialised by its constructor"
                    )


def _pieces(
    module: nn.Module, empty: bool = False, name: str = "", init: Any = None
) -> Iterator[Piece]:
    """Yield the pieces of a module in the model's order.

    `empty`: also pieces without a tensor. `name`: the module's path. `init`: the initialisation of
    the module around it.
    """
    init = getattr(module, "_init_weights", init)
    for key, child in module.named_children():
        path = _join(name, key)
        if isinstance(module, nn.ModuleList):
            yield Piece(path, child, True, init)
        else:
            yield from _pieces(child, empty, path, init)
    if empty or _own_tensors(module):
        yield Piece(name, module, False, init)


def _depth_first(module: nn.Module, init: Init) -> None:
    """Initialise a module after its children, in the order of `nn.Module.apply`.

    Each is initialised by the innermost model around it.
    """
    init = getattr(module, "_init_weights", init)
    for child in module.children():
        _depth_first(child, init)
    init(module)


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return `model.<name>` → tensor for what a checkpoint has of a model.

    These are trainable parameters and persistent buffers. Tied parameters are there once, under the
    first name. Frozen parameters are not: building the model again restores them.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensors[f"model.{name}"] = parameter.data
    for name, buffer in _persistent_buffers(model):
        tensors[f"model.{name}"] = buffer
    return tensors


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name → tensor, for each parameter, frozen or not, and persistent buffer.

    Tied parameters are there once, under the first name.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    return tensors | dict(_persistent_buffers(model))


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each tied parameter, by its first name.

    `all_tensors` has it under the first name.
    """
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    tied = {}
    for first, *later_names in by_parameter.values():
        if later_names:
            tied[first] = later_names
    return tied


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of each buffer that the model's state dictionary has."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _join(prefix, name), buffer


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return path of a module → what its own `get_extra_state` returns, if JSON can hold it."""
    states = {}
    for path, module in model.named_modules():
        if has_extra_state(module):
            state = module.get_extra_state()
            if survives_json(state):
                states[path] = state
    return states


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Hand each module the state that `extra_states` has returned for it."""
    for path, module in model.named_modules():
        if path in states:
            module.set_extra_state(states[path])


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module's class overrides `get_extra_state`."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def survives_json(value: Any) -> bool:
    """Return whether a value comes back equal from JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def file_name(name: str) -> str:
    """Return a tensor's name in the model's files: without the parts that PEFT's layers add."""
    name = name.replace(".token_adapter.", ".")
    # The experts of a mixture have two layers of PEFT's, one inside the other.
    return ADAPTED.sub(".", name)

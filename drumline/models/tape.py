"""Lays out any nn.Module without memory, by a recording of its constructor.

The tape records what the constructor does to each tensor. Later each rank replays it for the
tensors that it holds. So a rank makes only its own part of the weights, whatever initialises them
(`reset_parameters`, `nn.init`, `apply`, copies of other weights). Every world size and strategy
starts from the same weights, since the i-th random call draws from a seed of its own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drumline.dist.seeds import derive, use_host_seed, use_seed
from drumline.errors import ModelError
from drumline.models.shards import (
    NeedsFullModel,
    NothingToFill,
    Source,
    canonical_tensors,
    copy_part,
)
from drumline.vendor.torch import TorchDispatchMode, device_constructors, tree_leaves, tree_map_only

logger = logging.getLogger(__name__)
Build = Callable[[], nn.Module]
# Code object → function, for functions that do nothing on the meta device. A call of one is
# recorded as a whole, not by its operators.
RECORDED_WHOLE = {
    function.__code__: function
    for function in (nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.dirac_, nn.init.sparse_)
}
# Attributes of a module whose tensors `Values` fills.
FILLED_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}
# A tensor in host memory with more bytes is not copied, but watched for changes.
LARGE = 2**20
# Operators that overwrite their first argument, whatever its values were.
OVERWRITES = {
    getattr(torch.ops.aten, name) for name in ("zero_", "fill_", "copy_", "normal_", "uniform_")
}


def lay_out_module(
    build: Build, seed: int, device: str, draw_device: str = "cpu"
) -> tuple[nn.Module, Source]:
    """Return the module that `build` makes, on the meta device, and the source of its weights.

    If its constructor reads values (`.item()`), or makes weights that are not on the device of
    torch's context, it is built whole in host memory on each rank instead, from the same seed, and
    moved to `device`; the reason is logged. `draw_device`: as of `ReplayedValues`.
    """
    tape = _Tape()
    # torch caches this list. If that was done while transformers had replaced torch.linspace, the
    # list lacks this function from then on.
    device_constructors.cache_clear()
    try:
        with use_host_seed(seed), torch.device("meta"), tape:
            model = _require_module(build())
        return model, ReplayedValues(tape, model, seed, draw_device)
    except Exception as error:  # noqa: BLE001 - the build with memory works, or raises it again
        reason, _, _ = str(error).strip().partition("\n")
    with use_host_seed(seed):
        model = _require_module(build())
    logger.warning("the whole model is built on each rank: %s", reason)
    return model.to(device), NothingToFill()


def _require_module(built: object) -> nn.Module:
    """Return a module, or a list of stages as one module. Raises ModelError for anything else."""
    if isinstance(built, list) and built and all(isinstance(stage, nn.Module) for stage in built):
        return nn.Sequential(*built)
    if not isinstance(built, nn.Module):
        what = f"build gave {type(built).__name__}, not a torch.nn.Module"
        raise ModelError(what, where="build", fix="return the module, or its stages")
    return built


def _view_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor without memory, which keeps its storage and its place in it.

    Transforms will swap the tensor itself. A tensor with memory is returned as it is.
    """
    if not tensor.is_meta:
        return tensor
    return tensor.detach()


def _storage_key(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage, the same for all its views."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Call:
    """A call of an operator that wrote to tensors.

    Tensors without memory are views (see `_view_of`).
    """

    operator: Any
    args: Any
    kwargs: Any
    # The tensors that it returned.
    outs: list[Any]
    # Keys of the storages that it read and wrote.
    reads: frozenset[int]
    writes: frozenset[int]
    # The number of this random call; None: it draws nothing.
    draws: int | None


class _Tape(TorchDispatchMode):
    """Records the operators that write to tensors on the meta device.

    torch calls `__torch_dispatch__` for each operator within the context. All storages are kept, so
    that a key stays one storage's: the key of one that was freed may be given to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.random_calls = 0
        # Large tensors of the host, and the version that was read.
        self.watched: list[tuple[torch.Tensor, int]] = []
        # Keys of storages whose values the recorded calls make.
        self.known = set[int]()
        # Keys of storages whose values are not recorded, such as those that torch.tensor writes.
        self.lost = set[int]()

    def __enter__(self) -> Any:
        """Begin to record operators, and calls of the functions of RECORDED_WHOLE."""
        self.profile_before = sys.getprofile()
        # By their code: a module may have imported these functions under any name.
        sys.setprofile(self._record_function)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self.profile_before)
        super().__exit__(*error)

    def _record_function(self, frame: Any, event: str, _: Any) -> None:
        """Record a call of a function of RECORDED_WHOLE. Python calls this for every call."""
        if event != "call" or frame.f_code not in RECORDED_WHOLE:
            return
        function = RECORDED_WHOLE[frame.f_code]
        # At the start of a call its local variables are its arguments.
        arguments = tree_map_only(torch.Tensor, _view_of, dict(frame.f_locals))
        tensor = arguments["tensor"]
        self._note_values((), arguments, new=frozenset(), overwritten=tensor)
        self._record(function, (), arguments, outs=[], writes=_keys(tensor), draws=True)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and record it if it writes to a tensor. torch calls this."""
        out = operator(*args, **(kwargs or {}))
        # It writes nothing, and `_view_of` calls it.
        if operator is torch.ops.aten.detach.default:
            return out
        args, kwargs, outs = tree_map_only(torch.Tensor, _view_of, (args, kwargs or {}, [out]))
        out_tensors = _tensors(outs)
        # Results that share no storage with an argument.
        new = _keys(outs) - _keys((args, kwargs))
        overwritten = None
        if operator.overloadpacket in OVERWRITES:
            overwritten = _tensors(args)[0]
        self._note_values(args, kwargs, new, overwritten)
        writes = _changed_keys(operator, args, kwargs) | new
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        self._record(operator, args, kwargs, out_tensors, writes, draws)
        return out

    def _note_values(self, args: Any, kwargs: Any, new: frozenset[int], overwritten: Any) -> None:
        """Note which storages have recorded values, and which have lost theirs.

        `new`: keys of the storages that the call made. `overwritten`: the tensor that the call
        overwrites, whatever its values were; None: none.
        """
        if overwritten is not None and overwritten.is_meta:
            storage = overwritten.untyped_storage()
            is_whole_storage = overwritten.nbytes == storage.nbytes()
            if is_whole_storage:
                self.known.add(_storage_key(overwritten))
        # Values of a storage that is used before a recorded call has written to it are not
        # recorded.
        unknown = _keys((args, kwargs)) - self.known
        self.lost |= unknown
        self.known |= new

    def _record(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        outs: list[Any],
        writes: frozenset[int],
        draws: bool,
    ) -> None:
        """Record a call if it wrote to anything. `writes`: keys of the storages that it wrote."""
        if not writes:
            return
        reads = _keys((args, kwargs))
        args, kwargs = tree_map_only(torch.Tensor, self._keep, (args, kwargs))
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            # The generator will be in another state when the call is played.
            self.lost |= writes
        number = None
        if draws:
            number = self.random_calls
            self.random_calls += 1
        self.calls.append(_Call(operator, args, kwargs, outs, reads, writes, number))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of the host, to which the constructor may write again.

        A large one, such as one of a file, is not copied. Its version is noted instead.
        """
        if tensor.is_meta:
            return tensor
        if tensor.nbytes <= LARGE:
            return tensor.clone()
        # An inference tensor counts no versions.
        if not tensor.is_inference():
            self.watched.append((tensor, tensor._version))
        return tensor


def _changed_keys(operator: Any, args: Any, kwargs: Any) -> frozenset[int]:
    """Return the keys of the storages that an operator changes in place, by its schema."""
    changed = frozenset[int]()
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(argument.name)
        changed |= _keys(value)
    return changed


class ReplayedValues:
    """The source of a module's first values: replays the recording of its constructor.

    `tape`: the recording of the module's constructor. `model`: the module, on the meta device,
    before any transform. `seed`: of the random calls. `draw_device`: cpu or cuda, on which the
    calls are replayed. A GPU's generator gives other numbers than a CPU's, so this is the device
    that the run trains on under every strategy. A module whose constructor draws values that no
    checkpoint has is replayed on the CPU in any case, since they are drawn again on other machines.
    Raises NeedsFullModel if the tape does not have all values.
    """

    # A name like that of an adapter has no special meaning here.
    uses_module_names = True

    def __init__(self, tape: _Tape, model: nn.Module, seed: int, draw_device: str = "cpu") -> None:
        self.calls = tape.calls
        self.seed = seed
        self.lost = tape.lost
        # Key of a storage → the numbers of the calls that write to it.
        self.writers: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            for key in call.writes:
                self.writers.setdefault(key, []).append(number)
        # Views of the tensors as they are now: transforms replace these.
        self.laid_out: dict[str, torch.Tensor] = {}
        for name, tensor in _all_named_tensors(model):
            if tensor.is_meta:
                self.laid_out[name] = _view_of(tensor)
        _require_recorded(tape, model)
        # Find missing values now. When a rank fills its part it is too late to build the whole
        # model.
        for view in self.laid_out.values():
            self._calls_for(view)
        _require_registered(model)
        self.draw_device = draw_device
        if any(self._is_drawn(name) for name in _names_in_no_checkpoint(model)):
            self.draw_device = "cpu"

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Fill tensors with the values that the constructor would have given them."""
        for name, tensor in tensors.items():
            with torch.no_grad():
                copy_part(tensor, self._play(self.laid_out[name], self.draw_device))

    def _is_drawn(self, name: str) -> bool:
        """Return whether a tensor's values depend on a random call."""
        if name not in self.laid_out:
            return False
        numbers = self._calls_for(self.laid_out[name])
        return any(self.calls[number].draws is not None for number in numbers)

    def _calls_for(self, view: torch.Tensor) -> list[int]:
        """Return the numbers of the calls that a tensor's values depend on, in order.

        Raises NeedsFullModel if they are not recorded.
        """
        numbers = set[int]()
        waiting = [_storage_key(view)]
        seen = set(waiting)
        while waiting:
            key = waiting.pop()
            if key in self.lost or key not in self.writers:
                raise NeedsFullModel("it has values that are not there without memory")
            for number in self.writers[key]:
                numbers.add(number)
                reads = self.calls[number].reads
                waiting += reads - seen
                seen |= reads
        return sorted(numbers)

    def _play(self, view: torch.Tensor, device: str) -> torch.Tensor:
        """Return a tensor with its values, after the calls for it were run again on `device`."""
        storages = _Storages(device)
        for number in self._calls_for(view):
            call = self.calls[number]
            arguments = (call.args, call.kwargs)
            arguments = tree_map_only(torch.Tensor, storages.tensor_of, arguments)
            # The recorded arguments name the meta device.
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device(device), arguments)
            with self._random_numbers_of(call, device):
                out = call.operator(*args, **kwargs)
            for out_view, tensor in zip(call.outs, _tensors(out), strict=False):
                storages.keep(out_view, tensor)
        return storages.tensor_of(view)

    def _random_numbers_of(
        self, call: _Call, device: str
    ) -> contextlib.AbstractContextManager[None]:
        """Within the context a call draws from a seed of its own."""
        if call.draws is None:
            return contextlib.nullcontext()
        return use_seed(derive(self.seed, call.draws), device)


class _Storages:
    """Memory on a device for the storages of a recording."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.by_key: dict[int, torch.UntypedStorage] = {}

    def tensor_of(self, view: torch.Tensor) -> torch.Tensor:
        """Return the tensor with memory for a view of the recording.

        A tensor of the host is returned as it is.
        """
        if not view.is_meta:
            return view
        key = _storage_key(view)
        if key not in self.by_key:
            # Uninitialised: the first call that uses it overwrites it.
            size = view.untyped_storage().nbytes()
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.by_key[key] = memory.untyped_storage()
        tensor = torch.empty(0, dtype=view.dtype, device=self.device)
        offset = int(view.storage_offset())
        return tensor.set_(self.by_key[key], offset, view.size(), view.stride())

    def keep(self, view: torch.Tensor, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that a replayed call returned, if its storage is new.

        `view`: the tensor that the same call returned when it was recorded.
        """
        if not view.is_meta:
            return
        key = _storage_key(view)
        if key in self.by_key:
            return
        if tensor.stride() != view.stride():
            # Later calls read the memory by the strides that were recorded.
            with_strides = torch.empty_strided(
                view.size(), view.stride(), dtype=view.dtype, device=self.device
            )
            tensor = with_strides.copy_(tensor)
        self.by_key[key] = tensor.untyped_storage()


def _all_named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each parameter and buffer; tied ones under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _require_recorded(tape: _Tape, model: nn.Module) -> None:
    """Raise NeedsFullModel for parameters with memory, and for changed tensors of the host."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise NeedsFullModel(f"{name} is not made on the device of torch's context")
    for tensor, version in tape.watched:
        # torch counts a tensor's version up whenever something writes to it.
        if tensor._version != version:
            raise NeedsFullModel("it writes to a large tensor of the host that it has copied from")


def _names_in_no_checkpoint(model: nn.Module) -> list[str]:
    """Return the names of the tensors that `shards.canonical_tensors` leaves out."""
    saved = {name.removeprefix("model.") for name in canonical_tensors(model)}
    names = []
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        if name not in saved:
            names.append(name)
    return names


def _require_registered(model: nn.Module) -> None:
    """Raise NeedsFullModel if a tensor without memory is neither a parameter nor a buffer.

    It may be in any attribute of any module.
    """
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in FILLED_ATTRIBUTES and _has_loose_tensor(value):
                name = key
                if path:
                    name = f"{path}.{key}"
                raise NeedsFullModel(
                    f"{name} is neither a parameter nor a buffer (register_buffer makes it one)"
                )


def _has_loose_tensor(value: Any) -> bool:
    """Return whether there is a tensor without memory that is no parameter in a value."""
    without_memory = [tensor for tensor in _tensors(value) if tensor.is_meta]
    return any(not isinstance(tensor, nn.Parameter) for tensor in without_memory)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _keys(values: Any) -> frozenset[int]:
    """Return the keys of the storages of all tensors without memory in nested values."""
    return frozenset(_storage_key(tensor) for tensor in _tensors(values) if tensor.is_meta)

"""Any nn.Module laid out without memory. What its constructor did to each tensor is recorded, and played again where a part is needed. So a
rank makes only what it holds, by whatever rules the module has (`reset_parameters`, `nn.init`, `apply`, copies of other weights), and every
world size and strategy starts from the same weights: the i-th random call draws from a seed of its own."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from drumline.dist.seeds import constructing, derive, drawing
from drumline.errors import ModelError
from drumline.models.shards import Loaded, Source, Whole, copy_part
from drumline.vendor.torch import TorchDispatchMode, device_constructors, tree_leaves, tree_map_only

logger = logging.getLogger(__name__)
Build = Callable[[], nn.Module]
# They do nothing on the meta device, so a call of one of them is recorded as a whole.
WHOLE = {
    function.__code__: function
    for function in (nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.dirac_, nn.init.sparse_)
}
KEPT = {"_parameters", "_buffers", "_modules"}  # where a module has what `Values` fills
LARGE = 2**20  # bytes of a tensor of the host
OVERWRITES = {
    getattr(torch.ops.aten, name) for name in ("zero_", "fill_", "copy_", "normal_", "uniform_")
}


def lay_out_module(build: Build, seed: int, device: str) -> tuple[nn.Module, Source]:
    """The module that `build` makes, on the meta device, and where its first weights come from. Where its constructor looks at values
    (`.item()`), or makes weights that are not on the device of torch's context, it is built whole in host memory on each rank instead, from
    the same seed, and moved to `device`; the reason is logged."""
    tape = _Tape()
    # Made while transformers had replaced torch.linspace, torch's list of what a device context governs lacks it from then on.
    device_constructors.cache_clear()
    try:
        with constructing(seed), torch.device("meta"), tape:
            model = _module(build())
        return model, Played(tape, model, seed)
    except Exception as reason:  # noqa: BLE001 - whatever fails without memory either works with it, or is raised again
        first = str(reason).strip().partition("\n")[0]
    with constructing(seed):
        model = _module(build())
    logger.warning("the whole model is built on each rank: %s", first)
    return model.to(device), Loaded()


def _module(built: object) -> nn.Module:
    if isinstance(built, list) and built and all(isinstance(stage, nn.Module) for stage in built):
        return nn.Sequential(*built)
    if not isinstance(built, nn.Module):
        raise ModelError(
            f"build gave {type(built).__name__}, not a torch.nn.Module",
            where="build",
            fix="return the module, or its stages",
        )
    return built


def _place(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory: which storage, and how it lies there. Not the tensor itself, which transforms swap."""
    return tensor.detach() if tensor.is_meta else tensor


def _key(place: torch.Tensor) -> int:
    return place.untyped_storage()._cdata


@dataclass(frozen=True)
class _Call:
    """An operator that wrote something. `reads`, `writes`: keys of storages. `draws`: which random call this is."""

    operator: Any
    args: Any
    kwargs: Any
    outs: list[Any]
    reads: frozenset[int]
    writes: frozenset[int]
    draws: int | None


class _Tape(TorchDispatchMode):
    """Records the operators that write to tensors on the meta device. All storages are kept, so that a key stays one storage's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.random_calls = 0
        self.watched: list[tuple[torch.Tensor, int]] = []  # and the version that was read
        # Keys: whose values the tape gives; torch.tensor puts others there unseen.
        self.known, self.lost = (
            set[int](),
            set[int](),
        )

    def __enter__(self) -> Any:
        self.before = sys.getprofile()
        sys.setprofile(self._note)  # by their code: a module may have imported them under any name
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self.before)
        super().__exit__(*error)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in WHOLE:
            args = tree_map_only(torch.Tensor, _place, dict(frame.f_locals))
            self._record(
                WHOLE[frame.f_code],
                (),
                args,
                [],
                _keys(args["tensor"]),
                frozenset(),
                args["tensor"],
                draws=True,
            )

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.detach.default:  # it reads no values; `_place` makes some
            return out
        args, kwargs, outs = tree_map_only(torch.Tensor, _place, (args, kwargs or {}, [out]))
        changes, given = frozenset[int](), _keys((args, kwargs))
        for position, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changes |= _keys(
                    args[position] if position < len(args) else kwargs.get(argument.name)
                )
        first = _tensors(args)[0] if operator.overloadpacket in OVERWRITES else None
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        self._record(
            operator, args, kwargs, _tensors(outs), changes, _keys(outs) - given, first, draws
        )
        return out

    def _record(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        outs: list[Any],
        changes: frozenset[int],
        new: frozenset[int],
        first: Any,
        draws: bool,
    ) -> None:
        """`changes`, `new`: keys of what is written in place, and of what is made. `first`: what is overwritten, of whatever it was."""
        given = _keys((args, kwargs))
        if first is not None and first.is_meta and first.nbytes == first.untyped_storage().nbytes():
            self.known.add(_key(first))
        self.lost |= given - self.known
        self.known |= new
        if not (changes or new):
            return
        args, kwargs = tree_map_only(torch.Tensor, self._kept, (args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            self.lost |= changes | new  # it is somewhere else when this is played
        self.calls.append(
            _Call(
                operator,
                args,
                kwargs,
                outs,
                given,
                changes | new,
                self.random_calls if draws else None,
            )
        )
        self.random_calls += draws

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of the host holds now: the constructor may write to it again. A large one, such as a file's, is not copied, but
        watched."""
        if tensor.is_meta or tensor.nbytes > LARGE:
            self.watched += (
                [] if tensor.is_meta or tensor.is_inference() else [(tensor, tensor._version)]
            )
            return tensor
        return tensor.clone()


class Played:
    """First values of a module's tensors, by its own rules; a `shards.Source`. Raises Whole where they are not known from the tape."""

    by_name = True  # of the module itself: a name that is an adapter's in another model means nothing here

    def __init__(self, tape: _Tape, model: nn.Module, seed: int) -> None:
        self.calls, self.seed, self.lost = tape.calls, seed, tape.lost
        tensors = chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        # As they are now: transforms replace them.
        self.laid_out = {name: _place(tensor) for name, tensor in tensors if tensor.is_meta}
        self.writers: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            for key in call.writes:
                self.writers.setdefault(key, []).append(index)
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                raise Whole(f"{name} is not made on the device of torch's context")
        if any(tensor._version != version for tensor, version in tape.watched):
            raise Whole("it writes to a large tensor of the host that it has copied from")
        for place in self.laid_out.values():
            self._needed(place)
        for path, module in model.named_modules():
            for key, value in vars(module).items():
                if key not in KEPT and any(
                    tensor.is_meta and not isinstance(tensor, nn.Parameter)
                    for tensor in _tensors(value)
                ):
                    name = f"{path}.{key}" if path else key
                    raise Whole(
                        f"{name} is neither a parameter nor a buffer (register_buffer makes it one)"
                    )

    def put(self, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
        # As `shards.Drawn` has it: a rank that trains on a GPU draws there.
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        for name, tensor in tensors.items():
            with torch.no_grad():
                copy_part(tensor, self._play(self.laid_out[name], device))

    def _needed(self, place: torch.Tensor) -> list[int]:
        """The calls that had a part in a tensor, in order."""
        keys, calls = [_key(place)], set[int]()
        seen = set(keys)
        for key in keys:
            if key in self.lost or key not in self.writers:
                raise Whole("it has values that are not there without memory")
            for index in self.writers[key]:
                calls.add(index)
                keys += self.calls[index].reads - seen
                seen |= self.calls[index].reads
        return sorted(calls)

    def _play(self, wanted: torch.Tensor, device: str) -> torch.Tensor:
        storages: dict[int, torch.UntypedStorage] = {}

        def real(place: torch.Tensor) -> torch.Tensor:
            if not place.is_meta:
                return place
            size, made = (
                place.untyped_storage().nbytes(),
                torch.empty(0, dtype=place.dtype, device=device),
            )
            if _key(place) not in storages:  # it is overwritten now
                storages[_key(place)] = torch.empty(
                    size, dtype=torch.uint8, device=device
                ).untyped_storage()
            return made.set_(
                storages[_key(place)], int(place.storage_offset()), place.size(), place.stride()
            )

        for index in self._needed(wanted):
            call = self.calls[index]
            args, kwargs = tree_map_only(torch.Tensor, real, (call.args, call.kwargs))
            args, kwargs = tree_map_only(
                torch.device, lambda _: torch.device(device), (args, kwargs)
            )
            with (
                contextlib.nullcontext()
                if call.draws is None
                else drawing(derive(self.seed, call.draws), device)
            ):
                out = call.operator(*args, **kwargs)
            for place, made in zip(call.outs, _tensors(out), strict=False):
                if place.is_meta and _key(place) not in storages:
                    if made.stride() != place.stride():
                        made = torch.empty_strided(
                            place.size(), place.stride(), dtype=place.dtype, device=device
                        ).copy_(made)
                    storages[_key(place)] = made.untyped_storage()
        return real(wanted)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _keys(values: Any) -> frozenset[int]:
    """Of the storages of all tensors without memory in there."""
    return frozenset(_key(tensor) for tensor in _tensors(values) if tensor.is_meta)

"""One micro-batch through our own engine, without memory: which bytes live where, at a number of layers.

`_Late` gives tensors without memory (torch's FakeTensorMode), `Watch` counts what lives in each block, and `run` traces.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.algorithms.base import policy_objective
from drumline.core.plan import Plan
from drumline.models import adapters
from drumline.models.blocks import block_list
from drumline.models.build import lay_out
from drumline.models.freeze import freeze
from drumline.models.shards import Loaded, Values
from drumline.parallel.data_parallel import Spread
from drumline.parallel.native import NativeEngine, prepare
from drumline.parallel.transforms import DTYPES
from drumline.strategies.build import keep_frozen_low
from drumline.telemetry.memory_tracker import LiveBytes, plain_parts
from drumline.vendor.torch import FakeTensorMode, TorchDispatchMode, current_graph_task_id, local_scalar_dense, to_copy

_ATEN = torch.ops.aten


class _Answers(TorchDispatchMode):
    """Answers that depend on values: every number is 1, a condition holds if `yes`, and a selection by a condition takes all entries."""

    def __init__(self, yes: bool) -> None:
        super().__init__()
        self.yes = yes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is local_scalar_dense.default:
            dtype = args[0].dtype
            return self.yes if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _ATEN.nonzero.default:
            return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device=args[0].device)
        if func is _ATEN.index.Tensor and [i.dtype for i in args[1] if i is not None] == [torch.bool] and args[1][0] is not None:
            mask = args[1][0]
            return args[0].new_empty((mask.numel(), *args[0].shape[mask.ndim :]))
        return func(*args, **(kwargs or {}))


Tags = dict[int, weakref.ref[torch.UntypedStorage]]
_COPIES = {to_copy.default, torch.ops.aten.to.dtype}


class Watch(LiveBytes):
    """Follows one micro-batch of a model on FakeTensors.

    A place is `ahead` (of the blocks), a block's number, `behind` them, or `loss`; in backward the same with a minus (`-0`, `-loss`).
    `peaks_at`: bytes at the peak in each place; `saved_at`: bytes where each place of forward begins. Both are of activations: what
    lived before, gradients of weights, and copies of weights in a lower precision (`copies`) are counted apart.
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
            block.register_forward_pre_hook(partial(self._begins, index), with_kwargs=True)
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
    def copies(self) -> int:
        return self._bytes(self._copies)

    @property
    def activations(self) -> int:
        return self.current - self.base - self._bytes(self._gradients) - self.copies

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
        """The bytes of the storages that still exist (another may have come to the same address)."""
        return sum(self._sizes.get(key, 0) for key, reference in table.items() if self._references.get(key) is reference)

    def _note(self) -> None:
        super()._note()
        self.peaks_at[self.place] = max(self.peaks_at.get(self.place, 0), self.activations)

    def _begins(self, index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if current_graph_task_id() != -1:
            return  # computed again
        self.at(str(index))
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self.at("-ahead" if index == 0 else f"-{index - 1}"))

    def _ends(self, _module: Any, _args: Any, output: Any) -> None:
        if current_graph_task_id() != -1:
            return
        self.at("behind")
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self.at(f"-{len(self.blocks) - 1}"))


class Untraceable(Exception):
    """Why a model cannot be traced; the formula is used instead."""


@dataclass(frozen=True)
class Traced:
    """Bytes of one micro-batch of a model of `layers` blocks. `saved_at`, `peaks_at`: of activations, by place, as `Watch` has them;
    `copies`: of weights when the objective begins, `copies_kept` when forward is through. `peak`: all that lives on top of what did
    before, in forward or backward."""

    layers: int
    saved_at: dict[str, int] = field(default_factory=dict)
    peaks_at: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    copies_kept: int = 0
    peak: int = 0


class _Engine(NativeEngine):
    """A native engine without an optimizer: nothing steps."""

    def __init__(self, plan: Plan, model: nn.Module, spread: Spread, around: Callable[[], Any] = contextlib.nullcontext) -> None:
        super(NativeEngine, self).__init__(plan, model, spread, around)
        self.model.train()


def run(plan: Plan, rows: int, length: int, dtype: str | None = None) -> Traced:
    """Trace a micro-batch of `rows` × `length`. `plan`: of one data rank, on the CPU. `dtype` (bf16): weights lie in that type, as FSDP2
    gathers them and DeepSpeed keeps them, and there is no autocast. Raises Untraceable."""
    config = plan.config
    model, _ = lay_out(plan.model_path, config.model.model_copy(update={"init": "random"}), 0, head=config.head, labels=plan.labels)
    freeze(model, config.model.freeze)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, 0)
    if not dtype:
        keep_frozen_low(plan, model)
    found = block_list(model)
    if found is None:
        raise Untraceable("its blocks are not in one list")
    if not next(model.parameters()).is_meta:
        raise Untraceable("it cannot be laid out without weights")
    # The objective's trials of a small copy run for real; from `fill` on nothing does.
    with contextlib.ExitStack() as stack:
        values = _Late(Loaded(), "cpu", 0, stack=stack, packs=config.packs, dtype=DTYPES[dtype] if dtype else None)
        engine = prepare(plan, model, values, _Engine)
        if dtype:
            engine.autocast_dtype = None
        batch = config.algorithm.traced_batch(plan, rows, length, int(getattr(model.config, "num_channels", 3)))
        watch, objective = Watch(engine.model, list(found[1])), policy_objective(config.algorithm.build())
        try:
            with watch, engine.micro_batch(last=True):
                with engine._autocast():
                    loss_sum, _ = engine.spread.module(batch, watch.objective(objective))
                copies_kept = watch.copies
                watch.at("-loss")
                loss_sum.backward()
        except Exception as error:
            raise Untraceable(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}") from error
    return Traced(len(found[1]), watch.saved_at, watch.peaks_at, watch.copies_at_loss, copies_kept, watch.peak - watch.base)


@dataclass(frozen=True)
class _Late(Values):
    """Values without memory: until `stack` is left, what is computed has shapes alone. `packs`: rows hold several documents."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    packs: bool = False
    dtype: torch.dtype | None = None  # of parameters; None: as they are

    def fill(self, model: nn.Module, offloaded: bool = False, owners: Collection[nn.Module] | None = None) -> None:
        from drumline.vendor.transformers import masking_utils

        # Where packs hold several documents, attention gets a mask; otherwise transformers finds none needed, as it does in a run. If it
        # knew of the tracing, it would make one.
        self.stack.callback(setattr, masking_utils, "is_tracing", masking_utils.is_tracing)
        masking_utils.is_tracing = lambda *_, **__: False
        self.stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self.stack.enter_context(_Answers(not self.packs))
        made: dict[int, torch.Tensor] = {}  # tied ones stay tied
        for owner in model.modules() if owners is None else owners:
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        if id(tensor) not in made:
                            made[id(tensor)] = _empty(tensor, self.dtype)
                        table[name] = made[id(tensor)]  # type: ignore[assignment]


def _empty(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A fake one like it; a parameter in `dtype`."""
    whole = tensor.detach()
    part = whole.to_local() if isinstance(whole, DTensor) else whole
    fake = torch.empty(part.shape, dtype=(dtype if isinstance(tensor, nn.Parameter) else None) or part.dtype)
    if isinstance(tensor, DTensor):
        fake = DTensor.from_local(fake, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

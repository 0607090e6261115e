"""One micro-batch through our own engine, without memory: what lives where, at a number of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
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
from drumline.planner.tracing.fake import faked
from drumline.planner.tracing.watch import Watch
from drumline.strategies.build import keep_frozen_low


class Untraceable(Exception):
    """Why a model cannot be traced; the formula is used instead."""


@dataclass(frozen=True)
class Traced:
    """Bytes of one micro-batch of a model of `layers` blocks. `saved_at`, `peaks_at`: of activations, by place, as `Watch` has them;
    `kept`: of activations between forward and backward. `gradients`: of weights, at the end of backward; `copies` of weights when the
    objective begins, `copies_kept` when forward is through. `peak`: all that lives on top of what did before, in forward or backward."""

    layers: int
    saved_at: dict[str, int] = field(default_factory=dict)
    peaks_at: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    gradients: int = 0
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
        return _follow(engine, list(found[1]), batch, policy_objective(config.algorithm.build()))


@dataclass(frozen=True)
class _Late(Values):
    """Memory that is none: from here on, until `stack` is left, all tensors are fake."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    packs: bool = False
    dtype: torch.dtype | None = None  # of parameters; None: as they are

    def fill(self, model: nn.Module, offloaded: bool = False, owners: Collection[nn.Module] | None = None) -> None:
        self.stack.enter_context(faked(self.packs))
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


def _follow(engine: NativeEngine, blocks: list[nn.Module], batch: Any, objective: Any) -> Traced:
    watch = Watch(engine.model, blocks)
    try:
        with watch, engine.around(), engine.spread.micro_batch(last=True):
            with engine._autocast():
                loss_sum, _ = engine.spread.module(batch, watch.objective(objective))
            kept, copies_kept = watch.activations, watch.copies
            watch.at("-loss")
            loss_sum.backward()
            gradients = watch.gradients
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}") from error
    return Traced(len(blocks), watch.saved_at, watch.peaks_at, kept, gradients, watch.copies_at_loss, copies_kept, watch.peak - watch.base)

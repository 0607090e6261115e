"""A module of the user's own: what makes it, and the weights that a run has left for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import nn

from drumline.checkpoint.load import best_or_latest, check, load, pointed, read_state
from drumline.core.model import ModelConfig
from drumline.core.plan import Plan
from drumline.core.registry import find_function, imported
from drumline.dist.seeds import derive
from drumline.errors import CheckpointError, ModelError
from drumline.models.freeze import freeze
from drumline.models.shards import (
    Values,
    canonical_tensors,
    extra_states,
    has_extra_state,
    set_extra_states,
)
from drumline.models.tape import lay_out_module

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a number


def own_build(plan: Plan) -> Callable[[], nn.Module]:
    """The function that makes it, with its options. Raises ConfigError where there is none, and so does the function where it fails."""
    model = plan.config.model
    builder = partial(find_builder(model, Path(plan.base_dir)), **model.options)
    return lambda: imported(builder, model.builder or "", _where(model), doing="calling")


def find_builder(model: ModelConfig, base_dir: Path) -> Callable[..., nn.Module]:
    """The function alone. Raises ConfigError where there is none."""
    return find_function(
        model.builder or "",
        "models",
        base_dir,
        _where(model),
        "the model",
        "install it, or write file.py:function",
    )


def _where(model: ModelConfig) -> str:
    return "model.path" if model.kind == "python" else "model.kind"


def require_trainable(model: nn.Module, *, cut: bool, deepspeed: bool) -> None:
    """`cut`: ranks keep parts of its weights, or of their optimizer's state. Raises ModelError for what no engine, or that one, trains."""
    saved = extra_states(model)
    for path, module in model.named_modules():
        if has_extra_state(module) and path not in saved:
            what = f"get_extra_state of {path or 'it'} gives what JSON does not have, so no checkpoint has it"
            raise ModelError(
                what, where="model", fix="keep it in buffers: self.register_buffer(name, tensor)"
            )
        if getattr(module, "sparse", False) is True and isinstance(
            module, nn.Embedding | nn.EmbeddingBag
        ):
            raise ModelError(
                f"{path or 'it'} has sparse gradients",
                where="model",
                fix="they are not averaged: build it with sparse=False",
            )
        if cut and getattr(module, "max_norm", None) is not None:
            what = f"max_norm of {path or 'it'} changes a weight in forward, which is lost where weights are cut"
            raise ModelError(
                what, where="model", fix="use ddp, or normalise in forward what it returns"
            )
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if (cut and len(types) > 1) or (deepspeed and torch.float64 in types):
        what = f"weights of {' and '.join(sorted(str(dtype).removeprefix('torch.') for dtype in types))} are not cut"
        raise ModelError(what, where="model", fix="use ddp, or float32 for all")
    for name, parameter in model.named_parameters():
        what, fix = "", ""
        if nn.parameter.is_lazy(parameter):
            what, fix = "has no shape yet", "give the layer its sizes, in place of a lazy one"
        elif parameter.is_complex():
            what, fix = (
                "is complex",
                "keep real and imaginary parts in a last dimension of 2, and call torch.view_as_complex in forward",
            )
        elif cut and parameter.ndim == 0:
            what, fix = (
                "has no dimension to cut it along",
                "make it a vector of one: torch.ones(1); or use ddp",
            )
        elif cut and not deepspeed and not parameter.is_contiguous():
            what, fix = "is not contiguous", "leave memory_format out of build, or use ddp"
        elif deepspeed and parameter._backward_hooks:
            what, fix = "has a hook, and DeepSpeed keeps weights of its own", "use fsdp2, or ddp"
        if what:
            raise ModelError(f"{name} {what}", where="model", fix=fix)


def require_same(model: nn.Module) -> None:
    """Raises ModelError where ranks have built other weights, such as those of a module that was made before, unseeded. Collective."""
    if not dist.is_initialized():
        return
    mine = {
        name: int(weight.detach().reshape(-1).view(BITS[weight.itemsize]).sum())
        for name, weight in model.named_parameters()
    }
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    if other := [name for name in mine if any(each.get(name) != mine[name] for each in of_all)]:
        what = f"{other[0]} is not the same on all ranks"
        raise ModelError(
            what,
            where="build",
            fix="make the module inside of build, which draws from the run's seed",
        )


def read_module(plan: Plan, run_dir: Path, which: str) -> tuple[Any, Path]:
    """(the module on the CPU in eval mode, with the weights of the best or the last checkpoint in `run_dir`; that checkpoint)."""
    root = run_dir / "checkpoints"
    checkpoint = best_or_latest(root) if which == "best" else pointed(root, "latest")
    if checkpoint is None:
        raise CheckpointError("nothing was saved", where=str(run_dir))
    seed = derive(plan.config.run.seed, "weights")
    # As ranks do: frozen weights are in no checkpoint.
    module, source = lay_out_module(own_build(plan), seed, "cpu")
    Values(source, "cpu", seed).fill(module)
    freeze(module, plan.config.model.freeze)
    check(checkpoint, verify=True, alone=True)
    load(checkpoint, canonical_tensors(module), alone=True)
    set_extra_states(module, read_state(checkpoint).get("engine", {}).get("modules", {}))
    return module.eval(), checkpoint


def export_weights(plan: Plan, which: str) -> Path:
    """The module's state dict as RUN/export/model.safetensors, of the best or the last checkpoint; its floats in
    `checkpoint.export_dtype`, where that is not auto."""
    folder = Path(plan.run_dir) / "export"
    module, _ = read_module(plan, folder.parent, which)
    if (dtype := plan.config.checkpoint.export_dtype) != "auto":
        module.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    folder.mkdir(exist_ok=True)
    save_model(module, str(folder / "model.safetensors"))
    return folder

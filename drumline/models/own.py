"""Modules of the user's own: finds their builder, checks them, and reads the weights of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import nn

from drumline.checkpoint.load import best_or_latest, check, load_tensors, read_pointer, read_state
from drumline.config.model import ModelConfig
from drumline.config.registry import find_function, run_user_code
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
from drumline.plan.plan import Plan

# Bytes of a number → the integer type of that size.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def own_build(plan: Plan) -> Callable[[], nn.Module]:
    """Return a function without arguments that builds the plan's module.

    Raises ConfigError if the builder is not found. The returned function raises ConfigError if the
    builder fails.
    """
    model = plan.config.model
    builder = partial(find_builder(model, Path(plan.base_dir)), **model.options)
    return partial(run_user_code, builder, model.builder or "", _where(model), doing="calling")


def find_builder(model: ModelConfig, base_dir: Path) -> Callable[..., nn.Module]:
    """Return the function that builds a module, without its options.

    Raises ConfigError if there is none.
    """
    name = model.builder or ""
    fix = "install it, or write file.py:function"
    return find_function(name, "models", base_dir, _where(model), "the model", fix)


def _where(model: ModelConfig) -> str:
    """Return the key of the config that names the builder."""
    if model.kind == "python":
        return "model.path"
    return "model.kind"


def require_trainable(model: nn.Module, *, cut: bool, deepspeed: bool) -> None:
    """Raise ModelError for a module that no engine can train, or not the engine of this run.

    `cut`: whether the weights, or their optimizer's state, are sharded over ranks. `deepspeed`:
    whether DeepSpeed trains it.
    """
    # It has no extra states that JSON cannot hold. The check of each module finds these.
    saved = extra_states(model)
    for path, module in model.named_modules():
        _require_trainable_module(path or "it", module, is_saved=path in saved, cut=cut)
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    has_mixed_parts = cut and len(types) > 1
    has_fp64_in_deepspeed = deepspeed and torch.float64 in types
    if has_mixed_parts or has_fp64_in_deepspeed:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in types)
        what = f"weights of several types ({', '.join(names)}) cannot be sharded"
        raise ModelError(what, where="model", fix="use ddp, or float32 for all")
    for name, parameter in model.named_parameters():
        _require_trainable_parameter(name, parameter, cut, deepspeed)


def _require_trainable_module(name: str, module: nn.Module, *, is_saved: bool, cut: bool) -> None:
    """Raise ModelError for a module that cannot be trained.

    `is_saved`: checkpoints have its extra state. `cut`: as in `require_trainable`.
    """
    if has_extra_state(module) and not is_saved:
        what = f"get_extra_state of {name} gives what JSON does not have, so no checkpoint has it"
        fix = "keep it in buffers: self.register_buffer(name, tensor)"
        raise ModelError(what, where="model", fix=fix)
    is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if is_embedding and getattr(module, "sparse", False) is True:
        what = f"{name} has sparse gradients"
        fix = "they are not averaged: build it with sparse=False"
        raise ModelError(what, where="model", fix=fix)
    if cut and getattr(module, "max_norm", None) is not None:
        what = (
            f"max_norm of {name} changes a weight in forward, which is lost if weights are sharded"
        )
        fix = "use ddp, or normalise in forward what it returns"
        raise ModelError(what, where="model", fix=fix)


def _require_trainable_parameter(
    name: str, parameter: nn.Parameter, cut: bool, deepspeed: bool
) -> None:
    """Raise ModelError for a parameter that cannot be trained."""
    if nn.parameter.is_lazy(parameter):
        what = "has no shape yet"
        fix = "give the layer its sizes, in place of a lazy one"
    elif parameter.is_complex():
        what = "is complex"
        fix = (
            "keep real and imaginary parts in a last dimension of 2,"
            " and call torch.view_as_complex in forward"
        )
    elif cut and parameter.ndim == 0:
        what = "has no dimension to shard it along"
        fix = "make it a vector of one: torch.ones(1); or use ddp"
    elif cut and not deepspeed and not parameter.is_contiguous():
        what = "is not contiguous"
        fix = "leave memory_format out of build, or use ddp"
    elif deepspeed and parameter._backward_hooks:
        what = "has a hook, and DeepSpeed keeps weights of its own"
        fix = "use fsdp2, or ddp"
    else:
        return
    raise ModelError(f"{name} {what}", where="model", fix=fix)


def require_same(model: nn.Module) -> None:
    """Raise ModelError if ranks have built different weights. Collective.

    That is so if `build` returns a module that was made earlier, without the run's seed.
    """
    if not dist.is_initialized():
        return
    checksums = {}
    for name, weight in model.named_parameters():
        # The bits as integers: their sum is exact, in any order, and a NaN equals itself.
        as_integers = weight.detach().reshape(-1).view(BITS[weight.itemsize])
        checksums[name] = int(as_integers.sum())
    of_all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, checksums)
    for name, checksum in checksums.items():
        is_same = all(of_rank.get(name) == checksum for of_rank in of_all_ranks)
        if not is_same:
            what = f"{name} is not the same on all ranks"
            fix = "make the module inside of build, which draws from the run's seed"
            raise ModelError(what, where="build", fix=fix)


def read_module(plan: Plan, run_dir: Path, which: str) -> tuple[Any, Path]:
    """Return the module with the weights of a checkpoint of a run, and the checkpoint.

    The module is in eval mode on the CPU. `which`: best, or last. Raises CheckpointError if the run
    has no checkpoint.
    """
    root = run_dir / "checkpoints"
    # None if the run has saved no checkpoint.
    if which == "best":
        checkpoint = best_or_latest(root)
    else:
        checkpoint = read_pointer(root, "latest")
    if checkpoint is None:
        raise CheckpointError("nothing was saved", where=str(run_dir))
    seed = derive(plan.config.run.seed, "weights")
    # Frozen weights are in no checkpoint. They are drawn again, on the CPU as the ranks did
    # (`ReplayedValues`, and `draw_device` in plan.plan).
    module, source = lay_out_module(own_build(plan), seed, "cpu")
    Values(source, "cpu", seed).fill(module)
    freeze(module, plan.config.model.freeze)
    check(checkpoint, verify=True, collective=False)
    load_tensors(checkpoint, canonical_tensors(module), collective=False)
    # What modules return from `get_extra_state` lies in the engine's part of a checkpoint.
    engine_state = read_state(checkpoint).get("engine", {})
    set_extra_states(module, engine_state.get("modules", {}))
    return module.eval(), checkpoint


def export_weights(plan: Plan, which: str) -> Path:
    """Write the module's state dict to RUN/export/model.safetensors, and return the folder.

    `which`: the best or the last checkpoint. Parameters and buffers of floats are written in
    `checkpoint.export_dtype`, unless that is auto.
    """
    folder = Path(plan.run_dir) / "export"
    module, _ = read_module(plan, folder.parent, which)
    dtype = plan.config.checkpoint.export_dtype
    if dtype != "auto":
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        module.to(types[dtype])
    folder.mkdir(exist_ok=True)
    # `save_model` writes tied weights once, which `save_file` refuses.
    save_model(module, str(folder / "model.safetensors"))
    return folder

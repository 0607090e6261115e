"""Ways of changing a model in place, applied in one order (see `native.prepare`):

activation checkpointing first, since it re-enters a block's forward; compile next, around the block as it will be run again;
the data-parallel wrapper last, around everything, so that it sees the parameters as they will be used.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from drumline.config.schema import CompileConfig
from drumline.config.strategies import DDPStrategy, FSDP2Strategy
from drumline.errors import PlanError
from drumline.models.blocks import blocks
from drumline.strategies.recompute import selective


def apply_activation_checkpointing(model: Any, kind: Literal["none", "selective", "full"]) -> None:
    """full: keep the input of each block, compute the rest again in backward (Chen et al. 2016). RNG is replayed, so dropout agrees.
    selective: keep more, see `recompute.selective`."""
    if kind == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise PlanError(
            f"{type(model).__name__} has no activation checkpointing",
            where="memory.activation_checkpointing",
            fix="set it to none, or use a smaller micro-batch",
        )
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": selective} if kind == "selective" else {})
    # Older transformers know it by the other name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def apply_compile(model: nn.Module, options: CompileConfig) -> None:
    """torch.compile each block in place (names of parameters stay): equal blocks share one compilation."""
    if not options.enabled:
        return
    for block in blocks(model) or [model]:
        block.compile(mode=options.mode)


def apply_fsdp2(
    module: nn.Module, model: nn.Module, options: FSDP2Strategy, mesh: DeviceMesh, param_dtype: torch.dtype | None
) -> FSDPModule:
    """Shard weights, gradients and moments (ZeRO-3, Rajbhandari et al. 2020), each parameter as a DTensor. `module` is the root.

    Each block is a unit of its own, the rest (embedding, last norm, head) belongs to the root. Gradients are averaged over all
    ranks of the mesh, in fp32 also where the weights are gathered in `param_dtype`.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = blocks(model)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    root = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + options.prefetch])  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(units[max(0, index - options.prefetch) : index][::-1])  # type: ignore[arg-type]
    return root


def apply_ddp(module: nn.Module, options: DDPStrategy, group: dist.ProcessGroup) -> DistributedDataParallel:
    """Replicate: gradients are averaged over the ranks of `group` while backward still runs (Li et al. 2020)."""
    # Named only where it is switched off: torch 2.13 warns about the name, and older ones know no other.
    buffers: dict[str, Any] = {} if options.broadcast_buffers else {"broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        **buffers,
    )
    # Its own clocks around each step's communication; 1 = every step.
    wrapped._set_ddp_runtime_logging_sample_rate(1)
    return wrapped

"""Ways of changing a model in place, applied in one order (see `native.prepare`):

activation checkpointing first, since it re-enters a block's forward; compile next, around the block as it will be run again;
the data-parallel wrapper last, around everything, so that it sees the parameters as they will be used.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drumline.core.config import CompileConfig
from drumline.core.plan import Plan
from drumline.core.strategies import DDPStrategy, FSDP2Strategy
from drumline.errors import PlanError
from drumline.models.blocks import blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATEN = torch.ops.aten
# Attention by its kernels on each device; the plain one is made of smaller operations, which are computed again.
ATTENTION = {
    getattr(_ATEN, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_ATEN, name)
}
PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}


def apply_activation_checkpointing(model: Any, kind: Literal["none", "selective", "full"]) -> None:
    """full: keep the input of each block, compute the rest again in backward (Chen et al. 2016). RNG is replayed, so dropout agrees.
    selective: keep more, see `selective`."""
    if kind == "none":
        return
    if not hasattr(model, "supports_gradient_checkpointing") and blocks(model):
        context: dict[str, Any] = {"context_fn": selective} if kind == "selective" else {}
        for block in blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **context)
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        what = f"{type(model).__name__} has no activation checkpointing"
        raise PlanError(what, where="memory.activation_checkpointing", fix="set it to none, or use a smaller micro-batch")
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": selective} if kind == "selective" else {})
    # Older transformers know it by the other name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def selective() -> tuple[Any, Any]:
    """Contexts of one checkpointed region: the results of attention and of every second matrix product are kept.

    Those cost most to compute again; of the products every second one is a fair trade for memory (as torchtitan has it). The
    products are counted alike in the forward and in the recomputation, so that both mean the same ones.
    """
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in PRODUCTS:
            seen[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_compile(model: nn.Module, options: CompileConfig) -> None:
    """torch.compile each block in place (names of parameters stay): equal blocks share one compilation."""
    if not options.enabled:
        return
    for block in blocks(model) or [model]:
        block.compile(mode=options.mode)


def gathered_in(options: FSDP2Strategy, precision: str, images: bool = False) -> torch.dtype | None:
    """The type in which FSDP2 gathers weights; None: that in which they are kept. A model of images gets its pixels in fp32, so its weights
    stay fp32 and autocast goes op by op."""
    if images and options.param_dtype == "auto":
        return None
    dtype = DTYPES[precision if options.param_dtype == "auto" else options.param_dtype]
    return None if dtype == torch.float32 else dtype


def casts(plan: Plan) -> bool:
    """Whether weights are gathered in a lower type than fp32."""
    options = plan.config.strategy
    return isinstance(options, FSDP2Strategy) and gathered_in(options, plan.precision, plan.config.images_alone) is not None


def apply_fsdp2(
    module: nn.Module, model: nn.Module, options: FSDP2Strategy, mesh: DeviceMesh, param_dtype: torch.dtype | None
) -> FSDPModule:
    """Shard weights, gradients and moments (ZeRO-3, Rajbhandari et al. 2020), each parameter as a DTensor. `module` is the root.

    Each block is a unit of its own, the rest (embedding, last norm, head) belongs to the root. Weights are gathered in `param_dtype`;
    gradients are averaged over all ranks of the mesh in `options.reduce_dtype`. The parameters may be on the meta device.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=DTYPES[options.reduce_dtype], cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload == "cpu" else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    units = blocks(model) if options.wrap is None else [m for m in model.modules() if type(m).__name__ in options.wrap]
    for unit in reversed(units):  # inner ones first: what they take is no part of the outer
        fully_shard(unit, reshard_after_forward=options.reshard_after_forward, **shared)
    root = fully_shard(module, reshard_after_forward=False, **shared)
    ahead = options.prefetch
    behind = ahead if options.backward_prefetch is None else options.backward_prefetch
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(units[max(0, index - behind) : index][::-1])  # type: ignore[arg-type]
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


def apply_dp(module: nn.Module, device: str) -> nn.Module:
    """nn.DataParallel: a module like `module` (a ForwardWithObjective on the first GPU) whose forward uses all GPUs of the machine from one
    process; on a CPU it does all rows itself. DDP is faster; this is for where only one process may be had.

    The rows of a batch are cut over the GPUs in equal runs, the weights copied to each, the sums added on the first. Where there are
    fewer rows than GPUs, some GPUs idle.
    """
    rows = _Rows(module)
    return _Scattered(nn.DataParallel(rows) if device == "cuda" else rows)


class _Scattered(nn.Module):
    """Batch in, sums out. nn.DataParallel cuts tensors alone, so a batch goes through it as a dict of its tensors."""

    def __init__(self, over_devices: nn.Module) -> None:
        super().__init__()
        self.over_devices = over_devices

    def forward(self, batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)}
        loss_sums, sums = self.over_devices(tensors, batch, objective)
        return loss_sums.sum(), {name: values.sum() for name, values in sums.items()}


class _Rows(nn.Module):
    """What each GPU does: its rows of the batch (`batch` gives what is not a tensor). Sums of shape [1], which are put end to end."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensors: dict[str, torch.Tensor], batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss_sum, sums = self.module(replace(batch, **tensors), objective)
        return loss_sum[None], {name: value[None] for name, value in sums.items()}

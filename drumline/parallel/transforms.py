"""Ways of changing a model in place, applied in one order (see `native.prepare`):

activation checkpointing first, since it re-enters a block's forward; compile next, around the block as it will be run again;
the data-parallel wrapper last, around everything, so that it sees the parameters as they will be used.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drumline.core.config import CompileConfig
from drumline.core.plan import Plan
from drumline.core.rules import NO_RECOMPUTING
from drumline.core.strategy import CopyOptions
from drumline.models.blocks import blocks
from drumline.parallel.batchnorm import batch_norms

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
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": selective} if kind == "selective" else {})
    if recomputed_by_blocks(model):
        for block in blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, **options)
        return
    # Older transformers know it by the other name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def recomputed_by_blocks(model: Any) -> bool:
    """Whether blocks are computed again one by one, not as the model's own class has it. Raises PlanError where neither can be."""
    by_blocks = not hasattr(model, "supports_gradient_checkpointing") and bool(blocks(model))
    if by_blocks and batch_norms(model):
        raise NO_RECOMPUTING.error("it runs a block twice, and a batch norm would count its samples twice")
    if not by_blocks and not getattr(model, "supports_gradient_checkpointing", False):
        raise NO_RECOMPUTING.error(f"{type(model).__name__} has no activation checkpointing")
    return by_blocks


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


def gathered_in(plan: Plan, plain: bool = False) -> torch.dtype | None:
    """The low type in which weights are gathered; None: they are used as they are kept. `plain`: any module, whose inputs may be fp32 as
    images are."""
    low = plan.config.strategy.gathered_in(plan.precision, plan.config.images_alone or plain)
    return None if low is None else DTYPES[low]


def apply_ddp(module: nn.Module, options: CopyOptions, group: dist.ProcessGroup) -> DistributedDataParallel:
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

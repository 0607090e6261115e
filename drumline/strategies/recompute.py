"""Which results of a block are kept, and which are computed again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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

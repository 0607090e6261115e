"""Options that a strategy has no word for, because the two cannot go together: the reason, and the nearest thing that can.

These are the combinations that cannot even be written down. What can be written and is refused for its numbers, its model
or its machine stands in `core.rules`.
"""

from __future__ import annotations

# (strategies, options, reason, instead); offload_cpu and offload_nvme stand for a strategy's own way of saying it.
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("single dp", "tp cp pp replicate", "it is one process, and there is nothing to spread over", "strategy={kind: ddp, …} or fsdp2"),
    ("single dp", "compression", "one process sends no gradients", "strategy=ddp"),
    ("single dp", "offload_cpu offload_nvme", "it keeps its state where it computes", "zero2 or zero3 with one process, which offload"),
    ("local_sgd diloco", "tp cp pp replicate", "each rank trains a whole model by itself between two exchanges", "fsdp2 with tp, cp or pp"),
    ("local_sgd diloco", "compression", "it sends weights once a period, not gradients each step", "a longer period"),
    ("local_sgd diloco", "offload_cpu offload_nvme", "each rank keeps a whole optimizer by itself", "zero2 with offload_optimizer"),
    ("zero1 zero2 zero3", "tp cp pp", "DeepSpeed cuts flat buffers, and knows nothing of matrices cut by DTensor or of stages",
     "fsdp2 with tp, cp or pp"),
    ("zero1 zero2", "replicate", "DeepSpeed has a second partition for ZeRO-3 only", "fsdp2 with replicate"),
    ("zero3", "replicate", "DeepSpeed calls it otherwise", "zeropp: {hierarchical_partition: N}, or fsdp2 with replicate"),
    ("zero1 zero2 zero3", "compression", "DeepSpeed reduces gradients itself, without hooks", 
     "zero3 with zeropp: {quantized_gradients: true}"),
    ("ddp", "replicate", "it holds a copy on each rank anyhow", "fsdp2 with replicate"),
    ("ddp tp cp pp model_parallel", "offload_cpu offload_nvme", "each rank keeps its part where it computes",
     "fsdp2 with offload=cpu (tp, cp and pp go with it), or zero3"),
    ("fsdp2", "offload_nvme", "torch offloads to host memory only", "fsdp2 with offload=cpu, or zero3 with offload_parameters"),
    ("fsdp2", "compression", "shards are reduced by reduce-scatter, which has no hooks", "reduce_dtype=bf16"),
    ("tp cp pp model_parallel", "replicate", "it holds copies of what is not cut anyhow",
     "a smaller degree; the other processes hold copies"),
    ("model_parallel", "tp cp pp", "it is the naive way, one stage at a time", "strategy={kind: ddp, pp: N, …}"),
    ("model_parallel", "compression", "only DDP has hooks for gradients", "strategy=ddp"),
)  # fmt: skip

NOT_TOGETHER: dict[tuple[str, str], tuple[str, str]] = {
    (kind, option): (reason, instead) for kinds, options, reason, instead in _ROWS for kind in kinds.split() for option in options.split()
}

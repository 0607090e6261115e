"""The constants of the estimates that no datasheet gives, each with its source or as fitted to published runs (benchmarks/planner_fit.py;
residuals: docs/benchmarks.md), and how far estimates may be from what is measured. Pure; the fit sets these names."""

from __future__ import annotations

from drumline.core.estimate import Ends
from drumline.core.plan import Layout
from drumline.core.rule import packed_bits

# Bytes that an eager block of 16 bits moves through the device's memory for each token and entry of the hidden width, forward and
# backward, besides the arithmetic of its products.
MOVED = 557.0
# Of these, the bytes that a compiled block does not move: of a Llama block Inductor's kernels move 128, eager ones 491 (counted).
FUSED = 363.0
# The part of MOVED_ADAPTED that a compiled block moves: 78 bytes of 181 in seven layers with adapters (counted of the same block).
ADAPTED_COMPILED = 78 / 181
# Kernels of a block, forward and backward, eager and compiled (counted of the same block, products and attention with the rest).
KERNELS, KERNELS_COMPILED = (38, 78), (19, 24)
# Seconds in which the blocks of a kind are compiled, forward and backward: a choice.
COMPILING = 60.0
# How often the time of large products by themselves those of a run take: other shapes, and a device whose clock falls under load.
PRODUCTS = 1.13
# How often the time of other products a device takes for the product that gives a weight's gradient, with all that trainable weights bring
# besides and no other line counts: adding up, casts, hooks.
WEIGHT_GRADIENTS = 2.7
# The same for each input and output of a layer with an adapter: casts, the factors' results, and their sum.
MOVED_ADAPTED = 7.17
# Bytes through the memory that unpacking a 4-bit entry is worth, each time: a kernel bound by its instructions.
UNPACKED = 24.3
# Seconds of a host for each module whose weights an engine gathers and lets go by hooks of its own, in each pass.
HOOK = 2.97e-04
# Seconds for each entry that all ranks of a host update on it, with what comes before and behind that there (norm, scaling, casts).
HOST_STEP = 2.55e-09
# The share of what an allocator has handed out beyond weights, gradients and moments (these lie still) that it reserves besides; and
# where weights are gathered and let go beside the computing, on streams of their own.
FRAGMENTS, FRAGMENTS_GATHERED = 0.0287, 0.177
# Tiles of 128 × 256 that a product's last wave, half empty, is worth: a quarter of 108 multiprocessors (NVIDIA's guide to matrix products).
# The power in which device and host add up, which wait for each other in turn: a choice.
TILES, BLEND = 27.0, 3.0

# On a CPU, fitted to runs of benchmarks/planner_runs.py: what the loop, the embedding, the head and autograd take besides, for a step and
# for a micro-batch, in blocks that are started (compute.STARTS). And seconds that a collective waits besides: the threads of ranks, gloo
# and autograd share the cores, so no two ranks come to it at once.
LOOP, WAIT = (6.5, 10.6), 4e-3

# Ends of measured / predicted, of memory and of seconds: where nine of ten rows of a group lay that the constants had not seen, of fewer
# than ten all, and at least as far as those of all groups; never without 1. Of tensor, context and pipeline parallelism there
# is no row: memory as full, which it is counted like (and CPU runs hold it so), seconds twice as far, a choice.
# A processor: runs of benchmarks/planner_runs.py, without and with `drumline calibrate`.
RANGES: dict[str, tuple[Ends, Ends]] = {
    "full": ((0.9, 1.37), (0.76, 1.34)),
    "LoRA": ((0.93, 1.15), (0.81, 1.12)),
    "QLoRA": ((0.8, 1.23), (0.8, 2.1)),
    "offload": ((0.54, 1.23), (0.8, 1.77)),
    "tp, cp or pp": ((0.9, 1.37), (0.52, 1.68)),
    "cpu": ((0.9, 1.1), (0.5, 2.0)),
    "cpu calibrated": ((0.9, 1.1), (0.8, 1.2)),
}
# Half of all published runs that the constants had not seen were nearer to their predicted seconds than this part of them
# (benchmarks/results/planner_published.json: the median of "left out").
SPEED_ERROR = 0.126
# After a trial of the plan itself: a choice.
PROBED: tuple[Ends, Ends] = (
    (0.97, 1.03),
    (0.95, 1.05),
)


def group_of(layout: Layout, calibrated: bool = False) -> str:
    """The group of RANGES that a layout belongs to."""
    if layout.device == "cpu":
        return "cpu calibrated" if calibrated else "cpu"
    if layout.strategy.offloads() != ("none", "none") or layout.config.optimizer.offload:
        return "offload"
    if not is_measured(layout):
        return "tp, cp or pp"
    return (
        "QLoRA"
        if packed_bits(layout.config)
        else "LoRA"
        if layout.config.adapter.kind == "lora"
        else "full"
    )


def is_measured(layout: Layout) -> bool:
    """Whether runs of this kind were published and compared with the planner: all but those by tensor, context or pipeline parallelism."""
    mesh = layout.mesh
    return mesh.tp * mesh.cp * mesh.pp == 1

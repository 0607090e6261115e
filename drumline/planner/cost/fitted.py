"""The constants of the estimates that no datasheet gives, and how far estimates are from measured runs.

Each constant has its source, or is fitted to published runs (benchmarks/planner_fit.py, which sets
these names; residuals: docs/explanations/benchmarks.md). Pure.
"""

from __future__ import annotations

from drumline.plan.estimate import Interval
from drumline.plan.plan import Layout
from drumline.plan.rule import packed_bits

# MOVED, PRODUCTS, UNPACKED and HOOK are also keys of benchmarks/results/planner_published.json.

# Bytes that an eager block in a precision of 16 bits moves through the device's memory, for each
# token and entry of the hidden width, forward and backward together, besides its matrix products.
MOVED = 563.0
# How many fewer of these bytes a compiled block moves. Inductor's kernels of a Llama block move 128
# bytes, and eager kernels 491 (counted).
BYTES_SAVED_BY_COMPILING = 363.0
# How many of these a mixture of experts moves nevertheless, if its experts stay eager (ep). They are
# those of SiLU(gate) × up in the counted block, 3.5 times as wide as its hidden states: 35 bytes
# forward and 63 backward eager, 21 and 35 compiled, in 16 bits.
BYTES_OF_EAGER_EXPERTS = 42.0
# The share of MOVED_ADAPTED that a compiled block moves: 78 bytes of 181 in seven layers with adapters
# (counted in the same block).
ADAPTED_COMPILED = 78 / 181
# Kernels of a block, (forward, backward), eager and compiled, products and attention included (counted
# in the same block).
KERNELS = (38, 78)
KERNELS_COMPILED = (19, 24)
# Seconds in which the blocks of a kind are compiled, forward and backward: a choice.
COMPILING = 60.0
# A factor of time: of matrix products in a run over that of large products alone. A run has other
# shapes, and the clock of a device falls under load.
PRODUCTS = 1.24
# The same factor once more, for devices whose clock falls further under load
# (hardware.catalog.POWER_LIMITED).
POWER_LIMITED = 1.13
# What MOVED is for a block, for each input and output of a layer with an adapter: casts, the results
# of the factors, and their sum.
MOVED_ADAPTED = 6.41
# Dequantising a 4-bit entry takes as long as moving this many bytes. Its kernel is bound by its
# instructions, not by memory.
UNPACKED = 23.1
# Seconds of a host in each pass, for each module whose weights an engine gathers and frees by hooks of
# its own.
HOOK = 3.16e-04
# Seconds for each entry that all ranks of a host update on the host, including what comes before and
# after (norm, scaling, casts).
HOST_STEP = 6.23e-10
# Bytes that an allocator reserves besides those in use, as a share of the bytes in use without weights,
# gradients and moments, which lie still. GATHERED: weights are gathered and freed on streams of their
# own beside the computing.
FRAGMENTS = 0.0304
FRAGMENTS_GATHERED = 0.248
# A product's last wave of tiles is half empty, which takes as long as this many tiles more: a quarter
# of 108 multiprocessors (NVIDIA's guide to matrix products). A tile has 128 × 256 outputs.
TAIL_WAVE_TILES = 27.0
# Device and host wait for each other in turn; their seconds are added up in this power. A choice.
BLEND = 3.0

# On a CPU, fitted to runs of benchmarks/planner_runs.py: what the loop, the embedding, the head and
# autograd take, for a step and for a micro-batch, in blocks that are started (compute.START_SECONDS).
LOOP = (6.5, 10.6)
# Seconds that a collective waits on a CPU. The threads of ranks, gloo and autograd share the cores, so
# no two ranks come to it at once.
WAIT = 4e-3

# The range of measured over predicted, as (lower, upper) factors: of memory, and of seconds. Nine
# of ten runs of a group that the constants had not seen were within this range. In groups of fewer
# than ten runs, all were, and their range is at least as wide as that of all groups. Of tensor and
# context parallelism there are three runs, of mixtures of experts one, which took twice as long as
# predicted; these two are full training, so their range is at least as wide as that of `full`, too.
# Those of a CPU are of benchmarks/planner_runs.py, without and with `drumline calibrate`.
RANGES: dict[str, tuple[Interval, Interval]] = {
    "full": ((0.85, 1.42), (0.86, 1.51)),
    "LoRA": ((0.93, 1.15), (0.8, 1.02)),
    "QLoRA": ((0.81, 1.21), (0.81, 1.96)),
    "offload": ((0.58, 1.21), (0.81, 2.1)),
    "tp, cp or pp": ((0.83, 1.42), (0.7, 1.96)),
    "mixture": ((0.83, 1.42), (0.81, 2.44)),
    "cpu": ((0.9, 1.1), (0.5, 2.0)),
    "cpu calibrated": ((0.9, 1.1), (0.8, 1.2)),
}
# The median error of predicted seconds, over published runs that the constants had not seen
# (benchmarks/results/planner_published.json, "left out").
SPEED_ERROR = 0.089
# After a trial of the plan itself: a choice.
PROBED: tuple[Interval, Interval] = (
    (0.97, 1.03),
    (0.95, 1.05),
)


def group_of(layout: Layout, calibrated: bool = False, is_mixture: bool = False) -> str:
    """Return the group of RANGES to which a layout belongs.

    `calibrated`: the operators of a block were measured on this machine.
    `is_mixture`: the model is a mixture of experts.
    """
    if layout.device == "cpu":
        if calibrated:
            return "cpu calibrated"
        return "cpu"
    if layout.strategy.offloads() != ("none", "none") or layout.config.optimizer.offload:
        return "offload"
    if is_mixture:
        return "mixture"
    if not is_measured(layout):
        return "tp, cp or pp"
    if packed_bits(layout.config):
        return "QLoRA"
    if layout.config.adapter.kind == "lora":
        return "LoRA"
    return "full"


def is_measured(layout: Layout) -> bool:
    """Return whether enough published runs of this kind were compared with the planner.

    There are three of tensor and context parallelism, and none of a pipeline.
    """
    mesh = layout.mesh
    return mesh.tp * mesh.cp * mesh.pp == 1

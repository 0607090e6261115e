"""What optimizers keep and send of a weight, in bytes. All functions are pure."""

from __future__ import annotations

import math

from drumline.config.optimizer import QUANTISED_STATES, OptimizerConfig
from drumline.hardware.cluster import Collective
from drumline.plan.facts import Weight

# Bytes of an entry in fp32.
FP32_BYTES = 4
# The fewest entries of a part whose moments are quantised. torchao keeps those of smaller parts in fp32.
SMALLEST_QUANTIZED = 4096


def moment_bytes(options: OptimizerConfig, weight: Weight, here: int, low: int = 0) -> int:
    """Return the bytes of the optimizer's states of a weight of which a rank has `here` entries.

    A count of steps (4 bytes) is left out. Quantised states have codes, scales, and a table of the
    codes' values in fp32.
    `low`: the bytes of the states of an entry if they are in bf16; otherwise 0.
    """
    if low:
        return low * here
    if options.kind == "muon":
        slots = 1 if _takes_muon(weight) else 2
        return FP32_BYTES * here * slots
    if options.kind == "adafactor" and len(weight.shape) > 1:
        *ahead, rows, columns = weight.shape
        return FP32_BYTES * math.prod(ahead) * (rows + columns)
    bits, block = QUANTISED_STATES.get(options.kind, (0, 1))
    if not bits or here < SMALLEST_QUANTIZED or here % block:
        return FP32_BYTES * options.states_per_parameter * here
    codes = here * bits // 8
    scales = FP32_BYTES * (here // block)
    table = FP32_BYTES * 2**bits
    return options.states_per_parameter * (codes + scales + table)


def optimizer_exchange(
    options: OptimizerConfig, weight: Weight, here: int, axes: int
) -> tuple[Collective, int]:
    """Return the collective by which an optimizer step exchanges one weight, and its bytes.

    The weight is sharded along `axes` axes of the mesh, and a rank has `here` entries of it. Muon
    sends bf16 shards to the rank that owns the matrix and back, or gathers them on all ranks.
    Adafactor sums over rows and columns, and two norms.
    """
    if options.kind == "muon" and _takes_muon(weight):
        if axes == 1:
            return "all_to_all", 2 * 2 * here
        return "all_gather", 2 * here
    if options.kind == "adafactor":
        sums = 0
        if len(weight.shape) > 1:
            sums = moment_bytes(options, weight, here)
        return "all_reduce", 2 * FP32_BYTES + sums
    return "all_reduce", 0


def _takes_muon(weight: Weight) -> bool:
    """Return whether Muon steps this weight: a matrix of a block."""
    return weight.position == "block" and len(weight.shape) == 2

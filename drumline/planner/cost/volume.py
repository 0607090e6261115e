"""Bytes that leave a rank, added up by kind of collective; and what each rank holds of a model. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from drumline.core.estimate import Traffic
from drumline.core.facts import COLUMNS_CUT, ROWS_CUT, ModelFacts, Weight

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
Axis = Literal["pp", "replicate", "shard", "cp", "tp", "gradients"]  # gradients: replicate × shard × cp; shard: with cp
Beside = Literal["forward", "backward", "last", "nothing"]
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes


class Flow(NamedTuple):
    """`bytes_` that a rank sends in one step by collectives of one `kind`, in `calls` of them, among `ranks` of one `axis` of the mesh.
    `beside`: what is computed meanwhile: a forward, a backward, the backward of the last micro-batch, or nothing."""

    kind: Kind
    bytes_: float
    ranks: int
    axis: Axis
    calls: float
    beside: Beside


# Bytes that leave each of n ranks in the ring algorithm, as `telemetry.traffic` has them: of what a rank has, of a reduce-scatter the
# whole.
SHARES: dict[Kind, Callable[[float, int], float]] = {
    "all_reduce": lambda bytes_, n: bytes_ * 2 * (n - 1) / n,
    "all_gather": lambda bytes_, n: bytes_ * (n - 1),
    "reduce_scatter": lambda bytes_, n: bytes_ * (n - 1) / n,
    "all_to_all": lambda bytes_, n: bytes_ * (n - 1) / n,
    "broadcast": lambda bytes_, n: bytes_ * (n - 1) / n,
    "p2p": lambda bytes_, n: bytes_,
}


@dataclass
class Volume:
    """All flows of a step. `part`: the share of the ranks that makes the next calls; `axis`, `calls` and `beside`: see Flow."""

    part: float = 1.0
    flows: list[Flow] = field(default_factory=list)

    def add(self, kind: Kind, bytes_: float, ranks: int, axis: Axis, calls: float = 1, beside: Beside = "nothing") -> None:
        if ranks > 1 and bytes_:
            self.flows.append(Flow(kind, self.part * SHARES[kind](bytes_, ranks), ranks, axis, self.part * calls, beside))

    def traffic(self) -> Traffic:
        """All of it, by kind of collective."""
        sums = Counter[str]()
        for flow in self.flows:
            sums[flow.kind] += flow.bytes_  # type: ignore[assignment]
        return Traffic(**sums)


def share(length: int, ranks: int, rank: int) -> int:
    """The rows of a rank, out of `length`, as DTensor's Shard splits them: the last ranks have fewer."""
    each = -(-length // ranks)
    return max(0, min(each, length - rank * each))


def cut_dimension(weight: Weight) -> int | None:
    """The dimension that tensor parallelism cuts; None: each rank has the whole."""
    if weight.style in (*ROWS_CUT, "embedding", "head"):
        return 0 if weight.shape else None
    return 1 if weight.style in COLUMNS_CUT and len(weight.shape) > 1 else None


@lru_cache(maxsize=4096)
def cut_weights(facts: ModelFacts, staged: bool, tp: int, rank: int, shards: int, wrap: tuple[str, ...] | None) -> Counter[str]:
    """Entries of the model on rank `rank` of `tp`. `units`, `root`: FSDP2's shards, filled up, of what is gathered by blocks and of the
    rest; `…_trainable`: of these, of trainable weights, `…_low`: of frozen ones of two dimensions and more. `trainable`: without FSDP2's
    cut; `tied`: of these, on both ends. And numbers of trainable weights: `tensors`; `cut`, `uncut` by tensor parallelism.

    `staged`: of all stages of a pipeline together. `wrap`: classes whose modules FSDP2 gathers by themselves; None: the model's own
    blocks."""
    sums = Counter[str]()
    for weight, number in weights_of(facts, staged):
        shape = list(weight.shape)
        if tp > 1 and (cut := cut_dimension(weight)) is not None:
            shape[cut] = share(shape[cut], tp, rank)
        whole = math.prod(shape)
        part = whole if not shape else -(-shape[0] // shards) * math.prod(shape[1:])
        is_unit = weight.place == "block" if wrap is None else any(owner in wrap for owner in weight.owners)
        sums["units" if is_unit else "root"] += number * part
        if weight.trainable:
            sums["units_trainable" if is_unit else "root_trainable"] += number * part
            sums["trainable"] += number * whole
            sums["tensors"] += number
            sums["tied"] += number * whole if weight.place == "both" else 0
            sums["cut" if tp > 1 and cut_dimension(weight) is not None else "uncut"] += 1
        elif len(shape) >= 2:
            sums["units_low" if is_unit else "root_low"] += number * part
    return sums


@lru_cache(maxsize=4096)
def weights_of(facts: ModelFacts, staged: bool = False) -> tuple[tuple[Weight, int], ...]:
    """The weights of a model, and the number of equal ones of each; `staged`: tied ones are on both ends of a pipeline. Where only their
    number is known, one of that size."""
    some = [(weight, number) for block, number in facts.kinds_of_blocks for weight in block]
    some += [(weight, 2 if staged and weight.place == "both" else 1) for weight in facts.end_weights]
    return tuple(some) or ((Weight("trainable", (facts.trainable,)), 1), (Weight("frozen", (facts.frozen,), trainable=False), 1))


@lru_cache(maxsize=4096)
def tp_ranks(facts: ModelFacts, tp: int) -> tuple[tuple[int, float], ...]:
    """The ranks whose parts differ in size, and the share of ranks like each: one for all where everything divides."""
    even = all(cut is None or w.shape[cut] % tp == 0 for w, _ in weights_of(facts) for cut in (cut_dimension(w),))
    return ((0, 1.0),) if even else tuple((rank, 1 / tp) for rank in range(tp))

"""The planner's estimate of one layout: memory, seconds and bytes sent, and whether it fits.

`planner.cost.times` computes the values; here they are only added up and compared.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal

from pydantic import Field

from drumline.config.section import Frozen

# A lower and an upper bound.
Interval = tuple[float, float]
# Bytes of a process that has imported torch, transformers and DeepSpeed. 349 MiB were resident on a
# CPU; the bytes of CUDA's libraries are not known.
PROCESS = 400 * 2**20
# Nine of ten runs are within the interval of an estimate, so one in twenty is above it.
ABOVE_UPPER_END = 1 / 20


class Memory(Frozen):
    """Bytes on the rank that holds most.

    `parameters` and `optimizer` are there between steps, and `gradients` at the end of backward. The
    other categories are those at the peak, which is in `phase`. `peak` counts tensors, as torch's
    max_memory_allocated does.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int = Field(
        description="Gathered weights, buffers of reductions and communication, copies in a step."
    )
    overhead: int = Field(
        description="Memory outside of torch's allocator: CUDA's context, kernels, communicators."
    )
    peak: int
    reserved: int = Field(
        description="Bytes that must fit: what the allocator holds at the peak, fragmentation included, plus `overhead`."
    )
    phase: Literal[
        "teacher", "first_pass", "forward", "loss", "backward", "clip", "step", "rollout"
    ]
    phases: dict[str, int] = Field(
        default_factory=dict,
        description="The peak of each part of the step; backward has three: at the head, through the blocks, at its end.",
    )


class HostMemory(Frozen):
    """Bytes of all ranks of a host together, at the peak of each part of a run.

    `load`: while weights are loaded. `train`: in training. `save`: while a checkpoint is saved.
    `export`: while rank 0 exports the model at the end.
    """

    load: int
    train: int
    save: int
    export: int = 0

    @property
    def most(self) -> int:
        """The largest of all four."""
        return max(self.running, self.export)

    @property
    def running(self) -> int:
        """The largest without the export, which `drumline export` can do later and elsewhere."""
        return max(self.load, self.train, self.save)


class Traffic(Frozen):
    """Bytes that a rank sends in one optimizer step, by kind of collective.

    They are means over the ranks. `telemetry.traffic` measures the same quantities.
    """

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_to_all: float = 0.0
    p2p: float = 0.0
    broadcast: float = 0.0

    @property
    def total(self) -> float:
        """The bytes of all collectives."""
        return (
            self.all_reduce
            + self.all_gather
            + self.reduce_scatter
            + self.all_to_all
            + self.p2p
            + self.broadcast
        )


class Seconds(Frozen):
    """Seconds of one optimizer step.

    `communication` is only the part that computation does not hide. `forward` is the part of
    `compute` before backward; None in an estimate of an older version.
    """

    compute: float
    communication: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    rollout: float = 0.0
    forward: float | None = None

    @property
    def total(self) -> float:
        """The seconds of the whole step."""
        return (
            self.compute
            + self.communication
            + self.bubble
            + self.optimizer
            + self.offload
            + self.rollout
        )


class Estimate(Frozen):
    """The whole estimate of a layout.

    `tokens_per_s`: of all devices together. `mfu`: the share of the devices' datasheet rate that
    model FLOPs take; None if the rate is not known.
    """

    memory: Memory
    host: HostMemory
    traffic: Traffic
    seconds: Seconds
    startup: float = Field(0.0, description="Seconds that compiling takes before the first step.")
    tokens_per_s: float
    mfu: float | None
    limit: int = Field(description="Bytes of a device's memory.")
    host_limit: int | None = None
    host_assumed: bool = Field(
        False,
        description="`host_limit` is assumed: what such machines usually have. Then the export at the end may need more.",
    )
    calibrated: bool = Field(
        False,
        description="Seconds are based on rates that `drumline calibrate` measured; otherwise on datasheets.",
    )
    memory_range: Interval = Field(
        (1.0, 1.0),
        description="Interval of `memory.reserved`, as multiples of it: nine of ten such runs were within (planner.cost.fitted).",
    )
    seconds_range: Interval = Field(
        (1.0, 1.0),
        description="Interval of the seconds of a step, as multiples of the estimate.",
    )

    @property
    def host_fits(self) -> bool:
        """Whether the ranks of a host fit into the host's memory.

        The export at the end does not count if `host_limit` is assumed.
        """
        if self.host_limit is None:
            return True
        needs = self.host.running if self.host_assumed else self.host.most
        return needs <= self.host_limit

    @property
    def needs(self) -> Interval:
        """The interval of the bytes that the run needs on a device."""
        low, high = self.memory_range
        return low * self.memory.reserved, high * self.memory.reserved

    @property
    def verdict(self) -> Literal["fits", "tight", "no"]:
        """Whether the run fits into memory.

        fits: the upper bound of `needs` fits, too. tight: the estimate fits, its upper bound does not.
        no: the estimate does not fit, or the host has too little memory.
        """
        if not self.host_fits or self.memory.reserved > self.limit:
            return "no"
        return "fits" if self.needs[1] <= self.limit else "tight"

    @property
    def risk(self) -> float:
        """The chance that a device runs out of memory: 0 if the verdict is fits, 1 if it is no.

        For a tight plan it is that of a log-normal distribution through two points: half of all runs
        need more than the estimate, and one in twenty needs more than its upper bound.
        """
        if self.verdict == "fits":
            return 0.0
        if self.verdict == "no":
            return 1.0
        upper_end = self.memory_range[1]
        deviation = math.log(upper_end) / NormalDist().inv_cdf(1 - ABOVE_UPPER_END)
        room = math.log(self.limit / self.memory.reserved)
        return 1 - NormalDist().cdf(room / deviation)


class Activations(Frozen):
    """Bytes of activations for each token of a micro-batch, of the whole model on one rank.

    They depend on a layout's length, precision, checkpointing, adapter and tensor parallelism.
    Tokens are rows × length; under context parallelism, those of this rank's part. Gradients of
    weights do not count.

    With n blocks, the bytes of a token at different moments are:
        n × saved_block + saved_ends when the objective begins;
        k × saved_block + live_forward at the peak of block k (1 … n) in forward;
        k × saved_block + live_backward at the peak of block k in backward;
        n × saved_block + saved_ends + live_loss at the peak of the objective;
        n × saved_block + saved_ends + live_loss_backward at the peak of its backward.
    So live_forward and live_backward include saved_ends.
    """

    saved_block: float = Field(description="Kept by a block from its forward to its backward.")
    saved_ends: float = Field(
        description="Kept outside of the blocks: of the embedding, the last norm and the head's input, without logits."
    )
    live_forward: float = Field(
        description="Besides what this block and those before it keep, while a block computes forward."
    )
    live_backward: float = Field(
        description="The same while a block computes backward, recomputation included."
    )
    live_loss: float | None = Field(
        None,
        description="Besides all that is kept, while the objective computes; None: not traced.",
    )
    live_loss_backward: float | None = Field(
        None, description="The same in the objective's backward, before that of the blocks."
    )
    copies: tuple[int, int] | None = Field(
        None,
        description="Bytes, not by token, of weights in lower precision that autocast caches in forward: (of each block, of all outside "
        "of the blocks). The second may be negative, if the first block has fewer than the others. None: not traced.",
    )
    copies_kept: tuple[int, int] = Field(
        (0, 0), description="Bytes of `copies` that are cached until backward."
    )
    offloaded: float = Field(
        0.0,
        description="Bytes of a token that each block but the last two moves to host memory.",
    )
    source: Literal["formula", "trace"] = "formula"

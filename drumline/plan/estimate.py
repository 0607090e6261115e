"""The planner's estimate of one layout: memory, seconds and bytes sent, and whether it fits.

These are values without computation; `planner.cost.times` computes them.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal

from pydantic import Field

from drumline.config.section import Frozen

Ends = tuple[float, float]
# Bytes of a process that has imported torch, transformers and DeepSpeed: 349 MiB were resident on a
# CPU. What CUDA's libraries add is not known.
PROCESS = 400 * 2**20
# Nine of ten runs are between the ends of an estimate, so one in twenty is above the upper end.
ABOVE_UPPER_END = 1 / 20


class Memory(Frozen):
    """Bytes on the rank that holds most.

    Parameters, gradients and the optimizer's state exist between steps (gradients: at the end of
    backward). The other categories come on top of them at the peak, which is in `phase`. `peak`
    counts tensors, as torch's allocator does (max_memory_allocated).
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int = Field(
        description="Gathered weights, reduction and communication buffers, copies of a step."
    )
    overhead: int = Field(
        description="What torch does not own: context, kernels, communicators' memory."
    )
    peak: int
    reserved: int = Field(
        description="What the allocator holds at the peak, fragmentation included, plus `overhead`: what must fit."
    )
    phase: Literal["forward", "loss", "backward", "clip", "step", "rollout"]
    phases: dict[str, int] = Field(
        default_factory=dict,
        description="The peak of each part of the step; backward has three: at the head, through the blocks, at its end.",
    )


class HostMemory(Frozen):
    """Bytes of all ranks of a host together.

    `load`: while weights are loaded. `train`: while it trains. `save`: while it saves. `export`:
    while rank 0 exports the model.
    """

    load: int
    train: int
    save: int
    export: int = 0

    @property
    def most(self) -> int:
        """The most at any time."""
        return max(self.running, self.export)

    @property
    def running(self) -> int:
        """The most before the end of the run, without the export.

        `drumline export` can do that later and elsewhere.
        """
        return max(self.load, self.train, self.save)


class Traffic(Frozen):
    """Bytes that a rank sends in one optimizer step, by kind of collective.

    They are means over the ranks, and counted as `telemetry.traffic` counts them.
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

    `communication` is only the part that computation does not hide.
    """

    compute: float
    communication: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    rollout: float = 0.0

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
        description="`host_limit` is what such machines usually have; then the export at the end may be above it.",
    )
    calibrated: bool = Field(
        False,
        description="Seconds are by rates that `drumline calibrate` measured; otherwise by datasheets.",
    )
    memory_range: Ends = Field(
        (1.0, 1.0),
        description="Ends of what is reserved, as multiples of the estimate: nine of ten such runs lay between them (planner.cost.fitted).",
    )
    seconds_range: Ends = Field(
        (1.0, 1.0),
        description="The same of the seconds of a step.",
    )

    @property
    def host_fits(self) -> bool:
        """Whether the ranks of a host fit into its memory.

        If that memory is assumed, the export at the end does not count.
        """
        if self.host_limit is None:
            return True
        needs = self.host.running if self.host_assumed else self.host.most
        return needs <= self.host_limit

    @property
    def needs(self) -> Ends:
        """The bytes of a device that the run needs, at both ends of the estimate."""
        low, high = self.memory_range
        return low * self.memory.reserved, high * self.memory.reserved

    @property
    def verdict(self) -> Literal["fits", "tight", "no"]:
        """Whether the run fits into memory.

        fits: even if it needs the upper end of the estimate. tight: if it needs what is estimated.
        no: not even then, or the host has too little memory.
        """
        if not self.host_fits or self.memory.reserved > self.limit:
            return "no"
        return "fits" if self.needs[1] <= self.limit else "tight"

    @property
    def risk(self) -> float:
        """The chance that a device runs out of memory: 0 if the verdict is fits, 1 if it is no.

        A tight plan gets the chance of a log-normal distribution through two points: half of all
        runs need more than the estimate, and one in twenty needs more than its upper end.
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

    They hold for a layout's length, precision, checkpointing, adapter and tensor parallelism.
    Tokens are rows × length; under context parallelism, those of this rank's part. Gradients of
    weights do not count.

    When the objective begins, n × saved_block + saved_ends are kept, for n blocks. live_forward and
    live_backward come on top of what is kept of the blocks up to the one that computes, and include
    the ends. live_loss and live_loss_backward come on top of all that is kept.
    """

    saved_block: float = Field(description="Kept from a block's forward to its backward.")
    saved_ends: float = Field(
        description="The same of embedding, last norm and head's input; logits are not counted."
    )
    live_forward: float = Field(
        description="On top of what is saved, while a block computes forward."
    )
    live_backward: float = Field(
        description="The same while it computes backward, recomputation included."
    )
    live_loss: float | None = Field(
        None, description="On top of what is saved, while the objective computes; None: not traced."
    )
    live_loss_backward: float | None = Field(
        None, description="The same in its backward, before any block's."
    )
    copies: tuple[int, int] | None = Field(
        None,
        description="Bytes, not by token, of (a block, the ends; what the first block has less is taken off): weights in a lower "
        "precision that autocast holds in forward. None: not traced.",
    )
    copies_kept: tuple[int, int] = Field(
        (0, 0), description="Of these, what is there until backward."
    )
    offloaded: float = Field(
        0.0,
        description="Bytes of a token that a block moves to host memory (the last two keep theirs).",
    )
    source: Literal["formula", "trace"] = "formula"

"""What a run was predicted to need and what it took, by category. Pure.

`telemetry.measure` fills a Measurement in, which is the event `measured`; `compare` compares it with the Estimate of plan.json.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from drumline.core.estimate import Estimate, Frozen
from drumline.core.explain import size

OFF = 0.15  # of the prediction: beyond it, a category is warned of
NARROW = (
    0.75  # of the planned tokens: below it, a peak scaled to them is too rough to be compared with
)
SMALL = 2**30  # bytes: of less it is bytes that count, no share
# Of a host's memory, for each rank: the interpreter, the libraries and what malloc keeps back are a few hundred MiB that no plan counts.
HOST_SLACK = 2**29
MEMORY = ("parameters", "gradients", "optimizer", "peak", "reserved")


class Measurement(Frozen):
    """What was measured so far; what could not be is left out (of a dict) or null."""

    step: int = Field(description="Steps done.")
    final: bool = Field(
        description="At the end of the run; before it, as soon as a step was counted and some were timed."
    )
    by: Literal["allocator", "tracker"] | None = Field(
        description="What saw the peak: torch's allocator on a GPU, over the whole run; on a CPU a tracker of tensors, in one step."
    )
    memory: dict[str, int] = Field(
        description="Bytes on the fullest rank (of a pipeline, the most on any of the stage with the highest peak): parameters, gradients,"
        " optimizer, peak; on a GPU reserved too."
    )
    by_rank: dict[str, list[int]] = Field(description="The same of each rank.")
    host: dict[str, int] = Field(
        description="Bytes: resident sets of a host's ranks at their largest, added up, of the fullest host: load, train (until the"
        " first save), save (from then on). Libraries that ranks share count once for each."
    )
    ranks_per_host: int = Field(description="Ranks of the fullest host.")
    seconds: dict[str, float] = Field(
        description="Of a step, the slowest rank's median over the timed ones: total (without waiting for data), data, communication"
        " (waiting for other ranks, where it is measured), optimizer (on a CPU), counted (the one step under the tracker)."
    )
    phases: dict[str, list[float]] = Field(
        default_factory=dict,
        description="Phase → seconds of each rank in it since the rank began, by the host's clock: on a GPU, whose work is queued, its time"
        " is in the phase that waits for it. Empty where no launcher watches the ranks.",
    )
    timed: int = Field(
        description="Steps that were timed: all but the first two and the counted one."
    )
    traffic: float | None = Field(
        description="Bytes that a rank sends in a step, mean over ranks and over the steps of a long run."
    )
    grows: bool = Field(False, description="What is sent grows with the tokens of a micro-batch.")
    width: float = Field(
        description="Tokens of the widest micro-batch where the peak was seen, as a part of those that were planned for."
    )


class Comparison(Frozen):
    """One category. `off`: measured / predicted − 1, inf where nothing was predicted. `note`: why it is shown, but not warned of."""

    category: str
    unit: Literal["bytes", "s"]
    predicted: float
    measured: float
    note: str = ""
    slack: float = Field(
        0.0, description="A smaller difference, in the same unit, is nothing to speak of."
    )

    @property
    def off(self) -> float:
        return (
            self.measured / self.predicted - 1
            if self.predicted
            else math.inf
            if self.measured
            else 0.0
        )

    @property
    def warns(self) -> bool:
        return (
            not self.note
            and abs(self.off) > OFF
            and abs(self.measured - self.predicted) > self.slack
        )

    def line(self) -> str:
        """`peak: predicted 1.20 GiB, measured 1.50 GiB, 25% more`"""
        return f"{self.category}: predicted {self.show(self.predicted)}, measured {self.show(self.measured)}, {self.by_how_much()}"

    def show(self, value: float) -> str:
        return size(value) if self.unit == "bytes" else f"{value:.3g} s"

    def by_how_much(self) -> str:
        """`12% more`, `as predicted`, `37 times as much`."""
        off = self.off
        if abs(off) < 5e-5:
            return "as predicted"
        if math.isinf(off):
            return "none predicted"
        if off > 9:
            return f"{1 + off:.0f} times as much"
        return f"{abs(off) * 100:.{0 if abs(off) >= 0.1 else 2}f}% {'more' if off > 0 else 'less'}"


def compare(estimate: Estimate, measured: Measurement) -> list[Comparison]:
    """A comparison for each category that both know."""
    memory, seconds = estimate.memory, estimate.seconds
    predicted: dict[str, float] = {name: getattr(memory, name) for name in MEMORY}
    # The tracker follows steps; what is sampled between them only an allocator sees.
    steps = [bytes_ for phase, bytes_ in memory.phases.items() if phase != "rollout"]
    peak, grows = memory.peak, memory.activations + memory.logits
    if memory.phase == "rollout" and steps and measured.by == "tracker":
        peak = max(steps)
        grows = max(0, peak - memory.parameters - memory.gradients - memory.optimizer)
    # What grows with the tokens of a micro-batch is planned for the longest rows; shorter ones came.
    spared = grows * max(0.0, 1.0 - measured.width)
    predicted |= {"peak": peak - spared, "reserved": memory.reserved - memory.overhead - spared}
    narrow = {"peak": memory.peak, "reserved": memory.reserved} if measured.width < NARROW else {}
    rows = []
    for name, value in measured.memory.items():
        note = "rows were much shorter than planned" if value <= narrow.get(name, -1) else ""
        rows.append(
            Comparison(
                category=name,
                unit="bytes",
                predicted=predicted[name],
                measured=value,
                note=note,
                slack=OFF * SMALL,
            )
        )
    slack = float(HOST_SLACK * measured.ranks_per_host)
    for phase, value in measured.host.items():
        planned = getattr(estimate.host, phase)
        rows.append(
            Comparison(
                category=f"host {phase}",
                unit="bytes",
                predicted=planned,
                measured=value,
                slack=slack,
            )
        )
    if measured.traffic is not None:
        less = measured.grows and measured.traffic < estimate.traffic.total
        note = "rows may be shorter than planned, and what is sent grows with them" if less else ""
        rows.append(
            Comparison(
                category="traffic",
                unit="bytes",
                predicted=estimate.traffic.total,
                measured=measured.traffic,
                note=note,
            )
        )
    rate = (
        ""
        if estimate.calibrated
        else "the rates of this machine are not measured: `drumline calibrate`"
    )
    parts = {
        "total": seconds.total - seconds.rollout,
        "communication": seconds.communication,
        "optimizer": seconds.optimizer,
    }
    for name in [name for name in parts if name in measured.seconds]:
        note = rate or ("" if name == "total" else "a part of the step's seconds")
        category = "seconds" if name == "total" else f"seconds, {name}"
        rows.append(
            Comparison(
                category=category,
                unit="s",
                predicted=parts[name],
                measured=measured.seconds[name],
                note=note,
            )
        )
    return rows


def notes(measured: Measurement) -> list[str]:
    """What is missing, and why."""
    remarks = []
    if not measured.memory:
        remarks.append("too short to be measured: a step is counted after the first two")
    elif measured.by == "tracker" and measured.width < 1.0:
        remarks.append(
            f"the peak was seen at {measured.width:.0%} of the planned tokens of a micro-batch; predicted is scaled to them"
        )
    if measured.memory and not measured.timed:
        remarks.append("too short to be timed: seconds are those of steps after the counted one")
    if measured.by == "tracker" and measured.timed and "counted" in measured.seconds:
        remarks.append(
            f"the counted step took {measured.seconds['counted']:.3g} s, the others {measured.seconds['total']:.3g} s"
        )
    return remarks

"""Compare what a run took with its plan's prediction, by category, in pure functions.

`telemetry.measure` fills in a Measurement, which is the event `measured`. `compare` compares it
with the Estimate of plan.json.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from drumline.config.section import Frozen
from drumline.plan.estimate import Estimate
from drumline.plan.explain import size

# A category that differs by more than this share of the prediction gets a warning.
OFF = 0.15
# A step with less than this share of the planned tokens is too small to compare its peak.
LOW_TOKEN_FILL = 0.75
# For a category of fewer bytes the difference in bytes counts, and not its share.
SMALL = 2**30
# Bytes of host memory for each rank that no plan counts: the interpreter, the libraries and what
# malloc keeps are a few hundred MiB.
HOST_SLACK = 2**29
# `Comparison.off` above which the difference is written as a factor: 9 is ten times as much.
FACTOR_FROM = 9
ROWS_WERE_SHORT = "rows were much shorter than planned"
MEMORY = ("parameters", "gradients", "optimizer", "peak", "reserved")


class Measurement(Frozen):
    """What was measured so far; what could not be measured is left out (of a dict) or null."""

    step: int = Field(description="Steps done.")
    final: bool = Field(
        description="At the end of the run; before it, as soon as a step was instrumented and some were timed."
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
        " (waiting for other ranks, where it is measured), optimizer (on a CPU), counted (the instrumented step, which is slower)."
    )
    phases: dict[str, list[float]] = Field(
        default_factory=dict,
        description="Phase → seconds of each rank in it since the rank began, by the host's clock. GPU kernels run"
        " asynchronously, so their time appears in the phase that synchronises. Empty if no launcher watches the ranks.",
    )
    timed: int = Field(
        description="Steps that were timed: all but the first two and the instrumented one."
    )
    traffic: float | None = Field(
        description="Bytes that a rank sends in a step, mean over ranks and over the steps of a long run."
    )
    grows: bool = Field(
        False, description="Whether the bytes that are sent grow with the tokens of a micro-batch."
    )
    width: float = Field(
        description="Tokens of the largest micro-batch where the peak was measured, as a fraction of the planned tokens."
    )


class Comparison(Frozen):
    """The comparison of one category. `note`: why it is shown without a warning."""

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
        """Return measured / predicted − 1; infinite if only the prediction is 0."""
        if self.predicted:
            return self.measured / self.predicted - 1
        if self.measured:
            return math.inf
        return 0.0

    @property
    def warns(self) -> bool:
        """Return whether the difference is worth a warning.

        It is if it is large both as a share of the prediction and in bytes or seconds, and if no
        note explains it.
        """
        if self.note:
            return False
        difference = abs(self.measured - self.predicted)
        return abs(self.off) > OFF and difference > self.slack

    def line(self) -> str:
        """Return, for example, `peak: predicted 1.20 GiB, measured 1.50 GiB, 25% more`."""
        predicted = self.show(self.predicted)
        measured = self.show(self.measured)
        return f"{self.category}: predicted {predicted}, measured {measured}, {self.describe_difference()}"

    def show(self, value: float) -> str:
        """Return a value of this category with its unit."""
        if self.unit == "bytes":
            return size(value)
        return f"{value:.3g} s"

    def describe_difference(self) -> str:
        """Return the difference in words: `12% more`, `as predicted`, `37 times as much`."""
        off = self.off
        # Below it, two digits of a percentage are zeros.
        if abs(off) < 5e-5:
            return "as predicted"
        if math.isinf(off):
            return "none predicted"
        if off > FACTOR_FROM:
            times = 1 + off
            return f"{times:.0f} times as much"
        percent = abs(off) * 100
        number = f"{percent:.0f}"
        if abs(off) < 0.1:
            number = f"{percent:.2f}"
        direction = "more" if off > 0 else "less"
        return f"{number}% {direction}"


def compare(estimate: Estimate, measured: Measurement) -> list[Comparison]:
    """Return a comparison for each category that has both a prediction and a measurement."""
    rows = _compare_memory(estimate, measured)
    rows += _compare_host_memory(estimate, measured)
    if measured.traffic is not None:
        note = ""
        if measured.grows and measured.traffic < estimate.traffic.total:
            note = "rows may be shorter than planned, and what is sent grows with them"
        rows.append(
            Comparison(
                category="traffic",
                unit="bytes",
                predicted=estimate.traffic.total,
                measured=measured.traffic,
                note=note,
            )
        )
    return rows + _compare_seconds(estimate, measured)


def _compare_memory(estimate: Estimate, measured: Measurement) -> list[Comparison]:
    """Return the comparisons of device memory.

    Predictions are brought down to what was measured: to the tokens of the micro-batches that came,
    and to the phases that the tracker sees.
    """
    memory = estimate.memory
    predicted: dict[str, float] = {name: getattr(memory, name) for name in MEMORY}
    peak = memory.peak
    # What grows with the tokens of a micro-batch.
    growing = memory.activations + memory.logits
    # The tracker follows steps; only an allocator sees what is sampled between them, and a teacher
    # before them.
    unseen = ("rollout", "teacher")
    of_steps = [bytes_ for phase, bytes_ in memory.phases.items() if phase not in unseen]
    is_peak_unseen = memory.phase in unseen and measured.by == "tracker"
    if is_peak_unseen and of_steps:
        peak = max(of_steps)
        growing = max(0, peak - memory.parameters - memory.gradients - memory.optimizer)
    # The peak is planned for the longest rows. Its part that grows with tokens is scaled down to the
    # rows that came.
    missing_share = max(0.0, 1.0 - measured.width)
    spared = growing * missing_share
    predicted["peak"] = peak - spared
    # An allocator does not see the overhead, which is outside of it.
    predicted["reserved"] = memory.reserved - memory.overhead - spared
    is_low_fill = measured.width < LOW_TOKEN_FILL
    rows = []
    for name, bytes_ in measured.memory.items():
        note = ""
        grows_with_rows = name in ("peak", "reserved")
        # More than was planned for the longest rows is a warning, however short the rows were.
        if is_low_fill and grows_with_rows and bytes_ <= getattr(memory, name):
            note = ROWS_WERE_SHORT
        rows.append(
            Comparison(
                category=name,
                unit="bytes",
                predicted=predicted[name],
                measured=bytes_,
                note=note,
                slack=OFF * SMALL,
            )
        )
    return rows


def _compare_host_memory(estimate: Estimate, measured: Measurement) -> list[Comparison]:
    """Return the comparisons of the memory of the fullest host."""
    slack = HOST_SLACK * measured.ranks_per_host
    # On a CPU the host's memory holds the activations, which are planned for the longest rows.
    is_host_the_device = measured.by == "tracker"
    is_low_fill = measured.width < LOW_TOKEN_FILL
    rows = []
    for phase, bytes_ in measured.host.items():
        predicted = getattr(estimate.host, phase)
        note = ""
        grows_with_rows = is_host_the_device and phase != "load"
        if is_low_fill and grows_with_rows and bytes_ <= predicted:
            note = ROWS_WERE_SHORT
        rows.append(
            Comparison(
                category=f"host {phase}",
                unit="bytes",
                predicted=predicted,
                measured=bytes_,
                note=note,
                slack=float(slack),
            )
        )
    return rows


def _compare_seconds(estimate: Estimate, measured: Measurement) -> list[Comparison]:
    """Return the comparisons of a step's seconds."""
    seconds = estimate.seconds
    # Without rollouts, which are no part of a timed step.
    predicted = {
        "total": seconds.total - seconds.rollout,
        "communication": seconds.communication,
        "optimizer": seconds.optimizer,
    }
    rows = []
    for name, seconds_predicted in predicted.items():
        if name not in measured.seconds:
            continue
        category = "seconds"
        # Only the total can be warned about: a note keeps a row from it.
        note = ""
        if name != "total":
            category = f"seconds, {name}"
            note = "a part of the step's seconds"
        if not estimate.calibrated:
            note = "the rates of this machine are not measured: `drumline calibrate`"
        rows.append(
            Comparison(
                category=category,
                unit="s",
                predicted=seconds_predicted,
                measured=measured.seconds[name],
                note=note,
            )
        )
    return rows


def notes(measured: Measurement) -> list[str]:
    """Return what is missing from a measurement, and why, in sentences."""
    remarks = []
    if not measured.memory:
        remarks.append("too short to be measured: the step after the first two is instrumented")
    elif measured.by == "tracker" and measured.width < 1.0:
        share = f"{measured.width:.0%} of the planned tokens of a micro-batch"
        remarks.append(f"the peak was seen at {share}; predicted is scaled to them")
    if measured.memory and not measured.timed:
        remarks.append(
            "too short to be timed: seconds are those of steps after the instrumented one"
        )
    if measured.by == "tracker" and measured.timed and "counted" in measured.seconds:
        # Under the tracker a step takes several times as long.
        counted = measured.seconds["counted"]
        total = measured.seconds["total"]
        remarks.append(f"the instrumented step took {counted:.3g} s, the others {total:.3g} s")
    return remarks

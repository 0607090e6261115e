"""Compare what a run took with its plan's prediction, by category, in pure functions.

`telemetry.measure` fills in a Measurement, which is the event `measured`. `compare` compares it
with the Estimate of plan.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from drumline.config.section import Frozen
from drumline.plan.estimate import Estimate, Seconds
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
# What a measurement calls forward and backward together, which a GPU runs without a stop.
FORWARD_AND_BACKWARD = "forward and backward"
# Part of a step whose peak is measured → the phases of an estimate that it contains.
PHASES_OF_PART = {
    "forward": ("forward", "loss"),
    "backward": ("head", "blocks", "end", "average"),
    FORWARD_AND_BACKWARD: ("forward", "loss", "head", "blocks", "end", "average"),
    "clip": ("clip",),
    "step": ("step",),
}
# Parts whose memory does not grow with the tokens of a micro-batch.
WITHOUT_TOKENS = ("clip", "step")
# The category of what a step has at its peak besides weights, gradients and moments.
LIVE = "activations, logits, buffers"
# All that a step does besides communication.
COMPUTING = "computing"
# Categories that no fitted constant decides, and what to look at.
MADE_BY_FORMULA = {
    "activations": "a formula of the block's operators; `drumline plan --trace` counts them one by one",
    "peak": "no constant: the sum of the categories above it",
    "traffic": "no constant: bytes are counted collective by collective",
}
# Part of the seconds → what sets it, if not the constants of computing.
SET_BY = {
    "communication": "`drumline calibrate` measures the links, and cluster.inter sets those between hosts",
    "optimizer": "`drumline calibrate` measures the memory through which an update moves its bytes",
    "data": "no constant: more data.workers read batches in time",
}
CPU_RATES = (
    "LOOP, what a step takes outside of the blocks, or the rates of this processor, which"
    " `drumline calibrate` measures"
)
STATES = ("parameters", "gradients", "optimizer")
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
    peaks: dict[str, int] = Field(
        default_factory=dict,
        description="Bytes on the same rank at the peak of each part of a step: forward, backward, clip, step; on a GPU"
        " `forward and backward` together.",
    )
    by_rank: dict[str, list[int]] = Field(description="The same of each rank.")
    host: dict[str, int] = Field(
        description="Bytes: resident sets of a host's ranks at their largest, added up, of the fullest host: load, train (until the"
        " first save), save (from then on). Libraries that ranks share count once for each."
    )
    ranks_per_host: int = Field(description="Ranks of the fullest host.")
    seconds: dict[str, float] = Field(
        description="Of a step, the slowest rank's median over the timed ones: total (without waiting for data), data, communication"
        " (waiting for other ranks, where it is measured), forward, backward (without that waiting) and optimizer (on a CPU),"
        " counted (the instrumented step, which is slower)."
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
    return [*rows, *_compare_live_memory(rows), *_compare_peaks(estimate, measured)]


def _compare_live_memory(rows: list[Comparison]) -> list[Comparison]:
    """Return the comparison of what the peak has besides the states; empty if those are not measured.

    `rows`: the comparisons of the states and of the peak.
    """
    by_category = {row.category: row for row in rows}
    if not by_category.keys() >= {*STATES, "peak"}:
        return []
    peak = by_category["peak"]
    states = [by_category[name] for name in STATES]
    predicted = peak.predicted - sum(row.predicted for row in states)
    measured = peak.measured - sum(row.measured for row in states)
    row = Comparison(
        category=LIVE,
        unit="bytes",
        predicted=max(0.0, predicted),
        measured=max(0.0, measured),
        note="what the peak has besides the states",
    )
    return [row]


def _compare_peaks(estimate: Estimate, measured: Measurement) -> list[Comparison]:
    """Return the comparison of the peak of each part of a step that was measured and predicted.

    `peak` warns of the largest of them.
    """
    memory = estimate.memory
    states = memory.parameters + memory.gradients + memory.optimizer
    missing_share = max(0.0, 1.0 - measured.width)
    rows = []
    for part, bytes_ in measured.peaks.items():
        phases = PHASES_OF_PART.get(part, ())
        predicted = float(max((memory.phases.get(phase, 0) for phase in phases), default=0))
        if not predicted:
            continue
        if part not in WITHOUT_TOKENS:
            # As `peak`: planned for the longest rows, and scaled down to those that came.
            predicted -= missing_share * max(0.0, predicted - states)
        rows.append(
            Comparison(
                category=f"peak, {part}",
                unit="bytes",
                predicted=predicted,
                measured=bytes_,
                note="a part of the step",
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
    """Return the comparisons of a step's seconds, and of its parts."""
    seconds = estimate.seconds
    # Without rollouts, which are no part of a timed step.
    total = seconds.total - seconds.rollout
    predicted = {"total": total}
    known = dict(measured.seconds)
    if "communication" in known:
        # What is waited for belongs to no pass.
        predicted |= _predicted_passes(seconds, known)
        predicted["communication"] = seconds.communication
    predicted["optimizer"] = seconds.optimizer
    # Batches are read beside the steps.
    predicted["data"] = 0.0
    rows = []
    for name, seconds_predicted in predicted.items():
        if name not in known:
            continue
        category = "seconds"
        # Only the total can be warned about: a note keeps a row from it.
        note = ""
        if name != "total":
            category = f"seconds, {name}"
            note = "a part of the step's seconds"
        if name == "data":
            note = "batches should be ready when a step begins"
        elif not estimate.calibrated:
            note = "the rates of this machine are not measured: `drumline calibrate`"
        rows.append(
            Comparison(
                category=category,
                unit="s",
                predicted=seconds_predicted,
                measured=known[name],
                note=note,
            )
        )
    return rows


def _predicted_passes(seconds: Seconds, known: dict[str, float]) -> dict[str, float]:
    """Return what was predicted of forward and backward; of all computing if it was not measured apart.

    `known`: the measured seconds, to which those of all computing are added.
    """
    are_passes_known = {"forward", "backward"} <= known.keys()
    if are_passes_known and seconds.forward is not None:
        return {"forward": seconds.forward, "backward": seconds.compute - seconds.forward}
    if "total" not in known:
        return {}
    known[COMPUTING] = max(0.0, known["total"] - known["communication"])
    return {COMPUTING: seconds.total - seconds.rollout - seconds.communication}


def lessons(
    rows: list[Comparison], on_cpu: bool = False, constants: Mapping[str, float] | None = None
) -> list[str]:
    """Return a line for each category that is off: what a fit to this run alone would change.

    Args:
        rows: What `compare` returned.
        on_cpu: Whether the run was one on a CPU, which has constants of its own.
        constants: The planner's constants by name, to say from which number to which one.
    """
    lines = []
    for row in rows:
        if not row.predicted or not row.measured:
            continue
        factor = row.measured / row.predicted
        if row.category == "seconds" and abs(row.off) > OFF:
            lines.append(_lesson_of_seconds(row, rows, on_cpu, constants or {}))
        elif not row.warns:
            continue
        elif row.category == "reserved":
            lines.append(
                "reserved: FRAGMENTS, the allocator's share of what comes and goes,"
                f" would make {factor:.3g} × as much"
            )
        elif row.category == "peak":
            lines.append(f"peak: {_lesson_of_peak(rows)}")
        elif row.category in MADE_BY_FORMULA:
            lines.append(f"{row.category}: {MADE_BY_FORMULA[row.category]}")
    return lines


def _lesson_of_seconds(
    total: Comparison, rows: list[Comparison], on_cpu: bool, constants: Mapping[str, float]
) -> str:
    """Return which part makes most of the difference of a step's seconds, and what would change it.

    `total`: the row of the whole step. The other arguments are those of `lessons`.
    """
    parts = [row for row in rows if row.category.startswith("seconds, ")]
    worst = total
    name = "seconds"
    if parts:
        worst = max(parts, key=lambda row: abs(row.measured - row.predicted))
        name = f"{total.describe_difference()}, most of it in {_part_of(worst)}"
        name = f"seconds: {name}"
    part = _part_of(worst)
    if part in SET_BY:
        return f"{name}; {SET_BY[part]}"
    if on_cpu:
        return f"{name}; {CPU_RATES}"
    now = constants.get("PRODUCTS")
    factor = worst.measured / worst.predicted if worst.predicted else 1.0
    change = f"be {factor:.3g} times as large"
    if now is not None:
        change = f"go from {now:.3g} to {now * factor:.3g}"
    return (
        f"{name}; PRODUCTS, the surplus of matrix products, would {change};"
        " `drumline calibrate` measures the rates themselves"
    )


def _part_of(row: Comparison) -> str:
    """Return the part of a step that a row is of: `backward` of `seconds, backward`."""
    return row.category.partition(", ")[2]


def _lesson_of_peak(rows: list[Comparison]) -> str:
    """Return which part of the step has the largest difference in bytes, and what predicts it."""
    parts = [row for row in rows if row.category.startswith("peak, ")]
    if not parts:
        return MADE_BY_FORMULA["peak"]
    worst = max(parts, key=lambda row: abs(row.measured - row.predicted))
    difference = worst.describe_difference()
    return f"{difference} in {_part_of(worst)}; {MADE_BY_FORMULA['activations']}"


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

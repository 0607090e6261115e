"""Correct estimates by real steps: a few candidates (probes) run, and the errors of all are alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean

from pydantic import Field

from drumline.config.section import Frozen
from drumline.plan.estimate import Estimate, Memory, Seconds
from drumline.planner.cost.fitted import PROBED
from drumline.telemetry.plan_accuracy import Measurement, compare

# Categories of memory that exist between steps, and those that exist only within a step.
STATES = ("parameters", "gradients", "optimizer")
LIVE = ("activations", "logits", "buffers")


class Factors(Frozen):
    """Measured over predicted, by category; 1 if nothing was measured or nothing was predicted."""

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    live: float = Field(
        1.0, description="Of all on top of these three at the peak: activations, logits, buffers."
    )
    reserved: float = Field(
        1.0, description="Of the allocator's surplus over what it hands out; on a GPU."
    )
    seconds: float = Field(1.0, description="Of a step without its rollout.")
    traffic: float = 1.0


class Probe(Frozen):
    """A candidate that ran for a few steps.

    `predicted`: its estimate without corrections. `measured`: None if it failed, for the reason
    `failed`.
    """

    name: str
    predicted: Estimate
    measured: Measurement | None = None
    factors: Factors | None = None
    failed: str = ""

    @classmethod
    def from_measurement(cls, name: str, predicted: Estimate, measured: Measurement) -> Probe:
        """Return the probe of a candidate that ran."""
        return cls(
            name=name,
            predicted=predicted,
            measured=measured,
            factors=factors_of(predicted, measured),
        )


def factors_of(estimate: Estimate, measured: Measurement) -> Factors:
    """Return the factors between an estimate and what a run of it measured."""
    rows = {row.category: row for row in compare(estimate, measured)}

    def ratio(category: str) -> float:
        row = rows.get(category)
        if row is None or not row.predicted or not row.measured:
            return 1.0
        return row.measured / row.predicted

    factors = {name: ratio(name) for name in (*STATES, "seconds", "traffic")}
    if "peak" in rows:
        states = [rows[name] for name in STATES if name in rows]
        predicted_live = rows["peak"].predicted - sum(row.predicted for row in states)
        measured_live = rows["peak"].measured - sum(row.measured for row in states)
        factors["live"] = 1.0
        if min(predicted_live, measured_live) > 0:
            factors["live"] = measured_live / predicted_live
    if "reserved" in rows:
        factors["reserved"] = ratio("reserved") / ratio("peak")
    return Factors(**factors)


def mean_factors(factors: Iterable[Factors]) -> Factors:
    """Return the geometric mean of each factor; 1 if there are none."""
    every = list(factors)
    if not every:
        return Factors()
    means = {}
    for name in Factors.model_fields:
        means[name] = geometric_mean(getattr(each, name) for each in every)
    return Factors(**means)


def correct_estimate(estimate: Estimate, by: Factors) -> Estimate:
    """Return the estimate times the factors, with the ranges of what was probed."""
    memory_range, seconds_range = PROBED
    ranges = {"memory_range": memory_range, "seconds_range": seconds_range}
    return scale_estimate(estimate, by).model_copy(update=ranges)


def slowdown(seconds: Seconds, by: Factors) -> float:
    """Return how many times as long a step takes by the factors. A rollout takes as long as before."""
    rollout = seconds.rollout
    return (by.seconds * (seconds.total - rollout) + rollout) / seconds.total


def scale_estimate(estimate: Estimate, by: Factors) -> Estimate:
    """Return the estimate times the factors. Host memory, rollouts and ranges stay as they are."""
    seconds = {}
    for name, value in estimate.seconds:
        if name == "rollout":
            seconds[name] = value
        else:
            seconds[name] = value * by.seconds
    slower = slowdown(estimate.seconds, by)
    traffic = {name: value * by.traffic for name, value in estimate.traffic}
    mfu = estimate.mfu
    if mfu is not None:
        mfu /= slower
    return estimate.model_copy(
        update={
            "memory": _correct_memory(estimate.memory, by),
            "seconds": estimate.seconds.model_copy(update=seconds),
            "traffic": estimate.traffic.model_copy(update=traffic),
            "tokens_per_s": estimate.tokens_per_s / slower,
            "mfu": mfu,
        }
    )


def _correct_memory(memory: Memory, by: Factors) -> Memory:
    """Return the bytes of a device times the factors."""
    states = {name: round(getattr(memory, name) * getattr(by, name)) for name in STATES}
    live = {name: round(getattr(memory, name) * by.live) for name in LIVE}
    predicted_states = memory.parameters + memory.gradients + memory.optimizer
    peak = sum(states.values()) + round((memory.peak - predicted_states) * by.live)
    # The allocator's surplus grows with the peak.
    growth = 1.0
    if memory.peak:
        growth = peak / memory.peak
    kept = (memory.reserved - memory.overhead) * by.reserved * growth
    reserved = round(kept) + memory.overhead
    return memory.model_copy(update={**states, **live, "peak": peak, "reserved": reserved})

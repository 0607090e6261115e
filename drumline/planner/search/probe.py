"""What a few real steps of some candidates say of all: factors by category, and estimates corrected by them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import Field

from drumline.core.estimate import Estimate, Frozen
from drumline.errors import EnvironmentFault
from drumline.hardware.cluster import Cluster
from drumline.telemetry.truth import Measurement, compare

STATES = ("parameters", "gradients", "optimizer")


class Factors(Frozen):
    """Measured / predicted, by category; 1 where nothing was measured or nothing was predicted."""

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    live: float = Field(1.0, description="Of what lies on top of these three at the peak: activations, logits, buffers.")
    reserved: float = Field(1.0, description="Of what the allocator keeps over what it hands out; on a GPU.")
    seconds: float = Field(1.0, description="Of a step, the rollout's left out.")
    traffic: float = 1.0


class Probe(Frozen):
    """One candidate that ran for a few steps. `measured` None: it failed, as `failed` says. `predicted`: before anything was corrected."""

    name: str
    predicted: Estimate
    measured: Measurement | None = None
    factors: Factors | None = None
    failed: str = ""

    @classmethod
    def of(cls, name: str, predicted: Estimate, measured: Measurement) -> Probe:
        return cls(name=name, predicted=predicted, measured=measured, factors=factors_of(predicted, measured))


def factors_of(estimate: Estimate, measured: Measurement) -> Factors:
    rows = {row.category: row for row in compare(estimate, measured)}

    def ratio(name: str) -> float:
        return rows[name].measured / rows[name].predicted if name in rows and rows[name].predicted and rows[name].measured else 1.0

    found = {name: ratio(name) for name in (*STATES, "seconds", "traffic")}
    if "peak" in rows:
        rest = [sum(getattr(rows[name], side) for name in STATES if name in rows) for side in ("predicted", "measured")]
        predicted, measured_ = rows["peak"].predicted - rest[0], rows["peak"].measured - rest[1]
        found["live"] = measured_ / predicted if min(predicted, measured_) > 0 else 1.0
    if "reserved" in rows:
        found["reserved"] = ratio("reserved") / ratio("peak")
    return Factors(**found)


def mean(factors: Iterable[Factors]) -> Factors:
    """The geometric mean of each."""
    every = list(factors)
    names = Factors.model_fields if every else {}
    return Factors(**{name: math.exp(math.fsum(math.log(getattr(f, name)) for f in every) / len(every)) for name in names})


def corrected(estimate: Estimate, by: Factors) -> Estimate:
    """The estimate times the factors. Host memory is left as it is."""
    memory, seconds = estimate.memory, estimate.seconds
    states = {name: round(getattr(memory, name) * getattr(by, name)) for name in STATES}
    live = {name: round(getattr(memory, name) * by.live) for name in ("activations", "logits", "buffers")}
    peak = sum(states.values()) + round((memory.peak - sum(getattr(memory, name) for name in STATES)) * by.live)
    kept = (memory.reserved - memory.overhead) * by.reserved * (peak / memory.peak if memory.peak else 1.0)
    times = {name: value if name == "rollout" else value * by.seconds for name, value in seconds}
    slower = sum(times.values()) / seconds.total
    return estimate.model_copy(
        update={
            "memory": memory.model_copy(update={**states, **live, "peak": peak, "reserved": round(kept) + memory.overhead}),
            "seconds": seconds.model_copy(update=times),
            "traffic": estimate.traffic.model_copy(update={name: value * by.traffic for name, value in estimate.traffic}),
            "tokens_per_s": estimate.tokens_per_s / slower,
            "mfu": None if estimate.mfu is None else estimate.mfu / slower,
        }
    )


def require_here(cluster: Cluster) -> None:
    """Raises EnvironmentFault where `cluster` is not this machine."""
    if not cluster.found:
        what = f"the cluster to plan for ({cluster.world_size} × {cluster.device.name}) is not this machine, so nothing can be tried on it"
        raise EnvironmentFault(what, where="--probe", fix="leave --probe out, or run it there without --cluster")

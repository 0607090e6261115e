"""The question of a search, and its answer: ranked candidates, refused families with their reason; and how real steps of a few
candidates (probes) correct the estimates of all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from pydantic import Field

from drumline.core.config import Config
from drumline.core.estimate import Ends, Estimate, Frozen
from drumline.core.facts import ModelFacts
from drumline.core.plan import DataPlan, Layout, RolePlan
from drumline.core.strategy import StrategySpec
from drumline.errors import EnvironmentFault
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.fitted import PROBED, SPEED_ERROR, is_measured
from drumline.telemetry.truth import Measurement, compare

GB = 1e9
# Predicted speeds of the same kind of plan that differ by less are the same: no prediction is better than that.
TIE = 0.03
# What a plan has to gain before it goes first, if no run of its kind was measured, or measured runs were much slower than predicted:
# twice the error of the others, as planner.cost.fitted widens the ends of their seconds.
UNMEASURED = 2 * SPEED_ERROR
# A plan needs clearly less memory than another where it leaves so much more of the host's memory.
CLEARLY_LESS = 0.25


@dataclass(frozen=True)
class Question:
    """A config (its strategy may be auto; the search is free to choose what the user left out), the cluster, and the known sizes.
    `processes`: their number is set, so each must have work. `deepspeed`: it is installed, or may be. `nvme`: a folder on a disk that
    ZeRO-3 may offload to, besides the one that strategy auto names. `correction`: of all estimates, by real steps."""

    config: Config
    cluster: Cluster
    facts: ModelFacts
    data: DataPlan | None = None
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    processes: bool = False
    deepspeed: bool = True
    nvme: str | None = None
    correction: Factors | None = None

    def with_values(self, section: str, **values: object) -> Question:
        """Return the question with these values in a section of its config."""
        changed = getattr(self.config, section).model_copy(update=values)
        return replace(self, config=self.config.model_copy(update={section: changed}))


@dataclass(frozen=True)
class Candidate:
    """`name`: short and unique in an answer (`fsdp2 × tp 2`); `layout.config`: the config that trains so, with every choice filled in."""

    name: str
    layout: Layout
    estimate: Estimate
    family: str = ""
    simple: int = 0

    @property
    def config(self) -> Config:
        return self.layout.config

    @property
    def devices(self) -> int:
        return self.layout.mesh.world_size * self.layout.devices_per_rank

    def hours(self, tokens: float | None = None) -> float | None:
        """Hours of the run with what it compiles: for `tokens` where given, else for its steps; None where neither is known."""
        if tokens is not None:
            stepping = tokens / self.estimate.tokens_per_s
        elif self.layout.steps is not None:
            stepping = self.layout.steps * self.estimate.seconds.total
        else:
            return None
        return (stepping + self.estimate.startup) / 3600

    @property
    def speed_of_run(self) -> float:
        """Tokens/s of the whole run, in which it also compiles; of its steps alone where its length is not known."""
        if not self.layout.steps:
            return self.estimate.tokens_per_s
        stepping = self.layout.steps * self.estimate.seconds.total
        return self.estimate.tokens_per_s * stepping / (stepping + self.estimate.startup)

    def cost(self, price: float | None, tokens: float | None = None) -> float | None:
        """The cost of the run, in the currency of `price` of a device for an hour; None where price or length of the run is not known."""
        hours = self.hours(tokens)
        return None if price is None or hours is None else price * hours * self.devices


@dataclass(frozen=True)
class Refused:
    """A refused family and its reason, with the number: `zero2`, `91.3 GB > 80.0 GB`, or the rule's. `best`: its nearest candidate."""

    name: str
    reason: str
    best: Candidate | None = None


@dataclass(frozen=True)
class Answer:
    """`ranked`: candidates that fit or are tight, the best first (`in_order`); `refused`: families of which none fits. `looked_at`:
    estimated layouts; `probes`: candidates that ran for a few steps and correct all estimates."""

    question: Question
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    looked_at: int = 0
    probes: tuple[Probe, ...] = ()

    @property
    def tight(self) -> Candidate | None:
        """The fastest tight candidate where it is faster than the first of `ranked` by more than SPEED_ERROR."""
        candidates = [
            candidate for candidate in self.ranked if candidate.estimate.verdict == "tight"
        ]
        if not candidates:
            return None
        fastest = max(candidates, key=trusted_speed)
        return fastest if is_clearly_faster(fastest, self.ranked[0]) else None

    @property
    def with_room(self) -> Candidate | None:
        """The best candidate that fits at its upper end too; None where all are tight."""
        return next(
            (candidate for candidate in self.ranked if candidate.estimate.verdict == "fits"), None
        )


def why_not(estimate: Estimate) -> str:
    """The part of an estimate with verdict `no` that is too large: `91.3 GB > 80.0 GB`."""
    needs, limit = estimate.memory.reserved, estimate.limit
    if needs > limit:
        return over(needs, limit)
    host = estimate.host
    phases = [(host.load, "to load"), (host.train, "to train"), (host.save, "to save")]
    if not estimate.host_assumed:
        phases.append((host.export, "to export"))
    most, phase = max(phases)
    text = over(most, estimate.host_limit or 0, f" of host memory {phase}")
    return f"{text} assumed" if estimate.host_assumed else text


def over(needs: int, limit: int, what: str = "") -> str:
    """In GB, or to the byte where these look the same."""
    shown = (gb(needs), gb(limit)) if gb(needs) != gb(limit) else (f"{needs:,}", f"{limit:,} bytes")
    return f"{shown[0]}{what} > {shown[1]}"


def gb(bytes_: float) -> str:
    """Bytes as text, in units of 10^9 as device memory is sold; small numbers in 10^6."""
    return f"{bytes_ / GB:.1f} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.1f} MB"


def number(value: float | None) -> str:
    """Three digits, or whole where there are more: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
        if abs(value) >= 0.1
        else f"{value:.2g}"
    )


def ranged(value: float, ends: Ends, show: Callable[[float], str] = number) -> str:
    """A value, and its ends as multiples of it: `12.3 (11.6-13.4)`."""
    low, high = (show(value * end) for end in ends)
    return f"{show(value)} ({low}-{high})" if low != high else show(value)


def faster(estimate: Estimate, other: Estimate) -> bool:
    """Whether an estimate is faster than another by more than the error of a prediction (TIE)."""
    return estimate.tokens_per_s * (1 - TIE) > other.tokens_per_s


def is_offloaded(strategy: StrategySpec) -> bool:
    """Return whether a strategy keeps optimizer states or weights in host memory or on a disk."""
    return strategy.offloads() != ("none", "none")


def is_trusted(layout: Layout) -> bool:
    """Return whether measured runs have confirmed the predicted speed of such layouts.

    None has confirmed tensor, context or pipeline parallelism, and those that offload took up to 77% longer.
    """
    return is_measured(layout) and not is_offloaded(layout.strategy)


def trusted_speed(candidate: Candidate) -> float:
    """Return tokens/s, and UNMEASURED less if no measured run has confirmed them (`is_trusted`)."""
    speed = candidate.speed_of_run
    return speed if is_trusted(candidate.layout) else (1 - UNMEASURED) * speed


def expected_speed(candidate: Candidate) -> float:
    """The trusted speed times the chance to fit, by which candidates are ranked."""
    return trusted_speed(candidate) * (1 - candidate.estimate.risk)


def is_clearly_faster(candidate: Candidate, other: Candidate) -> bool:
    """Whether a candidate is faster than another, whatever it risks, by more than SPEED_ERROR."""
    return trusted_speed(candidate) * (1 - SPEED_ERROR) > trusted_speed(other)


def in_order(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """The candidates, the best first (`_best`)."""
    left = list(candidates)
    while left:
        first = _best(left)
        left.remove(first)
        yield first


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the largest expected speed. Of those within SPEED_ERROR of it, any that wastes memory beside another is passed
    over; of those within TIE, one that fits goes first, then the simplest, then the smallest."""
    fastest = max(expected_speed(candidate) for candidate in candidates)
    near = [
        candidate
        for candidate in candidates
        if expected_speed(candidate) >= (1 - SPEED_ERROR) * fastest
    ]
    lean = [
        candidate
        for candidate in near
        if not any(_needs_clearly_less(other.estimate, candidate.estimate) for other in near)
    ]
    fastest_lean = max(expected_speed(candidate) for candidate in lean)
    equal = [
        candidate for candidate in lean if expected_speed(candidate) >= (1 - TIE) * fastest_lean
    ]

    def preference(candidate: Candidate) -> tuple[bool, int, int, float]:
        estimate = candidate.estimate
        return (
            estimate.verdict != "fits",
            candidate.simple,
            estimate.memory.reserved,
            -estimate.tokens_per_s,
        )

    return min(equal, key=preference)


def _needs_clearly_less(estimate: Estimate, other: Estimate) -> bool:
    """Whether an estimate leaves at least CLEARLY_LESS of a host's memory that another takes, and takes no more of a device."""
    if other.host_limit is None:
        return False
    saved = other.host.running - estimate.host.running
    return (
        saved >= CLEARLY_LESS * other.host_limit
        and estimate.memory.reserved <= other.memory.reserved
    )


def corrected_answer(answer: Answer, probes: tuple[Probe, ...]) -> Answer:
    """The answer with all estimates corrected (of a probe by its own factors, of the rest by their mean), ranked and refused anew. A probe
    that failed is refused."""
    own = {probe.name: probe.factors for probe in probes if probe.factors is not None}
    common = mean(own.values())
    failed = {probe.name: probe.failed for probe in probes if probe.failed}
    named = [(c.name, c) for c in answer.ranked] + [
        (r.name, r.best) for r in answer.refused if r.best is not None
    ]
    better = (
        (name, replace(c, estimate=corrected(c.estimate, own.get(c.name, common))))
        for name, c in named
    )
    question = replace(answer.question, correction=common)
    without = replace(
        answer,
        question=question,
        refused=tuple(r for r in answer.refused if r.best is None),
        probes=probes,
    )
    return ranked_anew(
        without, ((c.name if c.name in failed else name, c) for name, c in better), failed
    )


def ranked_anew(
    answer: Answer, named: Iterable[tuple[str, Candidate]], failed: Mapping[str, str]
) -> Answer:
    """The answer with these candidates in the place of its own. One that does not fit, or has `failed` (name → reason), is refused."""
    ranked, refused = list[Candidate](), list(answer.refused)
    for name, candidate in named:
        reason = failed.get(candidate.name) or (
            why_not(candidate.estimate) if candidate.estimate.verdict == "no" else ""
        )
        if reason:
            refused.append(Refused(name, reason, candidate))
        else:
            ranked.append(candidate)
    return replace(answer, ranked=tuple(in_order(ranked)), refused=tuple(refused))


STATES = ("parameters", "gradients", "optimizer")


class Factors(Frozen):
    """Measured / predicted, by category; 1 where nothing was measured or nothing was predicted."""

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
    """A candidate that ran for a few steps. `measured` None: it failed for the reason `failed`. `predicted`: without corrections."""

    name: str
    predicted: Estimate
    measured: Measurement | None = None
    factors: Factors | None = None
    failed: str = ""

    @classmethod
    def of(cls, name: str, predicted: Estimate, measured: Measurement) -> Probe:
        return cls(
            name=name,
            predicted=predicted,
            measured=measured,
            factors=factors_of(predicted, measured),
        )


def factors_of(estimate: Estimate, measured: Measurement) -> Factors:
    rows = {row.category: row for row in compare(estimate, measured)}

    def ratio(name: str) -> float:
        return (
            rows[name].measured / rows[name].predicted
            if name in rows and rows[name].predicted and rows[name].measured
            else 1.0
        )

    found = {name: ratio(name) for name in (*STATES, "seconds", "traffic")}
    if "peak" in rows:
        rest = [
            sum(getattr(rows[name], side) for name in STATES if name in rows)
            for side in ("predicted", "measured")
        ]
        predicted, measured_ = rows["peak"].predicted - rest[0], rows["peak"].measured - rest[1]
        found["live"] = measured_ / predicted if min(predicted, measured_) > 0 else 1.0
    if "reserved" in rows:
        found["reserved"] = ratio("reserved") / ratio("peak")
    return Factors(**found)


def mean(factors: Iterable[Factors]) -> Factors:
    """The geometric mean of each; 1 without any."""
    every = list(factors) or [Factors()]
    return Factors(
        **{name: geometric_mean(getattr(f, name) for f in every) for name in Factors.model_fields}
    )


def corrected(estimate: Estimate, by: Factors) -> Estimate:
    """The estimate times the factors. Host memory is left as it is."""
    memory, seconds = estimate.memory, estimate.seconds
    states = {name: round(getattr(memory, name) * getattr(by, name)) for name in STATES}
    live = {
        name: round(getattr(memory, name) * by.live)
        for name in ("activations", "logits", "buffers")
    }
    peak = sum(states.values()) + round(
        (memory.peak - sum(getattr(memory, name) for name in STATES)) * by.live
    )
    kept = (
        (memory.reserved - memory.overhead)
        * by.reserved
        * (peak / memory.peak if memory.peak else 1.0)
    )
    times = {name: value if name == "rollout" else value * by.seconds for name, value in seconds}
    slower = sum(times.values()) / seconds.total
    return estimate.model_copy(
        update={
            "memory": memory.model_copy(
                update={**states, **live, "peak": peak, "reserved": round(kept) + memory.overhead}
            ),
            "seconds": seconds.model_copy(update=times),
            "traffic": estimate.traffic.model_copy(
                update={name: value * by.traffic for name, value in estimate.traffic}
            ),
            "tokens_per_s": estimate.tokens_per_s / slower,
            "mfu": None if estimate.mfu is None else estimate.mfu / slower,
            "memory_range": PROBED[0],
            "seconds_range": PROBED[1],
        }
    )


def require_here(cluster: Cluster) -> None:
    """Raises EnvironmentFault where `cluster` is not this machine."""
    if not cluster.found:
        what = f"the cluster to plan for ({cluster.world_size} × {cluster.device.name}) is not this machine, so nothing can be tried on it"
        raise EnvironmentFault(
            what, where="--probe", fix="leave --probe out, or run it there without --cluster"
        )

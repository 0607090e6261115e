"""The question of a search and its answer: ranked candidates and refused families. Pure.

A `Question` is the planning problem. Each candidate of its `Answer` has one of three verdicts
(`plan.estimate.Estimate.verdict`), by the range around its estimate of memory:

- `fits`: even the upper end of the range is within the device's memory.
- `tight`: the estimate is within it, the upper end is not. The run may run out of memory.
- `no`: the estimate itself is more than the device has, or the host has too little memory.

Candidates are compared by these speeds in tokens/s:

- `Estimate.tokens_per_s`: of a step, as predicted. `is_faster_by_tie` compares it, with TIE.
- `Candidate.run_tokens_per_s`: of the whole run, in which it also compiles.
- `discounted_speed`: that of the run, less UNMEASURED for each part of the plan (parallelism, offload)
  that no measured run has confirmed. `is_faster_by_error` compares it, with SPEED_ERROR.
- `risk_adjusted_speed`: the discounted speed times the chance that the plan fits. It ranks plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from drumline.config.config import Config
from drumline.config.strategy import StrategyConfig
from drumline.errors import EnvironmentFault
from drumline.hardware.cluster import Cluster
from drumline.plan.estimate import Estimate, Interval
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import DataPlan, Layout, RolePlan
from drumline.planner.cost.fitted import SPEED_ERROR, is_measured
from drumline.planner.search.correction import Factors, Probe, correct_estimate, mean_factors

GB = 1e9
# Two plans are equally fast if their predicted speeds differ by a smaller share: a choice, since no
# prediction is more exact.
TIE = 0.03
# The share that is taken off a plan's speed for each of its parts of which hardly a run was measured,
# or of which measured runs were much slower than predicted: a choice.
UNMEASURED = 0.25
# A plan needs clearly less host memory than another if it leaves this share of it more: a choice.
CLEARLY_LESS = 0.25
SMALLEST_IN_GB = 1e8  # bytes; fewer are shown in MB
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Question:
    """The problem to plan: a config, a cluster, and the sizes of the model.

    The strategy of the config may be auto; the search chooses what the user left out.
    `needs_all_processes`: their number is set, so each must have work.
    `has_deepspeed`: DeepSpeed is installed, or can be.
    `nvme`: a folder on a disk to which ZeRO-3 may offload, besides the folder of strategy auto.
    `correction`: factors by which all estimates are corrected; they come from real steps.
    `learned`: factors of earlier runs on this machine, see `planner.learned`; a correction replaces them.
    """

    config: Config
    cluster: Cluster
    facts: ModelFacts
    data: DataPlan | None = None
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    needs_all_processes: bool = False
    has_deepspeed: bool = True
    nvme: str | None = None
    correction: Factors | None = None
    learned: Factors | None = None

    def with_values(self, section: str, **values: object) -> Question:
        """Return the question with these values in a section of its config."""
        changed = getattr(self.config, section).model_copy(update=values)
        return replace(self, config=self.config.model_copy(update={section: changed}))

    def with_learned(self, factors: Factors) -> Question:
        """Return the question with the factors of earlier runs on this machine."""
        return replace(self, learned=factors)


@dataclass(frozen=True)
class Candidate:
    """A layout and its estimate.

    `name`: short and unique in an answer (`fsdp2 × tp 2`).
    `complexity`: of the strategy; of equally fast candidates the one with the lowest number wins.
    `layout.config`: a config that trains with this layout, in which each choice is set.
    """

    name: str
    layout: Layout
    estimate: Estimate
    family: str = ""
    complexity: int = 0

    @property
    def config(self) -> Config:
        """Return the config that trains with this layout."""
        return self.layout.config

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.layout.mesh.world_size * self.layout.devices_per_rank

    def hours(self, tokens: float | None = None) -> float | None:
        """Return the hours of the run, including those in which it compiles.

        They are for `tokens` if given, otherwise for the run's steps; None if neither is known.
        """
        if tokens is not None:
            stepping = tokens / self.estimate.tokens_per_s
        elif self.layout.steps is not None:
            stepping = self.layout.steps * self.estimate.seconds.total
        else:
            return None
        return (stepping + self.estimate.startup) / SECONDS_PER_HOUR

    @property
    def run_tokens_per_s(self) -> float:
        """Return the tokens/s of the whole run, in which it also compiles.

        If the length of the run is not known, the tokens/s of its steps.
        """
        estimate = self.estimate
        return speed_of_run(
            self.layout, estimate.tokens_per_s, estimate.seconds.total, estimate.startup
        )

    def cost(self, price: float | None, tokens: float | None = None) -> float | None:
        """Return the cost of the run; `price`: of a device for an hour.

        None if the price or the length of the run is not known.
        """
        hours = self.hours(tokens)
        if price is None or hours is None:
            return None
        return price * hours * self.devices


@dataclass(frozen=True)
class Refused:
    """A refused family.

    `reason`: a rule's, or with the numbers, such as `91.3 GB > 80.0 GB`. `best`: the candidate that
    needs least.
    """

    name: str
    reason: str
    best: Candidate | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    `ranked`: candidates that fit or are tight, the best first (`best_first`).
    `refused`: families of which none fits.
    `looked_at`: the number of layouts whose speed was predicted. `estimated`: the number of those of
    which memory was predicted, too; the others are slower than what was found by then.
    `probes`: candidates that ran for a few steps and correct all estimates.
    """

    question: Question
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    looked_at: int = 0
    estimated: int = 0
    probes: tuple[Probe, ...] = ()

    @property
    def tight(self) -> Candidate | None:
        """The fastest tight candidate if it is clearly faster than the first of `ranked`."""
        candidates = [
            candidate for candidate in self.ranked if candidate.estimate.verdict == "tight"
        ]
        if not candidates:
            return None
        fastest = max(candidates, key=discounted_speed)
        if is_faster_by_error(fastest, self.ranked[0]):
            return fastest
        return None

    @property
    def best_that_fits(self) -> Candidate | None:
        """The first of `ranked` with the verdict `fits`; None if all are tight."""
        for candidate in self.ranked:
            if candidate.estimate.verdict == "fits":
                return candidate
        return None


def why_not(estimate: Estimate) -> str:
    """Return what is too large in an estimate with verdict `no`: `91.3 GB > 80.0 GB`."""
    needs = estimate.memory.reserved
    limit = estimate.limit
    if needs > limit:
        return describe_excess(needs, limit)
    host = estimate.host
    phases = [(host.load, "to load"), (host.train, "to train"), (host.save, "to save")]
    if not estimate.host_assumed:
        phases.append((host.export, "to export"))
    most, phase = max(phases)
    text = describe_excess(most, estimate.host_limit or 0, f" of host memory {phase}")
    if estimate.host_assumed:
        return f"{text} assumed"
    return text


def excess(estimate: Estimate) -> float:
    """Return what an estimate needs as a multiple of what a device has, or its host if that is more."""
    of_device = estimate.memory.reserved / estimate.limit
    if not estimate.host_limit:
        return of_device
    host_bytes = estimate.host.running if estimate.host_assumed else estimate.host.most
    return max(of_device, host_bytes / estimate.host_limit)


def describe_excess(needs: int, limit: int, what: str = "") -> str:
    """Return the text that `needs` bytes are more than `limit`: `91.3 GB > 80.0 GB`.

    Both are given in bytes if they look the same in GB. `what`: is written after the first amount.
    """
    needs_text = gb(needs)
    limit_text = gb(limit)
    if needs_text == limit_text:
        needs_text = f"{needs:,}"
        limit_text = f"{limit:,} bytes"
    return f"{needs_text}{what} > {limit_text}"


def gb(bytes_: float) -> str:
    """Return bytes as text, in units of 10^9 as device memory is sold; small numbers in 10^6."""
    if bytes_ >= SMALLEST_IN_GB:
        return f"{bytes_ / GB:.1f} GB"
    return f"{bytes_ / 1e6:.1f} MB"


def number(value: float | None) -> str:
    """Return a number with three digits, or whole if it has more: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.2g}"


def show_range(value: float, factors: Interval, show: Callable[[float], str] = number) -> str:
    """Return a value with its range: `12.3 (11.6-13.4)`.

    `factors`: of the lower and of the upper end of the range, as multiples of the value.
    """
    low = show(value * factors[0])
    high = show(value * factors[1])
    if low == high:
        return show(value)
    return f"{show(value)} ({low}-{high})"


def is_faster_by_tie(estimate: Estimate, other: Estimate) -> bool:
    """Return whether the predicted tokens/s of an estimate exceed another's by more than TIE."""
    return estimate.tokens_per_s * (1 - TIE) > other.tokens_per_s


def is_offloaded(strategy: StrategyConfig) -> bool:
    """Return whether a strategy keeps optimizer states or weights in host memory or on a disk."""
    return strategy.offloads() != ("none", "none")


def is_speed_confirmed(layout: Layout) -> bool:
    """Return whether measured runs have confirmed the predicted speed of such layouts."""
    return _count_unconfirmed(layout) == 0


def _count_unconfirmed(layout: Layout) -> int:
    """Return how many parts of a layout have a speed that no measured runs have confirmed.

    Three runs of tensor and context parallelism are too few, a pipeline has none. Runs that offload
    optimizer states or weights took about twice as long as predicted, and no run that offloads
    activations was compared.
    """
    parts = [
        not is_measured(layout),
        is_offloaded(layout.strategy),
        layout.config.memory.activation_offload,
    ]
    return parts.count(True)


def speed_of_run(layout: Layout, tokens_per_s: float, step_seconds: float, startup: float) -> float:
    """Return the tokens/s of a whole run, in which it also compiles for `startup` seconds.

    If the length of the run is not known, the tokens/s of its steps.
    """
    if not layout.steps:
        return tokens_per_s
    stepping = layout.steps * step_seconds
    return tokens_per_s * stepping / (stepping + startup)


def discounted_speed(candidate: Candidate) -> float:
    """Return the tokens/s of the run, less UNMEASURED for each part that no run has confirmed."""
    return discount(candidate.layout, candidate.run_tokens_per_s)


def discount(layout: Layout, speed: float) -> float:
    """Return the speed of a layout, less the share UNMEASURED for each part that no run has confirmed."""
    return trust(layout) * speed


def trust(layout: Layout) -> float:
    """Return the share of a layout's predicted speed that counts; 1 if measured runs confirm it."""
    return float((1 - UNMEASURED) ** _count_unconfirmed(layout))


def risk_adjusted_speed(candidate: Candidate) -> float:
    """Return the discounted speed times the chance to fit, by which candidates are ranked."""
    return discounted_speed(candidate) * (1 - candidate.estimate.risk)


def is_faster_by_error(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate's discounted speed is higher by more than SPEED_ERROR.

    The risk that it does not fit does not count.
    """
    return discounted_speed(candidate) * (1 - SPEED_ERROR) > discounted_speed(other)


def best_first(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates, the best first. Each is the best of those that are left."""
    left = list(candidates)
    while left:
        best = _choose_best(left)
        left.remove(best)
        yield best


def _choose_best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate, in three steps.

    1. Those whose risk-adjusted speed is within SPEED_ERROR of the highest are compared.
    2. Of these, any that needs much more host memory than another is passed over.
    3. Of those left and within TIE of their fastest, one that fits goes before a tight one, then
       the simplest, then the one with the least memory.
    """
    rivals = select_fastest(candidates, SPEED_ERROR)
    lean = [candidate for candidate in rivals if not _wastes_memory(candidate, rivals)]
    equal = select_fastest(lean, TIE)
    return min(equal, key=_rank_of_equal)


def select_fastest(candidates: Sequence[Candidate], difference: float) -> list[Candidate]:
    """Return the candidates whose risk-adjusted speed is within a share of the highest."""
    fastest = max(risk_adjusted_speed(candidate) for candidate in candidates)
    least = (1 - difference) * fastest
    return [candidate for candidate in candidates if risk_adjusted_speed(candidate) >= least]


def _rank_of_equal(candidate: Candidate) -> tuple[bool, int, int, float]:
    """Return the key that sorts equally fast candidates of all strategies, the best first."""
    estimate = candidate.estimate
    does_not_fit = estimate.verdict != "fits"
    return does_not_fit, candidate.complexity, estimate.memory.reserved, -estimate.tokens_per_s


def _wastes_memory(candidate: Candidate, rivals: Sequence[Candidate]) -> bool:
    """Return whether one of its rivals needs clearly less memory."""
    return any(_needs_clearly_less(rival.estimate, candidate.estimate) for rival in rivals)


def _needs_clearly_less(estimate: Estimate, other: Estimate) -> bool:
    """Return whether an estimate needs clearly less host memory, and no more of a device.

    The difference is at least CLEARLY_LESS of the host's memory.
    """
    if other.host_limit is None:
        return False
    if estimate.memory.reserved > other.memory.reserved:
        return False
    saved = other.host.running - estimate.host.running
    return saved >= CLEARLY_LESS * other.host_limit


def correct_answer(answer: Answer, probes: tuple[Probe, ...]) -> Answer:
    """Return the answer with all estimates corrected, ranked and refused anew.

    A probe is corrected by its own factors, and other candidates by the mean of the factors. A probe
    that failed is refused.
    """
    factors = {probe.name: probe.factors for probe in probes if probe.factors is not None}
    failed = {probe.name: probe.failed for probe in probes if probe.failed}
    common = mean_factors(factors.values())
    named = [(candidate.name, candidate) for candidate in answer.ranked]
    without_candidates = []
    for refused in answer.refused:
        if refused.best is None:
            without_candidates.append(refused)
        else:
            named.append((refused.name, refused.best))
    corrected_candidates = []
    for name, candidate in named:
        own = factors.get(candidate.name, common)
        corrected_one = replace(candidate, estimate=correct_estimate(candidate.estimate, own))
        if candidate.name in failed:
            # A probe is one plan, so its family is not what failed.
            name = candidate.name
        corrected_candidates.append((name, corrected_one))
    question = replace(answer.question, correction=common)
    emptied = replace(answer, question=question, refused=tuple(without_candidates), probes=probes)
    return rank_again(emptied, corrected_candidates, failed)


def rank_again(
    answer: Answer, named: Iterable[tuple[str, Candidate]], failed: Mapping[str, str]
) -> Answer:
    """Return the answer with these candidates in place of its own.

    `named`: each with the name under which it is refused if it does not fit. `failed`: reasons for
    which candidates are refused, by their names.
    """
    ranked: list[Candidate] = []
    refused = list(answer.refused)
    for name, candidate in named:
        reason = failed.get(candidate.name)
        if not reason and candidate.estimate.verdict == "no":
            reason = why_not(candidate.estimate)
        if reason:
            refused.append(Refused(name, reason, candidate))
        else:
            ranked.append(candidate)
    return replace(answer, ranked=tuple(best_first(ranked)), refused=tuple(refused))


def require_here(cluster: Cluster) -> None:
    """Raise EnvironmentFault if `cluster` is not this machine."""
    if cluster.is_this_machine:
        return
    size = f"{cluster.world_size} × {cluster.device.name}"
    raise EnvironmentFault(
        f"the cluster to plan for ({size}) is not this machine, so nothing can be tried on it",
        where="--probe",
        fix="leave --probe out, or run it there without --cluster",
    )

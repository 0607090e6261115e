"""Batch arithmetic: global samples = micro-batch × accumulation × data ranks, whichever side the user gave. Of rollouts: minibatches ×
global samples episodes each, trained on `epochs` times. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from drumline.config.algorithm import AlgorithmSpec, RolloutSpec
from drumline.config.config import BatchConfig, Config
from drumline.config.mesh import divisors
from drumline.config.section import passes
from drumline.errors import PlanError
from drumline.plan.plan import BatchPlan, DataPlan
from drumline.system.output import plural

# With only the global batch given, a device takes as many samples at once as fit into this many tokens: enough to keep
# matrix products busy, small enough for the activations of a 1B model on a 24 GB card.
TOKENS_AT_ONCE = 4096
IMAGE_TOKENS = 128  # an image counts as this many


def resolve_batch(
    config: Config,
    data_ranks: int,
    in_flight: int = 1,
    batch: BatchConfig | None = None,
    why: list[str] | None = None,
) -> BatchPlan:
    """The batch of the run. `in_flight`: accumulation to choose at least, where it is open. `batch`: in the place of the config's. `why`
    gets a line for each number that was chosen. Raises PlanError, with the arithmetic and the nearest valid values, where the numbers do
    not go together."""
    why = [] if why is None else why
    batch, rows_per_sample = batch or config.batch, config.algorithm.rows_per_sample
    tokens = (IMAGE_TOKENS if config.images_alone else config.data.max_length) * rows_per_sample
    total, micro, accumulation = batch.global_samples, batch.micro_batch, batch.accumulation
    ranks = plural(data_ranks, "data rank")
    if batch.global_tokens is not None:
        unit = (
            "data.max_length" if rows_per_sample == 1 else f"{rows_per_sample} × data.max_length ="
        )
        what = f"global_tokens {batch.global_tokens} is not a multiple of {unit} {tokens}"
        total = _quotient(batch.global_tokens, tokens, what, "batch.global_tokens", "nearest: {}")
    if total is None:
        micro = micro or 1
        accumulation = accumulation or default_rounds(
            config.algorithm, micro * data_ranks, in_flight
        )
        total = micro * accumulation * data_ranks
        why.append(
            f"global batch follows the devices: {micro} micro-batch × {accumulation} accumulation × {ranks} = {total}"
        )
    elif micro and accumulation:
        if (product := micro * accumulation * data_ranks) != total:
            what = f"global batch {total} is not micro_batch {micro} × accumulation {accumulation} × {ranks} = {product}"
            raise PlanError(
                what, where="batch", fix="leave one of the three out, or make both sides equal"
            )
    elif micro or accumulation:
        name, given = ("micro_batch", micro) if micro else ("accumulation", accumulation or 1)
        other = _divide(total, given * data_ranks, f"{name} {given} × {ranks}")
        micro, accumulation = micro or other, accumulation or other
    else:
        per_rank = _divide(total, data_ranks, ranks)
        fits = [
            m
            for m in divisors(per_rank)
            if m * tokens <= TOKENS_AT_ONCE and per_rank // m >= in_flight
        ]
        micro = max(fits, default=1)
        accumulation = per_rank // micro
        why.append(
            f"micro-batch {micro}: the largest divisor of {per_rank} samples a rank within {TOKENS_AT_ONCE} tokens at once"
            + (f" that leaves {in_flight} micro-batches for the pipeline" if in_flight > 1 else "")
        )
    assert micro and accumulation
    if total == 1 and config.algorithm.pairs_with_previous:
        what = "a global batch of 1 sample has no answer to another prompt, which this loss compares with"
        raise PlanError(what, where="batch", fix="use batch.global_samples=2 or more")
    return BatchPlan(
        global_samples=total,
        micro_batch=micro,
        accumulation=accumulation,
        eval_micro_batch=config.eval.micro_batch or micro,
        rows_per_sample=rows_per_sample,
    )


def batches(config: Config, data_ranks: int, world: int, least: int) -> Iterator[BatchPlan]:
    """Each batch that the user leaves open on this many data ranks, the smallest micro-batch first. Where no global batch is set, it is
    that of plain data parallel over all `world` processes, so that layouts compare; where micro-batch and accumulation are set, that of the
    data ranks. `least`: micro-batches in flight. Raises PlanError where the numbers do not go together."""
    batch = config.batch
    if (
        batch.global_samples is None
        and batch.global_tokens is None
        and not (batch.micro_batch and batch.accumulation)
    ):
        total = (batch.micro_batch or 1) * (batch.accumulation or 1) * world
        total *= default_rounds(config.algorithm, total)
        batch = BatchConfig(
            global_samples=total, micro_batch=batch.micro_batch, accumulation=batch.accumulation
        )
    first = resolve_batch(config, data_ranks, least, batch)
    if batch.micro_batch or batch.accumulation:
        yield first
        return
    per_rank = first.global_samples // data_ranks
    for micro in divisors(per_rank):
        held_out = config.eval.micro_batch or micro
        yield first.model_copy(
            update={
                "micro_batch": micro,
                "accumulation": per_rank // micro,
                "eval_micro_batch": held_out,
            }
        )


def default_rounds(algorithm: AlgorithmSpec, samples: int, least: int = 1) -> int:
    """Return how often to take `samples`, `least` times or more, for a global batch that the algorithm accepts."""
    if samples == 1 and algorithm.pairs_with_previous:
        least = max(least, 2)
    return least_rounds(samples, algorithm.samples_in_turn, least)


def least_rounds(samples: int, multiple: int, least: int = 1) -> int:
    """How often to take so many samples, `least` times or more, for a multiple of `multiple`."""
    whole = multiple // math.gcd(samples, multiple)
    return whole * math.ceil(least / whole)


def nearest(number: int, by: int) -> str:
    """The multiples of `by` next to a number that is none."""
    return " or ".join(map(str, sorted({max(1, number // by) * by, (number // by + 1) * by})))


def _divide(total: int, by: int, names: str) -> int:
    what = f"global batch of {total} samples does not divide by {names}: {total} / {by} = {total / by:.2f}"
    return _quotient(total, by, what, "batch", "nearest global batch: {}")


def _quotient(total: int, by: int, what: str, where: str, fix: str) -> int:
    """Raises PlanError where `by` does not divide; `fix` gets the nearest multiples."""
    quotient, rest = divmod(total, by)
    if rest or not quotient:
        raise PlanError(what, where=where, fix=fix.format(nearest(total, by)))
    return quotient


def in_steps(config: Config, batch: BatchPlan, data: DataPlan | None, why: list[str]) -> Config:
    """The config with steps where `every` counts epochs; as it is while the data is not prepared."""
    for name in ("checkpoint", "eval"):
        section = getattr(config, name)
        if (epochs := passes(section.every)) is None or data is None:
            continue
        every = max(1, round(epochs * _steps_of_epoch(config, batch, data)))
        why.append(f"{name}.every {section.every}: {every} steps")
        config = config.model_copy(update={name: section.model_copy(update={"every": every})})
    return config


def _steps_of_epoch(config: Config, batch: BatchPlan, data: DataPlan) -> float:
    rollout = config.algorithm.rollout
    if rollout is None:
        return data.epoch / batch.global_samples
    return (
        rollout.steps_in_turn
        * data.epoch
        * rollout.group_size
        / (rollout.minibatches * batch.global_samples)
    )


def steps_of_rollouts(
    config: Config, algorithm: RolloutSpec, batch: BatchPlan, data: DataPlan | None, why: list[str]
) -> int | None:
    """Optimizer steps of the run; None while the data is not prepared. Raises PlanError where groups or rollouts do not come out whole."""
    episodes, group = algorithm.minibatches * batch.global_samples, algorithm.group_size
    what = f"a rollout of {algorithm.minibatches} minibatches × {batch.global_samples} episodes does not divide into groups of {group}"
    fix = "choose batch.global_samples × algorithm.minibatches as {}"
    prompts = _quotient(episodes, group, what, "algorithm.group_size", fix)
    each = algorithm.steps_in_turn
    why.append(
        f"a rollout: {prompts} prompts × {group} = {episodes} episodes, learned from in {algorithm.epochs} epochs × {algorithm.minibatches}"
        f" minibatches = {each} steps"
    )
    if config.run.steps is None:
        return (
            None
            if data is None
            else each * max(1, math.ceil(config.run.epochs * data.epoch / prompts))
        )
    steps, rollout = (
        config.run.steps,
        f"{algorithm.epochs} epochs × {algorithm.minibatches} minibatches = {each} steps",
    )
    _quotient(
        steps,
        each,
        f"{steps} steps end within a rollout, which has {rollout}",
        "run.steps",
        "nearest: {}",
    )
    return steps

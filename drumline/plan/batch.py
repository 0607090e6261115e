"""Compute the sizes of batches and the number of steps. Pure functions.

global samples = micro-batch × accumulation × data ranks; what the user leaves open is computed. A
rollout has minibatches × global samples, and the policy learns from each `epochs` times. A sample of
a rollout is an episode, or a pair of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from drumline.config.algorithm import AlgorithmSpec, SamplingSpec
from drumline.config.config import BatchConfig, Config
from drumline.config.mesh import divisors
from drumline.config.section import passes
from drumline.errors import PlanError
from drumline.plan.plan import BatchPlan, DataPlan
from drumline.system.output import plural

# If only the global batch is given, a device takes as many samples at once as fit into this many
# tokens: enough to keep matrix products busy, few enough for the activations of a 1B model on a
# 24 GB card.
TOKENS_AT_ONCE = 4096
# An image counts as this many tokens.
IMAGE_TOKENS = 128


def resolve_batch(
    config: Config,
    data_ranks: int,
    least_accumulation: int = 1,
    batch: BatchConfig | None = None,
    why: list[str] | None = None,
) -> BatchPlan:
    """Return the batch sizes that satisfy global samples = micro-batch × accumulation × data ranks.

    What the user left open is chosen here, and `why` gets a line for it.

    Args:
        config: The config of the run.
        data_ranks: Ranks that take different samples.
        least_accumulation: The least accumulation to choose (stages.least_accumulation).
        batch: Sizes to use in place of the config's.
        why: The list for the lines about what was chosen.

    Raises PlanError, with the arithmetic and the nearest valid values, if the sizes do not agree.
    """
    if why is None:
        why = []
    if batch is None:
        batch = config.batch
    algorithm = config.algorithm
    micro = batch.micro_batch
    accumulation = batch.accumulation
    sample_tokens = _tokens_of_sample(config)
    ranks = plural(data_ranks, "data rank")
    total = _given_global_samples(config, batch, sample_tokens)
    if total is None:
        micro, accumulation = _default_factors(
            batch, algorithm, data_ranks, least_accumulation, why
        )
        total = micro * accumulation * data_ranks
    elif micro and accumulation:
        _require_product(total, micro, accumulation, data_ranks)
    elif micro:
        factors = f"micro_batch {micro} × {ranks}"
        accumulation = _divide_global_batch(total, micro * data_ranks, factors)
    elif accumulation:
        factors = f"accumulation {accumulation} × {ranks}"
        micro = _divide_global_batch(total, accumulation * data_ranks, factors)
    else:
        per_rank = _divide_global_batch(total, data_ranks, ranks)
        micro = _largest_fitting_micro_batch(per_rank, sample_tokens, least_accumulation, why)
        accumulation = per_rank // micro
    _require_another_prompt(total, algorithm)
    return BatchPlan(
        global_samples=total,
        micro_batch=micro,
        accumulation=accumulation,
        eval_micro_batch=config.eval.micro_batch or micro,
        rows_per_sample=algorithm.rows_per_sample,
    )


def _tokens_of_sample(config: Config) -> int:
    """Return the number of tokens that a sample counts as, its padding included."""
    row_tokens = config.data.max_length
    if config.images_alone:
        row_tokens = IMAGE_TOKENS
    return row_tokens * config.algorithm.rows_per_sample


def _given_global_samples(config: Config, batch: BatchConfig, sample_tokens: int) -> int | None:
    """Return the global batch that the user set, in samples; None if it is left open.

    Raises PlanError if batch.global_tokens is not a multiple of `sample_tokens`.
    """
    if batch.global_tokens is None:
        return batch.global_samples
    rows_per_sample = config.algorithm.rows_per_sample
    unit = f"data.max_length {sample_tokens}"
    if config.images_alone:
        unit = f"the {sample_tokens} tokens that an image counts as"
    elif rows_per_sample != 1:
        unit = f"{rows_per_sample} × data.max_length = {sample_tokens}"
    what = f"global_tokens {batch.global_tokens} is not a multiple of {unit}"
    return _divide_exactly(
        batch.global_tokens, sample_tokens, what, "batch.global_tokens", "nearest: {}"
    )


def _default_factors(
    batch: BatchConfig,
    algorithm: AlgorithmSpec,
    data_ranks: int,
    least_accumulation: int,
    why: list[str],
) -> tuple[int, int]:
    """Return micro-batch and accumulation if no global batch is set.

    An open micro-batch is 1. An open accumulation is the least that the pipeline and the algorithm
    accept.
    """
    micro = batch.micro_batch or 1
    accumulation = batch.accumulation
    if not accumulation:
        accumulation = default_accumulation(algorithm, micro * data_ranks, least_accumulation)
    total = micro * accumulation * data_ranks
    ranks = plural(data_ranks, "data rank")
    why.append(
        f"global batch follows the devices: {micro} micro-batch × {accumulation} accumulation × {ranks} = {total}"
    )
    return micro, accumulation


def _require_product(total: int, micro: int, accumulation: int, data_ranks: int) -> None:
    """Raise PlanError if the global batch is not the product of its three factors."""
    product = micro * accumulation * data_ranks
    if product == total:
        return
    ranks = plural(data_ranks, "data rank")
    what = f"global batch {total} is not micro_batch {micro} × accumulation {accumulation} × {ranks} = {product}"
    fix = "leave one of the three out, or make both sides equal"
    raise PlanError(what, where="batch", fix=fix)


def _largest_fitting_micro_batch(
    per_rank: int, sample_tokens: int, least_accumulation: int, why: list[str]
) -> int:
    """Return the largest micro-batch within TOKENS_AT_ONCE that leaves `least_accumulation` micro-batches.

    It divides `per_rank`, the samples of a rank in one optimizer step. If no divisor fits, it is 1.
    """
    micro = 1
    for divisor in divisors(per_rank):
        fits = divisor * sample_tokens <= TOKENS_AT_ONCE
        if fits and per_rank // divisor >= least_accumulation:
            micro = divisor
    line = f"micro-batch {micro}: the largest divisor of {per_rank} samples a rank within {TOKENS_AT_ONCE} tokens at once"
    if least_accumulation > 1:
        line += f" that leaves {least_accumulation} micro-batches for the pipeline"
    why.append(line)
    return micro


def _require_another_prompt(total: int, algorithm: AlgorithmSpec) -> None:
    """Raise PlanError if the loss compares two samples, and the global batch has only one."""
    if total == 1 and algorithm.needs_mismatched_pairs:
        what = "a global batch of 1 sample has no answer to another prompt, which this loss compares with"
        raise PlanError(what, where="batch", fix="use batch.global_samples=2 or more")


def possible_batches(
    config: Config, data_ranks: int, world: int, least: int
) -> Iterator[BatchPlan]:
    """Yield each batch that the user's settings allow, the smallest micro-batch first.

    If no global batch is set, it is that of data parallelism over all processes, so that layouts can
    be compared. If micro-batch and accumulation are both set, it follows the data ranks. Batches with
    less accumulation than `least` are yielded, too; `stages.plan_pipeline` refuses those that the
    schedule cannot run.

    Args:
        config: The config of the run.
        data_ranks: Ranks that take different samples.
        world: Number of all processes.
        least: The least accumulation to choose if only the micro-batch is set.

    Raises PlanError if the sizes do not agree.
    """
    batch = config.batch
    has_global_batch = batch.global_samples is not None or batch.global_tokens is not None
    has_both_factors = bool(batch.micro_batch and batch.accumulation)
    if not has_global_batch and not has_both_factors:
        batch = _batch_of_data_parallel(config, world)
    first = resolve_batch(config, data_ranks, least, batch)
    if batch.micro_batch or batch.accumulation:
        yield first
        return
    per_rank = first.global_samples // data_ranks
    for micro in divisors(per_rank):
        sizes = {
            "micro_batch": micro,
            "accumulation": per_rank // micro,
            "eval_micro_batch": config.eval.micro_batch or micro,
        }
        yield first.model_copy(update=sizes)


def _batch_of_data_parallel(config: Config, world: int) -> BatchConfig:
    """Return the settings with the global batch of data parallelism over all processes."""
    batch = config.batch
    total = (batch.micro_batch or 1) * (batch.accumulation or 1) * world
    total *= default_accumulation(config.algorithm, total)
    return BatchConfig(
        global_samples=total, micro_batch=batch.micro_batch, accumulation=batch.accumulation
    )


def default_accumulation(algorithm: AlgorithmSpec, samples: int, least: int = 1) -> int:
    """Return an accumulation that the algorithm accepts, at least `least`.

    `samples`: the samples of all data ranks in one micro-batch.
    """
    if samples == 1 and algorithm.needs_mismatched_pairs:
        least = max(least, 2)
    return repetitions_to_multiple(samples, algorithm.batch_multiple, least)


def repetitions_to_multiple(samples: int, multiple: int, least: int = 1) -> int:
    """Return the smallest number n ≥ `least` with which n × `samples` is a multiple of `multiple`."""
    step = multiple // math.gcd(samples, multiple)
    return step * math.ceil(least / step)


def nearest_multiples(number: int, by: int) -> str:
    """Return the multiples of `by` below and above a number, as text: `8 or 16`."""
    below = max(1, number // by) * by
    above = (number // by + 1) * by
    if below == above:
        return str(below)
    return f"{below} or {above}"


def _divide_global_batch(total: int, by: int, factors: str) -> int:
    """Return the global batch divided by `by`, the product of some of its factors.

    `factors`: these factors in words. Raises PlanError if the batch is not a multiple of them.
    """
    what = f"global batch of {total} samples does not divide by {factors}: {total} / {by} = {total / by:.2f}"
    return _divide_exactly(total, by, what, "batch", "nearest global batch: {}")


def _divide_exactly(total: int, by: int, what: str, where: str, fix: str) -> int:
    """Return total / by.

    Args:
        total: The number to divide.
        by: The divisor, above 0.
        what: The error's message.
        where: The key that the error is about.
        fix: The error's advice. Its `{}` is replaced by the nearest multiples.

    Raises PlanError, with the nearest multiples in `fix`, if it is not a whole number above 0.
    """
    quotient, rest = divmod(total, by)
    if rest or not quotient:
        raise PlanError(what, where=where, fix=fix.format(nearest_multiples(total, by)))
    return quotient


def resolve_epochs(
    config: Config, batch: BatchPlan, data: DataPlan | None, why: list[str]
) -> Config:
    """Return the config with `every` of checkpoints and evaluations in steps if it is in epochs.

    `why` gets a line for each. Without prepared data the config is returned as it is. A stream has no
    epochs, and its config refuses them.
    """
    if data is None:
        return config
    for name in ("checkpoint", "eval"):
        section = getattr(config, name)
        epochs = passes(section.every)
        if epochs is None:
            continue
        every = max(1, round(epochs * _steps_of_epoch(config, batch, data)))
        why.append(f"{name}.every {section.every}: {every} steps")
        config = config.model_copy(update={name: section.model_copy(update={"every": every})})
    return config


def _steps_of_epoch(config: Config, batch: BatchPlan, data: DataPlan) -> float:
    """Return the number of optimizer steps in an epoch, which may be a fraction."""
    rollout = config.algorithm.rollout
    if rollout is None:
        return data.epoch / batch.global_samples
    episodes_of_epoch = data.epoch * rollout.group_size
    episodes_of_rollout = rollout.episodes_of_rollout(batch.global_samples)
    return rollout.steps_per_rollout * episodes_of_epoch / episodes_of_rollout


def steps_of_rollouts(
    config: Config, algorithm: SamplingSpec, batch: BatchPlan, data: DataPlan | None, why: list[str]
) -> int | None:
    """Return the optimizer steps of a run with rollouts; None if the data is not prepared.

    `why` gets a line with the sizes of a rollout. Raises PlanError if a rollout does not divide into
    groups, or if the run ends within a rollout.
    """
    minibatches = algorithm.minibatches
    group = algorithm.group_size
    episodes = algorithm.episodes_of_rollout(batch.global_samples)
    what = f"a rollout of {minibatches} minibatches × {batch.global_samples} episodes does not divide into groups of {group}"
    fix = "choose batch.global_samples × algorithm.minibatches as {}"
    prompts = _divide_exactly(episodes, group, what, "algorithm.group_size", fix)
    steps_of_rollout = algorithm.steps_per_rollout
    why.append(
        f"a rollout: {prompts} prompts × {group} = {episodes} episodes, learned from in {algorithm.epochs} epochs × {minibatches}"
        f" minibatches = {steps_of_rollout} steps"
    )
    steps = config.run.steps
    if steps is not None:
        sizes = f"{algorithm.epochs} epochs × {minibatches} minibatches = {steps_of_rollout} steps"
        what = f"{steps} steps end within a rollout, which has {sizes}"
        _divide_exactly(steps, steps_of_rollout, what, "run.steps", "nearest: {}")
        return steps
    if data is None:
        return None
    rollouts = max(1, math.ceil(config.run.epochs * data.epoch / prompts))
    return steps_of_rollout * rollouts

"""The composition root's part for runs on rollouts: config → objective, models besides the policy, and the stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from drumline.algorithms.base import Algorithm
from drumline.core.plan import Plan
from drumline.core.rollouts import RolloutSpec
from drumline.data.cache import TokenCache
from drumline.data.stream import GlobalBatch
from drumline.dist.start import Ranks
from drumline.models.templates import special_ids, turn_tail
from drumline.models.tokenizer import pad_token_id
from drumline.parallel.engine import CompositeEngine, Engine
from drumline.rl.curriculum import Curriculum
from drumline.rl.reading import Readers, Reading, last_scores, log_probs_of, scores_after, values_of
from drumline.rl.rewards import Rewards, reward_names
from drumline.rl.rollouts import Rollouts
from drumline.rl.sampler_check import SamplerCheck, probe_prompts
from drumline.strategies.build import build_engine
from drumline.telemetry.events import Emit
from drumline.train.sampling import Sampling, tokenizer_of
from drumline.train.state import TrainState
from drumline.train.streams import fixed_width


def reinforced(
    plan: Plan,
    algorithm: RolloutSpec,
    ranks: Ranks,
    engine: Engine,
    state: TrainState,
    device: str,
    emit: Emit,
) -> tuple[Algorithm, Rollouts, Iterator[GlobalBatch]]:
    """The objective, the rollouts, and their stream from `state` on. Collective: models besides the policy are built here."""
    config, data = plan.config, plan.data
    assert data is not None, "workers get plans of prepared data"
    tokenizer = tokenizer_of(plan)
    prompts = TokenCache.open(Path(data.train_cache))
    domains = [prompts.meta(sample)["domain"] for sample in range(len(prompts))]
    place = plan.mesh.data_rank(ranks.rank), plan.mesh.counts(ranks.rank)
    reading = Reading(plan, *place, device, pad_token_id(tokenizer), fixed_width(plan))
    objective = algorithm.build()
    read = log_probs_of(algorithm.loss_chunk, algorithm.generator.temperature)
    check = SamplerCheck(
        config=algorithm.generator,
        read=partial(reading.read, engine, read=read),
        prompts=probe_prompts(
            tokenizer,
            special_ids(tokenizer),
            ranks.world_size,
            config.data.max_length,
            algorithm.generator,
        ),
        precision=product_precision(plan),
        is_new=state.step == 0,
        state=state.stream.get("sampler"),
    )
    sample = Sampling(
        plan,
        algorithm.generator,
        engine,
        tokenizer,
        device,
        ahead=algorithm.lookahead > 0,
        check=check,
    )
    rollouts = Rollouts(
        plan=plan,
        algorithm=algorithm,
        prompts=prompts,
        held_out={name: TokenCache.open(folder) for name, folder in data.eval_caches.items()},
        curriculum=Curriculum(
            algorithm.curriculum, domains, config.run.seed, config.data.order == "shuffle"
        ),
        kl=objective.kl,
        sample=sample,
        begin=sample.begin,
        check=check,
        rewards=Rewards(algorithm.rewards, Path(plan.base_dir), algorithm.reward_workers),
        reading=reading,
        readers=build_readers(plan, algorithm, engine, reading, turn_tail(tokenizer), device),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        emit=emit,
    )
    return objective, rollouts, rollouts.stream(state.step, state.position, state.stream)


def product_precision(plan: Plan) -> str:
    """The type that the policy's matrix products round to, as `sampler_check.expected_rounding_gap` takes it."""
    is_tf32 = plan.precision == "fp32" and plan.device == "cuda" and plan.config.precision.tf32
    if is_tf32:
        return "fp16"  # as many bits
    return plan.precision


def build_readers(
    plan: Plan,
    algorithm: RolloutSpec,
    engine: Engine,
    reading: Reading,
    tail: list[int],
    device: str,
) -> Readers:
    """What reads numbers of episodes from each model. `tail`: as `last_scores` takes it. Collective: the frozen models are built."""
    log_probs = log_probs_of(algorithm.loss_chunk, algorithm.generator.temperature)
    values = algorithm.head == "valued"
    both = log_probs_of(algorithm.loss_chunk, algorithm.generator.temperature, values)
    referenced = algorithm.kl.coefficient > 0
    needed = values or referenced or not algorithm.on_policy
    reference = None
    if "reference" in plan.roles:
        reference = partial(
            reading.read, build_engine(plan, device, role="reference"), read=log_probs
        )
    elif referenced:
        reference = partial(reading.read, engine, read=log_probs, adapter=False)
    value = (
        partial(reading.read, engine.engines["value"], read=values_of)
        if isinstance(engine, CompositeEngine)
        else None
    )
    of_models = [
        name
        for name, reward in zip(reward_names(algorithm.rewards), algorithm.rewards, strict=True)
        if reward.kind == "model"
    ]
    roles = [role for role in plan.roles if role.startswith("reward")]
    engines = {
        name: build_engine(plan, device, role=role)
        for name, role in zip(of_models, roles, strict=True)
    }
    return Readers(
        policy=partial(reading.read, engine, read=both) if needed else None,
        reference=reference,
        value=value,
        rewards={
            name: partial(
                last_scores, partial(reading.read, judge, read=scores_after), tail, reading.width
            )
            for name, judge in engines.items()
        },
    )

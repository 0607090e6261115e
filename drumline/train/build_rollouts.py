"""Build what a run on rollouts (RL) trains on: algorithm, auxiliary models, rollouts, and batches.

It is a part of the composition root, `train.build`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from drumline.algorithms.base import Algorithm
from drumline.config.algorithm import SamplingSpec
from drumline.data.batches import collate_episodes
from drumline.data.cache import TokenCache
from drumline.data.collators import find_vision
from drumline.data.images import collate_vision_episodes
from drumline.data.order import GlobalBatch
from drumline.data.taught import collate_taught_episodes
from drumline.dist.reduce import SumReducer
from drumline.dist.start import RankInfo
from drumline.engine.build import build_engine
from drumline.engine.engine import CompositeEngine, Engine
from drumline.models.templates import special_ids, turn_tail
from drumline.models.tokenizer import pad_token_id
from drumline.plan.plan import Plan
from drumline.rl.conversations import Conversations
from drumline.rl.curriculum import Curriculum
from drumline.rl.environments import Environments
from drumline.rl.generate import StopRules
from drumline.rl.reading import (
    CollateEpisodes,
    EpisodeReader,
    ModelReaders,
    ReadEpisodes,
    TeacherComparison,
    last_scores,
    log_prob_reader,
    read_scores,
    read_values,
)
from drumline.rl.rewards import Rewards, reward_names
from drumline.rl.rollouts import Rollouts
from drumline.rl.sampler_check import SamplerCheck, probe_prompts
from drumline.rl.turns import ChatTurns
from drumline.telemetry.events import Emit
from drumline.train.sampling import TextGeneration, tokenizer_of
from drumline.train.served_teacher import RolloutTeacher, connect
from drumline.train.state import TrainState
from drumline.train.teachers import add_teacher, build_teacher, with_teacher


def build_rollouts(
    plan: Plan,
    spec: SamplingSpec,
    ranks: RankInfo,
    engine: Engine,
    state: TrainState,
    reducer: SumReducer,
    emit: Emit,
) -> tuple[Algorithm, Rollouts, Iterator[GlobalBatch]]:
    """Return the algorithm, the rollouts, and their batches from `state` on.

    `spec`: the section `algorithm` of the config. Collective: the auxiliary models are built here.
    """
    config = plan.config
    device = reducer.device
    data = plan.data
    assert data is not None, "workers get plans of prepared data"
    tokenizer = tokenizer_of(plan)
    prompts = TokenCache.open(Path(data.train_cache))
    domains = [prompts.meta(sample)["domain"] for sample in range(len(prompts))]
    vision = find_vision(plan)
    collate: CollateEpisodes = collate_episodes
    if vision is not None:
        collate = partial(collate_vision_episodes, vision=vision)
    elif spec.teaching is not None:
        collate = collate_taught_episodes
    episode_reader = EpisodeReader(
        plan,
        plan.mesh.data_rank(ranks.rank),
        plan.mesh.is_counted(ranks.rank),
        device,
        pad_token_id(tokenizer),
        plan.fixed_width,
        collate,
    )
    algorithm = spec.build()
    extract_log_probs = log_prob_reader(spec.loss_chunk, spec.generator.temperature)
    check = SamplerCheck(
        config=spec.generator,
        # Runs the policy over episodes, without gradients.
        read=partial(episode_reader.read, engine, read=extract_log_probs),
        prompts=probe_prompts(
            tokenizer,
            special_ids(tokenizer),
            ranks.world_size,
            config.data.max_length,
            spec.generator,
        ),
        precision=product_precision(plan),
        is_new=state.step == 0,
        state=state.stream.get("sampler"),
    )
    generate = TextGeneration(
        plan,
        spec.generator,
        engine,
        tokenizer,
        device,
        samples_ahead=spec.lookahead > 0,
        check=check,
        vision=vision,
    )
    # Servers may load weights while a rollout is prepared.
    preparing_reader = replace(episode_reader, background=generate)
    held_out: dict[str, TokenCache] = {}
    for name, folder in data.eval_caches.items():
        held_out[name] = TokenCache.open(folder)
    shuffles = config.data.order == "shuffle"
    segment_rules: StopRules | None = None
    if spec.segments > 1:
        # A generator finds the tokens that end a completion by itself.
        segment_rules = StopRules(frozenset(), spec.generator.stop, tokenizer)
    rollouts = Rollouts(
        plan=plan,
        algorithm=spec,
        prompts=prompts,
        held_out=held_out,
        curriculum=Curriculum(spec.curriculum, domains, config.run.seed, shuffles),
        kl=algorithm.kl,
        sample=generate,
        sample_ahead=generate.sample_ahead,
        start_next_if_free=generate.start_next_if_free,
        finish_comparison=generate.finish_comparison,
        sampler_check=check,
        lost_servers=generate.lost_servers,
        rewards=Rewards(spec.rewards, Path(plan.base_dir), spec.reward_workers),
        reading=episode_reader,
        readers=build_scorers(plan, spec, engine, preparing_reader, turn_tail(tokenizer), device),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        emit=emit,
        conversations=build_conversations(plan, spec, generate),
        segment_rules=segment_rules,
    )
    batches = rollouts.stream(state.step, state.position, state.stream)
    teaching = spec.teaching
    if teaching is None:
        return algorithm, rollouts, batches
    if teaching.served_teacher is None:
        ask = build_teacher(plan, engine, device).ask
        rollouts.comparison = TeacherComparison(
            algorithm, engine, episode_reader, partial(add_teacher, ask=ask), reducer
        )
        return algorithm, rollouts, with_teacher(batches, ask)
    servers = connect(plan, teaching.served_teacher)
    # Held-out episodes are asked about between the steps of a rollout.
    of_training = RolloutTeacher(servers, device)
    of_held_out = RolloutTeacher(servers, device)
    rollouts.ask_teacher = of_training.ask_about
    rollouts.comparison = TeacherComparison(
        algorithm,
        engine,
        episode_reader,
        partial(add_teacher, ask=of_held_out.ask),
        reducer,
        of_held_out.ask_about,
    )
    rollouts.lost_servers = lambda: {**generate.lost_servers(), **servers.pool.lost}
    return algorithm, rollouts, with_teacher(batches, of_training.ask)


def build_conversations(
    plan: Plan, spec: SamplingSpec, generate: TextGeneration
) -> Conversations | None:
    """Return what plays episodes with the config's environment; None without one.

    `generate` then plays the episodes that are sampled ahead.
    """
    config = spec.environment
    if config is None:
        return None
    environments = Environments(config, Path(plan.base_dir))
    tools = environments.tools()
    chat = ChatTurns(generate.tokenizer, plan.config.data, tools, reads_calls=bool(tools))
    conversations = Conversations(
        sample=generate,
        sample_again=generate.sample_again,
        environments=environments,
        chat=chat,
        seed=plan.config.run.seed,
        turns=config.turns,
        max_new_tokens=spec.generator.max_new_tokens,
        max_tokens=config.max_tokens,
        max_length=plan.config.data.max_length,
        scores_at_end=config.scores_at_end,
        finish_background=generate.finish_background,
    )
    generate.play_own = conversations.play_own
    return conversations


def product_precision(plan: Plan) -> str:
    """Return the precision of the policy's matrix products, for `sampler_check`'s rounding gap."""
    is_fp32_on_gpu = plan.precision == "fp32" and plan.device == "cuda"
    if is_fp32_on_gpu and plan.config.precision.tf32:
        # TF32 has as many bits of precision as fp16.
        return "fp16"
    return plan.precision


def build_scorers(
    plan: Plan,
    spec: SamplingSpec,
    engine: Engine,
    episode_reader: EpisodeReader,
    tail: list[int],
    device: str,
) -> ModelReaders:
    """Return for each model the function that computes its numbers for all episodes of a rollout.

    Each runs its model without gradients, and returns log-probabilities, values or scores.

    Collective: the frozen models are built. `tail`: as `last_scores` takes it.
    """
    temperature = spec.loss_temperature
    log_probs = log_prob_reader(spec.loss_chunk, temperature)
    has_value_head = spec.head == "valued"

    # The policy runs over the episodes before the update if the loss or the reward needs its
    # numbers from then.
    policy: ReadEpisodes | None = None
    if has_value_head or spec.measures_divergence or spec.needs_old_log_probs:
        with_values = log_prob_reader(spec.loss_chunk, temperature, has_value_head)
        policy = partial(episode_reader.read, engine, read=with_values)

    reference: ReadEpisodes | None = None
    if "reference" in plan.roles:
        frozen = build_engine(plan, device, role="reference")
        reference = partial(episode_reader.read, frozen, read=log_probs)
    elif spec.has_reference:
        # The policy without its adapter is the model before training.
        reference = partial(episode_reader.read, engine, read=log_probs, adapter=False)

    # A value model of its own is trained beside the policy.
    value: ReadEpisodes | None = None
    if isinstance(engine, CompositeEngine):
        value = partial(episode_reader.read, engine.engines["value"], read=read_values)

    return ModelReaders(
        policy=policy,
        reference=reference,
        value=value,
        rewards=_build_reward_scorers(plan, spec, episode_reader, tail, device),
    )


def _build_reward_scorers(
    plan: Plan, spec: SamplingSpec, episode_reader: EpisodeReader, tail: list[int], device: str
) -> dict[str, ReadEpisodes]:
    """Return for each reward by a model, by its name, the function that scores episodes.

    Collective: the models are built.
    """
    names = []
    for name, reward in zip(reward_names(spec.rewards), spec.rewards, strict=True):
        if reward.kind == "model":
            names.append(name)
    # The plan has a role for each reward by a model, in the order of the config.
    roles = [role for role in plan.roles if role.startswith("reward")]
    scorers: dict[str, ReadEpisodes] = {}
    for name, role in zip(names, roles, strict=True):
        reward_model = build_engine(plan, device, role=role)
        score_tokens = partial(episode_reader.read, reward_model, read=read_scores)
        scorers[name] = partial(last_scores, score_tokens, tail, episode_reader.width)
    return scorers

"""Make the plan of a run, and claim its folder.

All of this runs once, in one process, before any rank builds its model: in our launcher, or on
rank 0 if another launcher has started the ranks.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drumline.checkpoint.load import named_state, state_to_resume
from drumline.checkpoint.memory import require_room
from drumline.checkpoint.remote import Store, require_unused
from drumline.checkpoint.retention import recover
from drumline.config.algorithm import SamplingSpec
from drumline.config.config import Config, ScheduleConfig
from drumline.config.load import (
    RefusedChanges,
    Request,
    is_allowed,
    refused_changes,
    saved_config,
    strategy_change,
    to_yaml,
)
from drumline.config.model import Head, ModelConfig
from drumline.config.resume import CHECKPOINTS, Resume
from drumline.config.rollouts import text_argument
from drumline.data import prepare as data_prepare
from drumline.data.fingerprint import what_changed
from drumline.data.samples import identify_samples, read_samples
from drumline.dist.seeds import Draws
from drumline.engine.build import ModuleParts, build_unfilled_module
from drumline.engine.transforms import batch_norms
from drumline.errors import CheckpointError, ConfigError, EnvironmentFault, ModelError, PlanError
from drumline.foreign import disk_errors, require_package
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Machine, detect, free_bytes
from drumline.launch import lease
from drumline.launch.slurm.queue import forget_job
from drumline.models import adapters
from drumline.models import load as models
from drumline.models.attention import use_document_attention
from drumline.models.build import ModelHead, lay_out
from drumline.models.classes import WRITING, order_classes, set_classes
from drumline.models.download import download
from drumline.models.files import weights_digest
from drumline.models.freeze import freeze, trainable_names
from drumline.models.head import require_next_token
from drumline.models.own import find_builder, own_build
from drumline.models.recurrent import describe_layers, separated_layers
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.text_alone import require_same_language_model, require_text_alone
from drumline.models.tokenizer import load_tokenizer
from drumline.models.vision import vision_of
from drumline.plan.explain import default_run_dir, size
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import DataIdentity, DataPlan, Plan, RolePlan
from drumline.plan.resolve import (
    KnownModel,
    describe_batch_norms,
    resolve,
    resolve_device,
    resolve_processes,
)
from drumline.plan.rules import NO_PACKING
from drumline.plan.strategy_engine import engine_spec
from drumline.planner.cluster import cluster_here
from drumline.planner.cost.times import estimate
from drumline.planner.embedding import resolve_embedding
from drumline.planner.faults import MTBF_HOURS, goodput_range, run_under_faults
from drumline.planner.new_tokens import vocabulary_notes, with_trainable_token_embeddings
from drumline.planner.question import (
    FoundModel,
    build_question,
    find_model,
    require_adapter,
    roles_of,
)
from drumline.planner.search.answer import Candidate, Question
from drumline.planner.search.auto import choose, choose_compile
from drumline.planner.search.budget import checkpointing_modes, fit_to_budget
from drumline.planner.seq2seq import resolve_seq2seq
from drumline.planner.sizes import text_notes
from drumline.report.bars import COMPARING, OnProgress, notes, notify_if_slow
from drumline.rl import environments, rewards
from drumline.rl.curriculum import require_domains
from drumline.rl.turns import require_template
from drumline.system import network
from drumline.system.files import temporary_folder, write_whole
from drumline.system.output import plural
from drumline.telemetry.trackers import check_installed, find_callbacks
from drumline.train.state import fallback_folder

# The file that `drumline eval` may have written into the run folder, before there is a run.
EVAL_RESULTS = "eval.json"


def make_plan(request: Request, *, on_progress: OnProgress, dry_run: bool = False) -> Plan:
    """Return the plan of a run: find the model, prepare the data and resolve every number.

    It runs in one process, before any rank builds its model. The cheapest checks come first, so
    that a mistake in the config does not show after an hour of preparing data.

    `dry_run`: nothing is prepared or downloaded. If the data are not prepared, the plan has none.
    """
    config = request.loaded.config
    base_dir = request.loaded.base_dir
    _check_request(request)
    if config.has_own_module:
        return plan_own_module(request, dry_run, on_progress)
    rollout = config.algorithm.rollout
    if config.adapter.kind == "lora":
        require_package("peft", "adapter")
    _check_clients(config)

    # The models. The policy is the model that is trained, with any algorithm.
    policy = find_model(config.model, on_progress, weights=True)
    notes(vocabulary_notes(config, policy))
    config = resolve_seq2seq(config, policy.hf_config, notes)
    config = resolve_embedding(config, policy, notes)
    config = with_trainable_token_embeddings(config, policy)
    if not config.images_alone:
        tokenizer = load_tokenizer(policy.path, config.model)
        models.check_fits(policy.hf_config, tokenizer, config.data.max_length)
        if rollout is not None and rollout.environment is not None:
            require_template(tokenizer, reads_calls=rollout.environment.kind == "tools")
    require_adapter(config, policy)
    roles = find_roles(config, policy, on_progress)
    if not dry_run:
        download(policy.path, config.model, on_progress)
        for role in roles.values():
            download(role.model_path, role.model, on_progress)

    # The data.
    data = _prepare_data(config, policy, base_dir, dry_run, on_progress)
    if rollout is not None:
        _check_prompts(rollout, config, base_dir, data, tokenizer)

    # The devices, and how the work is spread over them.
    machine = request.machine or detect()
    device = resolve_device(config, machine)
    processes = resolve_processes(config, machine, device, request.world_size)
    cluster, about_cluster = cluster_here(config, machine, device, processes)
    has_fixed_processes = request.world_size is not None or config.launch.nproc is not None
    question = build_question(
        config, policy, roles, data, cluster, needs_all_processes=has_fixed_processes
    )
    notes(text_notes(policy, config.head, question.facts))
    config, why = _fill_auto_keys(question, about_cluster, on_progress)
    model = KnownModel(question.facts, policy.path, roles)
    plan = _resolve_plan(request, config, machine, data, model)
    _require_runs(plan)
    if not dry_run:
        plan = _check_with_weights(plan, config, base_dir, on_progress)
    return _with_prediction(plan, config, request, machine, question.facts, why)


def _check_clients(config: Config) -> None:
    """Raise the errors of rewards, generators, servers and environments that can be found without asking them."""
    rollout = config.algorithm.rollout
    teaching = config.algorithm.teaching
    has_served_teacher = teaching is not None and teaching.served_teacher is not None
    if rollout is None and not has_served_teacher:
        return
    from drumline.rl import servers, vllm  # importing the generators takes a second

    if rollout is not None:
        rewards.require_installed(rollout.rewards)
        vllm.require_installed(rollout.generator)
        servers.require_addresses(rollout.generator)
        environments.require_installed(rollout.environment)
    if teaching is not None:
        servers.require_addresses(teaching.teacher)


def _check_request(request: Request) -> None:
    """Raise the errors of a request that can be found at once.

    These concern the checkpoint to resume from, the URL, trackers, callbacks and the optimizer.
    """
    config = request.loaded.config
    base_dir = request.loaded.base_dir.absolute()
    if request.resume is not None and request.resume.place is not None:
        named_state(request.resume.place)
    if config.checkpoint.url:
        # Raises EnvironmentFault if fsspec lacks what the URL requires.
        Store(config.checkpoint.url)
    check_installed(config.run.report_to, base_dir)
    find_callbacks(config.run.callbacks, base_dir)
    config.optimizer.require()


def _check_with_weights(
    plan: Plan, config: Config, base_dir: Path, on_progress: OnProgress
) -> Plan:
    """Check what a dry run cannot check, and return the plan.

    If weights are frozen, and so are not saved with the run, the plan gets a digest of them, which
    a resume compares.
    """
    engine_spec(plan.config.strategy).require(plan, on_progress)
    _check_eval_prompts_and_tasks(plan, base_dir)
    has_frozen_base = config.adapter.kind != "none" or bool(config.model.freeze)
    if config.model.init == "pretrained" and has_frozen_base:
        plan = plan.model_copy(update={"base": weights_digest(plan.model_path)})
    return plan


def _with_prediction(
    plan: Plan,
    config: Config,
    request: Request,
    machine: Machine,
    facts: ModelFacts,
    why: list[str],
) -> Plan:
    """Return the plan with the prediction of its time and memory, and with what follows from it.

    `config`: the one that was resolved into the plan. `why`: lines that explain the plan so far.
    """
    devices = plan.mesh.world_size * plan.devices_per_rank
    cluster, _ = cluster_here(config, machine, plan.device, devices)
    about_network = network.explain_environment(
        os.environ, config.launch.timeout_seconds, config.launch.interface
    )
    if config.memory.budget_gb is not None and not request.loaded.config.strategy.planned:
        # If the planner chose the strategy, it has kept to the budget already.
        plan = fit_to_budget(plan, facts, cluster, checkpointing_modes(config.memory))
    plan = plan.model_copy(update={"why": [*why, *about_network, *plan.why]})
    plan = predict(plan, facts, cluster)
    if config.checkpoint.every == "auto":
        plan = _with_saves(plan, facts, cluster)
    return plan


def _fill_auto_keys(
    question: Question, about_cluster: list[str], on_progress: OnProgress
) -> tuple[Config, list[str]]:
    """Return the config with its `auto` keys of strategy and compile filled in, and the reasons.

    `about_cluster`: lines on the devices, which explain the choice of a strategy.
    """
    config = question.config
    why: list[str] = []
    if config.strategy.planned:
        with notify_if_slow(lambda: on_progress(COMPARING, 0, None)):
            config, reason = choose(question)
        if reason:
            why.append(reason)
        why += about_cluster
    # Whether compiling pays is asked of the strategy that was chosen.
    chosen = replace(question, config=config)
    config, about_compiling = choose_compile(chosen)
    if about_compiling:
        why.append(about_compiling)
    return config, why


def _prepare_data(
    config: Config, policy: FoundModel, base_dir: Path, dry_run: bool, on_progress: OnProgress
) -> DataPlan | None:
    """Return the prepared data, with their classes in the model's own order.

    A dry run returns None if they are not prepared.
    """
    vision = vision_of(config, policy.path, policy.hf_config)
    tokenizer_path = config.model.tokenizer or policy.path or ""
    if dry_run:
        data = data_prepare.find_prepared(config, tokenizer_path, base_dir, vision)
    else:
        data = data_prepare.prepare(config, tokenizer_path, base_dir, on_progress, vision)
    if data is None:
        return None
    if config.model.init == "pretrained":
        # The rows of the model's trained head are in this order.
        labels = order_classes(policy.hf_config, data.labels)
        data = data.model_copy(update={"labels": labels})
    _check_eval_metric(config, data.labels)
    return data


def _with_saves(plan: Plan, facts: ModelFacts, cluster: Cluster) -> Plan:
    """Return the plan with the number of steps that `checkpoint.every: auto` stands for.

    `planner.faults.run_under_faults` weighs the time of saves against steps that a fault makes the
    run repeat.
    """
    assert plan.predicted.estimate is not None
    candidate = Candidate("", plan, plan.predicted.estimate)
    best = run_under_faults(candidate, cluster, facts)
    steps_between_saves = best.every
    seconds_per_step = best.step
    checkpoint = plan.config.checkpoint.model_copy(update={"every": steps_between_saves})
    config = plan.config.model_copy(update={"checkpoint": checkpoint})
    seconds_between_saves = steps_between_saves * seconds_per_step
    mtbf_hours = cluster.mtbf_hours or MTBF_HOURS
    low, high = (f"{share:.1%}" for share in goodput_range(candidate, cluster, facts))
    training = f"{best.goodput():.1%}"
    if low != high:
        # How long a restart takes is known as a range only.
        training += f" ({low}-{high})"
    line = (
        f"checkpoint.every auto: {steps_between_saves} steps, {seconds_between_saves:.3g} s"
        f" at {seconds_per_step:.3g} s a step;"
        f" with a fault of a device in {mtbf_hours:,.0f} hours, {training} of the time is training"
    )
    return plan.model_copy(update={"config": config, "why": [line, *plan.why]})


def find_roles(config: Config, policy: FoundModel, on_progress: OnProgress) -> dict[str, RolePlan]:
    """Return the plan of each auxiliary model, by the name of its role.

    Raises ModelError for a model with another tokenizer or image processor than the policy's, and
    for a frozen model without a trained head.
    """

    def find(model: ModelConfig) -> FoundModel:
        return find_model(model, on_progress, weights=True)

    roles = roles_of(config, policy, find)
    for name, auxiliary in config.algorithm.auxiliary_models(config).items():
        model = roles[name].model
        path = roles[name].model_path
        if model != config.model:
            tokenizer = load_tokenizer(policy.path, config.model)
            require_same_tokens(model, path, tokenizer, auxiliary.where)
            hf_config = models.load_config(path, model)
            models.check_fits(hf_config, tokenizer, config.data.max_length, auxiliary.where)
            _require_same_images(config, policy, model, path, auxiliary.where)
        if not auxiliary.trainable:
            # Laying it out raises ModelError if the head is not in the files.
            lay_out(path, model, 0, head=ModelHead(auxiliary.head, may_be_drawn=False))
    return roles


def require_same_tokens(model: ModelConfig, path: str | None, tokenizer: Any, where: str) -> None:
    """Raise ModelError if a model comes with a tokenizer that has other tokens than `tokenizer`."""
    if model.tokenizer is None and path is not None and Path(path).is_dir():
        # A model that was saved without a tokenizer has none to compare.
        has_tokenizer = any(Path(path).glob("*token*"))
        if not has_tokenizer:
            return
    theirs = load_tokenizer(path, model).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs == ours:
        return
    token = _first_difference(ours, theirs)
    what = (
        f"its tokenizer is not the policy's: token {token!r} has {_number_of_token(ours, token)}"
        f" in the policy's and {_number_of_token(theirs, token)} in this one"
    )
    raise ModelError(
        what,
        where=where,
        fix="give it the policy's new_tokens, or name a model with the same tokenizer",
    )


def _require_same_images(
    config: Config, policy: FoundModel, model: ModelConfig, path: str | None, where: str
) -> None:
    """Raise ModelError for a model that reads images in another way than the policy.

    A batch has the tokens and the pixels of its images once, for all models. A model of text gets no
    images; the rules of the plan refuse one where it would.
    """
    ours = vision_of(config, policy.path, policy.hf_config)
    if ours is None:
        return
    hf_config = models.load_config(path, model)
    theirs = vision_of(config.model_copy(update={"model": model}), path, hf_config)
    if theirs is None or ours.identity() == theirs.identity():
        return
    what = "it makes other tokens or pixels of an image than the policy"
    fix = "name a model of the same family, with the same preprocessor_config.json"
    raise ModelError(what, where=where, fix=fix)


def _first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """Return the first token that does not have the same number in two vocabularies that differ."""
    for token, number in ours.items():
        if theirs.get(token) != number:
            return token
    return next(token for token in theirs if token not in ours)


def _number_of_token(vocabulary: dict[str, int], token: str) -> str:
    """Return what an error says of a token's number: "number 7", or "none"."""
    number = vocabulary.get(token)
    if number is None:
        return "none"
    return f"number {number}"


def _require_runs(plan: Plan) -> None:
    """Raise PlanError or ModelError if a model could not be built, or would not run as planned.

    Small copies are tried here, once, before a rank holds any weight.
    """
    config = plan.config
    if config.optimizer.groups:
        # Groups name parameters, which only the model itself knows, with its adapter.
        policy = _build_on_meta(plan, plan.model_path, config.model, config.head)
        freeze(policy, config.model.freeze)
        if config.adapter.kind == "lora":
            adapters.inject(policy, config.adapter, seed=0)
        config.optimizer.require_groups(trainable_names(policy))
    _require_model_runs(plan, plan.model_path, config.model, config.head)
    for role in plan.roles.values():
        if role.model != config.model:
            _require_model_runs(plan, role.model_path, role.model, role.head)


def _require_model_runs(plan: Plan, path: str | None, config: ModelConfig, head: Head) -> None:
    """Raise PlanError or ModelError if one model would not run as planned."""
    if head not in WRITING and plan.engine != "pipeline":
        return
    model = _build_on_meta(plan, path, config, head)
    if head in WRITING:
        require_text_alone(model)
        config_of_whole = models.config_around_text(path, config)
        if config_of_whole is not None:
            require_same_language_model(config_of_whole, model)
        use_document_attention(model, plan, on_host=True)
        if plan.config.packs:
            separate_recurrent_layers(model, "cpu")
            _refuse_copies_of_layers(plan, model)
        notes(describe_layers(model))
        require_next_token(model, "cpu", plan.config.packs)
    if plan.engine == "pipeline":
        from drumline.engine.stages import find_split_points

        find_split_points(model)


def _refuse_copies_of_layers(plan: Plan, model: Any) -> None:
    """Raise PlanError if nn.DataParallel would copy layers that run by documents.

    The forward that separates documents belongs to the layer of the first GPU, and its copies have
    the same.
    """
    copies = plan.config.strategy.kind == "dp" and plan.device == "cuda"
    if copies and separated_layers(model):
        raise NO_PACKING.error(
            "dp copies each layer to all GPUs, and copies of layers that run by documents would use"
            " the weights of the first GPU; ddp works"
        )


def _build_on_meta(plan: Plan, path: str | None, config: ModelConfig, head: Head) -> Any:
    """Return a model on the meta device, so without memory for its weights."""
    hf_config = set_classes(models.load_config(path, config), head, plan.labels)
    return models.build_without_memory(hf_config, head)


def _check_eval_metric(config: Config, labels: tuple[str, ...]) -> None:
    """Raise ConfigError if eval.metric is not measured with the number of classes in the data."""
    metric = config.eval.metric
    if metric.startswith("tasks/"):
        return
    measured = config.algorithm.measures(labels)
    name = metric.rpartition("/")[2]
    if name in config.algorithm.metrics and name not in measured:
        what = f"{metric!r} is not measured with {len(labels)} classes"
        raise ConfigError(what, where="eval.metric", fix=f"one of {', '.join(measured)}")


def _check_prompts(
    rollout: SamplingSpec,
    config: Config,
    base_dir: Path,
    data: DataPlan | None,
    tokenizer: Any,
) -> None:
    """Raise ConfigError or PlanError if rewards, environment or curriculum do not fit the prompts.

    Rewards are called with the columns of a row, and a curriculum weighs domains. `data`: None if
    they are not prepared, in a dry run. `tokenizer`: its chat template must show an environment's
    tools.
    """
    columns = None
    if data is not None:
        columns = data_prepare.prompt_columns(data)
        if rollout.environment is not None:
            # Functions get all turns under this name.
            columns.add("messages")
    rewards.check_importable(rollout.rewards, base_dir.absolute(), columns)
    if rollout.environment is not None:
        tools = environments.check_importable(rollout.environment, base_dir.absolute())
        require_template(tokenizer, reads_calls=bool(tools))
    replaced = {text_argument(reward) for reward in rollout.rewards if reward.kind == "function"}
    for column in sorted(replaced & (columns or set())):
        notes(
            [
                f"the rows' column `{column}` is not given to reward functions, which get what was sampled:"
                " rename it if they need it"
            ]
        )
    if rollout.curriculum.kind == "weights":
        domains = data_prepare.prompt_domains(data, config.data.train)
        require_domains(rollout.curriculum.weights, domains)


def _check_eval_prompts_and_tasks(plan: Plan, base_dir: Path) -> None:
    """Raise an error if eval.samples or eval.tasks cannot be done.

    It is a DataError if eval.samples finds no prompts, and a ConfigError or EnvironmentFault if
    eval.tasks cannot be loaded.
    """
    if plan.config.eval.samples:
        from drumline.train.sampling import prompts  # importing the generators takes a second

        prompts(plan)
    if plan.config.eval.tasks:
        from drumline.train import tasks

        tasks.require(plan.config.eval, base_dir)


def plan_own_module(request: Request, dry_run: bool, on_progress: OnProgress) -> Plan:
    """Return the plan for a module of the user's own.

    Nothing is predicted: only the module itself knows what it computes. The module is laid out here
    without its weights, to find mistakes before any rank builds it.
    """
    config = request.loaded.config
    base_dir = request.loaded.base_dir.absolute()
    if config.checkpoint.every == "auto":
        what = "auto follows from the seconds of a step, which are not predicted for a module of your own"
        raise PlanError(what, where="checkpoint.every", fix="give a number of steps")
    find_builder(config.model, base_dir)
    config.algorithm.build_in(base_dir)
    data = _own_data(config, base_dir)
    machine = request.machine or detect()
    plan = _resolve_plan(request, config, machine, data, KnownModel())
    parts = ModuleParts(config.model.units, config.model.tp_plan)
    module, _ = build_unfilled_module(plan, own_build(plan), "cpu", parts)
    config.optimizer.require_groups(trainable_names(module))
    if plan.engine == "pipeline":
        from drumline.engine.module_pipeline import assign_stages

        # Raises PlanError if the module cannot be cut.
        assign_stages(module, plan.mesh.pp)
    if not dry_run:
        engine_spec(plan.config.strategy).require(plan, on_progress)
    about_batch_norm = describe_batch_norms(config, plan.batch, len(batch_norms(module)))
    return plan.model_copy(update={"why": [*plan.why, *about_batch_norm]})


def _own_data(config: Config, base_dir: Path) -> DataPlan:
    """Return the data of a module of the user's own.

    Samples are read as they are, and nothing is prepared. The caches are names, which
    `data_loaders.open_samples` understands, and not folders.
    """
    samples = read_samples(config.data.train, base_dir, Draws(0).use)
    eval_caches = {}
    eval_samples = 0
    for name, sources in config.data.eval_sets.items():
        eval_caches[name] = f"eval/{name}"
        eval_samples += len(read_samples(sources, base_dir, Draws(0).use))
    return DataPlan(
        train_cache="train",
        eval_caches=eval_caches,
        train_samples=len(samples),
        eval_samples=eval_samples,
        identity=identify_samples(config.data.train, base_dir, samples),
    )


def _resolve_plan(
    request: Request, config: Config, machine: Machine, data: DataPlan | None, model: KnownModel
) -> Plan:
    """Return the plan with every number resolved.

    Raises PlanError also for a profile of steps or ranks that the run does not have.
    """
    loaded = request.loaded
    plan = resolve(
        config,
        run_dir=config.run.dir or default_run_dir(loaded.path),
        machine=machine,
        world_size=request.world_size,
        model=model,
        data=data,
        base_dir=str(loaded.base_dir.absolute()),
    )
    if plan.steps is not None and plan.warmup_steps >= plan.steps:
        notes(
            [
                f"warm-up takes {plan.warmup_steps} steps and the run has {plan.steps}:"
                " the rate never reaches its peak"
            ]
        )
    _check_profile_range(plan)
    return plan


def _check_profile_range(plan: Plan) -> None:
    """Raise PlanError if run.profile names ranks or steps that the run does not have."""
    profile = plan.config.run.profile
    if profile is None:
        return
    ranks = plan.mesh.world_size
    highest_rank = max(profile.ranks)
    if highest_rank >= ranks:
        fix = "leave it out"
        if ranks > 1:
            fix = f"name ranks from 0 to {ranks - 1}"
        raise PlanError(
            f"there is no rank {highest_rank}: the run has {ranks}",
            where="run.profile.ranks",
            fix=fix,
        )
    if plan.steps is not None and profile.at > plan.steps:
        raise PlanError(
            f"the trace begins at step {profile.at}, and the run has {plural(plan.steps, 'step')}",
            where="run.profile.at",
            fix="choose an earlier step",
        )


def predict(plan: Plan, facts: ModelFacts, cluster: Cluster) -> Plan:
    """Return the plan with what it is expected to need on `cluster`."""
    expected = estimate(plan, facts, cluster)
    predicted = plan.predicted.model_copy(update={"estimate": expected})
    return plan.model_copy(update={"predicted": predicted})


def claim_run_dir(plan: Plan, request: Request) -> tuple[Path, Resume | None]:
    """Write config.yaml and plan.json into the run folder, whose lease the caller holds.

    Returns the path of plan.json, and what the ranks resume from.

    Raises EnvironmentFault if another run is in the folder, it cannot be written, or it has too
    little space; and CheckpointError if there is nothing to resume from, or the config differs in
    what matters.
    """
    run_dir = Path(plan.run_dir)
    # First, since a save that a crash has broken off may hide the newest checkpoint.
    recover(run_dir / CHECKPOINTS)
    resume = resume_from(request, plan)
    if request.resume is None:
        _require_empty(run_dir)
        if plan.config.checkpoint.url:
            require_unused(plan.config.checkpoint.url)
    copies = plan.config.checkpoint.memory_copies
    if copies:
        require_room(copies * plan.checkpoint_bytes)
    # A run keeps at least one checkpoint while it writes the next.
    needed = 0
    if plan.saves:
        needed = plan.checkpoint_bytes
    free = free_bytes(run_dir)
    if free < needed:
        raise EnvironmentFault(
            f"one checkpoint needs about {size(needed)}, {size(free)} are free",
            where=str(run_dir),
            fix="free space, or choose another disk with run.dir=…",
        )
    _check_fallback_dir(plan)
    forget_job(run_dir)
    fix = "choose another with run.dir=…"
    with disk_errors("cannot write the run folder", str(run_dir), EnvironmentFault, fix):
        (run_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "config.yaml", to_yaml(plan.config), private=True)
        plan_path = run_dir / "plan.json"
        plan.save(plan_path)
    return plan_path, resume


def _require_empty(run_dir: Path) -> None:
    """Raise EnvironmentFault if a run folder holds anything of a run.

    A lease and results of `drumline eval` may be there.
    """
    if not run_dir.is_dir():
        return
    for entry in run_dir.iterdir():
        if not entry.name.startswith(lease.NAME) and entry.name != EVAL_RESULTS:
            raise EnvironmentFault(
                "the run folder is not empty",
                where=str(run_dir),
                fix="add --resume to go on with it, or choose another with run.dir=…",
            )


def _check_fallback_dir(plan: Plan) -> None:
    """Raise EnvironmentFault now if checkpoint.fallback_dir could not be used when it is needed.

    Nothing stays on the disk.
    """
    folder = fallback_folder(plan.config, plan.run_dir)
    if folder is None:
        return
    where = f"checkpoint.fallback_dir {folder.parent}"
    with disk_errors("cannot be used", where, EnvironmentFault, "name another folder"):
        with temporary_folder(folder):
            pass
        # It is removed again, and made when it is needed.
        with suppress(OSError):
            folder.rmdir()


def resume_from(request: Request, plan: Plan) -> Resume | None:
    """Return what the ranks resume from; None for a run that starts afresh.

    Raises CheckpointError if the checkpoint's config or data differ in what matters. The tensors
    are not looked at here: the ranks verify them together.
    """
    if request.resume is None:
        return None
    saved_state = _saved_state(request.resume, plan)
    if saved_state is None:
        return Resume.newest_of_run()
    path, state = saved_state
    _check_same_run(path, state, plan, request.allow)
    if request.resume.place is None or request.resume.is_run_folder:
        return request.resume
    return Resume(path)


def keep_learning_rate(plan: Plan, request: Request) -> Plan:
    """Return the plan of a resumed run with the learning rate that the run has had.

    The rate is scaled by the number of devices. If only that has changed, the run keeps its rate.
    If the rate of the next step differs from what the schedule would have given, a note says so.
    Raises CheckpointError.
    """
    if request.resume is None:
        return plan
    saved_state = _saved_state(request.resume, plan)
    if saved_state is None:
        return plan
    path, state = saved_state
    plan = _with_saved_rate(path, state, plan, request)
    why = _change_of_schedule(state, plan)
    if why is None:
        return plan
    saved = saved_config(state["config"], plan.config, request.allow, path)
    changes = _refused_changes(saved, state, plan, request.allow)
    if changes.keys:
        # `claim_run_dir` is going to refuse this start, so a note about the rate would be in the way.
        return plan
    notes([why])
    return plan.model_copy(update={"why": [*plan.why, why]})


def _with_saved_rate(path: str, state: dict[str, Any], plan: Plan, request: Request) -> Plan:
    """Return the plan with a checkpoint's learning rate, if only the number of devices changes it.

    It changes if the user allows that, or if the global batch is another one, for which the rate is
    meant to scale. `path`, `state`: of the checkpoint.
    """
    lr = state.get("lr")
    if lr is None or lr == plan.lr or plan.config.optimizer.lr_scaling == "none":
        # Checkpoints of older versions do not have the rate.
        return plan
    may_change = False
    for key in request.allow:
        if key in ("all", "optimizer") or key.startswith("optimizer.lr"):
            may_change = True
    is_same_batch = state.get("global_samples") == plan.batch.global_samples
    if may_change or not is_same_batch:
        return plan
    why = f"learning rate {lr:.4g}, as in {path}: on {plan.mesh.data_ranks} data ranks it would be {plan.lr:.4g}"
    notes([f"{why}; pass --allow optimizer.lr to use that"])
    return plan.model_copy(update={"lr": lr, "why": [*plan.why, why]})


def _change_of_schedule(state: dict[str, Any], plan: Plan) -> str | None:
    """Return a line on why the learning rate jumps between the last step and the next one.

    None if the schedule goes on as before, and for a checkpoint of an older version, which does not
    say how long the schedule was. `state`: of the checkpoint.
    """
    step = state["trainer"].get("step")
    lr = state.get("lr")
    steps = state.get("steps")
    if lr is None or steps is None or plan.steps is None:
        return None
    if not step or step >= plan.steps:
        return None
    try:
        schedule = ScheduleConfig.model_validate(state["config"]["schedule"])
    except (ValidationError, KeyError, TypeError):
        return None
    warmup = state["warmup_steps"]
    # The rate of the next step as the run would have had it, and as it will be.
    following = lr * schedule.rate(step, steps, warmup)
    now = plan.lr * plan.config.schedule.rate(step, plan.steps, plan.warmup_steps)
    if math.isclose(following, now, rel_tol=1e-6):
        return None
    last = lr * schedule.rate(step - 1, steps, warmup)
    reasons = []
    if plan.config.schedule != schedule:
        reasons.append(
            f"its schedule was {schedule.kind} and is {plan.config.schedule.kind}, or has other keys"
        )
    if plan.lr != lr:
        reasons.append(f"its peak was {lr:.4g} and is {plan.lr:.4g}")
    if plan.steps != steps:
        reasons.append(
            f"the {plan.config.schedule.kind} schedule ended at step {steps:,} and ends at {plan.steps:,} now"
        )
    if plan.warmup_steps != warmup:
        reasons.append(f"its warm-up was {warmup:,} steps and is {plan.warmup_steps:,}")
    return (
        f"the learning rate was {last:.3g} at step {step:,} and is {now:.3g} at step {step + 1:,}:"
        f" {'; '.join(reasons)}"
    )


def _saved_state(resume: Resume, plan: Plan) -> tuple[str, dict[str, Any]] | None:
    """Return the checkpoint that a run resumes from, and its state.

    None if the run has saved none yet.
    """
    root = Path(plan.run_dir) / CHECKPOINTS
    return state_to_resume(resume, root, plan.config.checkpoint.url)


def _refused_changes(
    saved: Config, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]
) -> RefusedChanges:
    """Return the changes of the config since a checkpoint that a run may not make.

    Keys of the batch may change as long as the global batch is the same.
    """
    if state.get("global_samples") == plan.batch.global_samples:
        allow = (*allow, "batch")
    return refused_changes(saved, plan.config, allow)


def _check_same_run(path: str, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]) -> None:
    """Raise CheckpointError if a checkpoint is of another run, and that is not allowed.

    Another run has another config or other data.

    `state`: of the checkpoint at `path`.
    """
    saved = saved_config(state["config"], plan.config, allow, path)
    changes = _refused_changes(saved, state, plan, allow)
    if changes.keys:
        raise CheckpointError(
            f"the config differs in what the run depends on: {changes.description}",
            where=path,
            fix=f"take the change back, or accept it with --allow {','.join(changes.keys)}",
        )
    strategy_line = strategy_change(saved, plan.config, path)
    if strategy_line is not None:
        notes([strategy_line])
    _check_same_batch(path, state, plan, allow)
    _check_same_base(path, state, plan, allow)
    _check_same_data(path, state, plan, allow)


def _check_same_batch(path: str, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]) -> None:
    """Raise CheckpointError if a step takes another number of samples than before."""
    before = state.get("global_samples")
    now = plan.batch.global_samples
    allowed_sections = {key.partition(".")[0] for key in allow}
    is_allowed = not allowed_sections.isdisjoint(("batch", "all"))
    if not isinstance(before, int) or before == now or is_allowed:
        return
    raise CheckpointError(
        f"a step took {before} samples, and takes {now} now (data ranks: {plan.mesh.data_ranks})",
        where=path,
        fix=f"keep it with batch.global_samples={before} batch.accumulation=null,"
        " or accept the new one with --allow batch.global_samples",
    )


def _check_same_base(path: str, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]) -> None:
    """Raise CheckpointError if the checkpoint was trained on other frozen weights."""
    before = state.get("base")
    if before is None or plan.base is None or before == plan.base:
        return
    if is_allowed("model", allow):
        return
    raise CheckpointError(
        f"the frozen weights in {plan.model_path} are not those that this checkpoint was trained on top of",
        where=path,
        fix="bring the old ones back, or accept the new with --allow model",
    )


def _check_same_data(path: str, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]) -> None:
    """Raise CheckpointError if the training data have changed.

    If that is allowed, or not known, a note is printed instead.
    """
    if plan.data is None or plan.data.identity is None:
        return
    now = plan.data.identity
    if state.get("data") is None:
        notes(
            [
                f"{path} does not say what data it was trained on:"
                " whether these have changed since is not known"
            ]
        )
        return
    changes = what_changed(DataIdentity.model_validate(state["data"]), now)
    if not changes:
        return
    may_change_data = is_allowed("data", allow) or any(
        key.startswith("data.train") for key in allow
    )
    if not may_change_data:
        raise CheckpointError(
            f"the training data changed since this checkpoint: {changes}",
            where=path,
            fix="bring the old data back, or accept the new with --allow data:"
            " some samples may come twice and others never",
        )
    notes(
        [
            f"the training data changed since {path}: {changes};"
            " some samples may come twice and others never"
        ]
    )

"""From what the user typed to a plan on disk: everything that happens once, before any rank starts and outside any collective."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drumline.checkpoint.load import named, newest_state, of_run
from drumline.checkpoint.memory import require_room
from drumline.checkpoint.remote import Store, require_unused
from drumline.checkpoint.retention import recover
from drumline.core import network
from drumline.core.config import Config, ScheduleConfig
from drumline.core.explain import default_run_dir, size
from drumline.core.facts import ModelFacts
from drumline.core.files import temporary_folder, write_whole
from drumline.core.load import Request, allowed, refused, saved_config, strategy_change, to_yaml
from drumline.core.model import Head, ModelConfig
from drumline.core.plan import DataIdentity, DataPlan, Plan, RolePlan
from drumline.core.resolve import batch_norm_why, device_of, processes_of, resolve
from drumline.core.rollouts import RolloutSpec
from drumline.data import prepare as data_prepare
from drumline.data.fingerprint import what_changed
from drumline.data.samples import identify_samples, read_samples
from drumline.dist.seeds import Draws
from drumline.errors import CheckpointError, ConfigError, EnvironmentFault, ModelError, PlanError
from drumline.foreign import disk_errors, require_package
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Machine, detect, free_bytes
from drumline.launchers import lease
from drumline.launchers.slurm.queue import forget_job
from drumline.models import adapters
from drumline.models import load as models
from drumline.models.attention import attend_by_documents
from drumline.models.build import lay_out
from drumline.models.classes import LM, in_own_order, with_classes
from drumline.models.download import download
from drumline.models.files import weights_digest
from drumline.models.freeze import freeze, learning
from drumline.models.head import require_next_token
from drumline.models.own import find_builder, own_build
from drumline.models.tokenizer import load_tokenizer
from drumline.models.vision import vision_of
from drumline.parallel.transforms import batch_norms
from drumline.planner.cluster import cluster_here
from drumline.planner.cost.times import estimate
from drumline.planner.faults import MTBF_HOURS, campaign
from drumline.planner.new_tokens import rows_notes, with_new_rows
from drumline.planner.question import Found, assemble, find_model, require_adapter, roles_of
from drumline.planner.search.answer import Candidate, Question
from drumline.planner.search.auto import choose, choose_compile
from drumline.planner.search.budget import kinds_of, within_budget
from drumline.report.bars import COMPARING, OnProgress, notes, told_if_slow
from drumline.rl import rewards
from drumline.rl.curriculum import require_domains
from drumline.strategies.build import lay_out_spreadable
from drumline.telemetry.trackers import check_installed, find_callbacks
from drumline.train.state import fallback_folder

CHECKPOINTS = "checkpoints"
EVAL_RESULTS = "eval.json"  # what `drumline eval` knows of the base model before there is a run


def make_plan(request: Request, *, on_progress: OnProgress, dry_run: bool = False) -> Plan:
    """Find the model, prepare the data (a dry run only looks whether it is there) and resolve every number."""
    config, base = request.loaded.config, request.loaded.base_dir
    if request.resume not in (None, "newest"):
        named(request.resume or "")  # before any work is done for nothing
    if config.checkpoint.url:
        Store(config.checkpoint.url)
    check_installed(config.run.report_to, base.absolute())
    find_callbacks(config.run.callbacks, base.absolute())
    config.optimizer.require()
    if config.plain:
        return own_plan(request, dry_run, on_progress)
    if config.adapter.kind == "lora":
        require_package("peft", "adapter")
    if (rollout := config.algorithm.rollout) is not None:
        from drumline.rl import vllm  # what generates takes a second to import

        rewards.require(rollout.rewards)
        vllm.require_installed(rollout.generator)
    policy = find_model(config.model, on_progress, weights=True)
    notes(rows_notes(config, policy))
    config = with_new_rows(config, policy)
    if not config.images_alone:
        models.check_fits(
            policy.hf_config, load_tokenizer(policy.path, config.model), config.data.max_length
        )
    require_adapter(config, policy)
    roles = find_roles(config, policy, on_progress)
    if not dry_run:
        download(policy.path, config.model, on_progress)
        for role in roles.values():
            download(role.model_path, role.model, on_progress)
    data = _data_of(config, policy, base, dry_run, on_progress)
    if rollout is not None:
        _check_prompts(rollout, config, base, data)
    machine = request.machine or detect()
    device = device_of(config, machine)
    cluster, why = cluster_here(
        config, machine, device, processes_of(config, machine, device, request.world_size)
    )
    processes = request.world_size is not None or config.launch.nproc is not None
    question = assemble(config, policy, roles, data, cluster, processes=processes)
    config, why = _choose_open_keys(question, why, on_progress)
    plan = _resolved(
        request, config, machine, data, facts=question.facts, model_path=policy.path, roles=roles
    )
    _require_runs(plan)
    if not dry_run:
        plan.config.strategy.require(plan, on_progress)
        _require_written(plan, base)
        if config.model.init == "pretrained" and (
            config.adapter.kind != "none" or config.model.freeze
        ):
            plan = plan.model_copy(update={"base": weights_digest(plan.model_path)})
    cluster, _ = cluster_here(
        config, machine, plan.device, plan.mesh.world_size * plan.devices_per_rank
    )
    why = [*why, *network.why(os.environ, config.launch.timeout_seconds, config.launch.interface)]
    if config.memory.budget_gb is not None and not request.loaded.config.strategy.planned:
        plan = within_budget(plan, question.facts, cluster, kinds_of(config.memory))
    plan = predict(plan.model_copy(update={"why": [*why, *plan.why]}), question.facts, cluster)
    return _with_saves(plan, question.facts, cluster) if config.checkpoint.every == "auto" else plan


def _choose_open_keys(
    question: Question, about_cluster: list[str], on_progress: OnProgress
) -> tuple[Config, list[str]]:
    """Return the config with what it leaves to the planner, the strategy and whether to compile, and why.

    `about_cluster`: lines on the devices that a strategy is chosen for.
    """
    config, why = question.config, list[str]()
    if config.strategy.planned:
        with told_if_slow(lambda: on_progress(COMPARING, 0, None)):
            config, reason = choose(question)
        why = [reason, *about_cluster] if reason else about_cluster
    config, compiling = choose_compile(replace(question, config=config))
    return config, [*why, compiling] if compiling else why


def _data_of(
    config: Config, policy: Found, base: Path, dry_run: bool, on_progress: OnProgress
) -> DataPlan | None:
    """The data, prepared, with their classes in the model's own order; None where a dry run does not find them."""
    vision, tokenizer_path = (
        vision_of(config, policy.path, policy.hf_config),
        config.model.tokenizer or policy.path or "",
    )
    if dry_run:
        data = data_prepare.cached(config, tokenizer_path, base, vision)
    else:
        data = data_prepare.prepare(config, tokenizer_path, base, on_progress, vision)
    if data is None:
        return None
    if config.model.init == "pretrained":
        data = data.model_copy(update={"labels": in_own_order(policy.hf_config, data.labels)})
    _require_measured(config, data.labels)
    return data


def _with_saves(plan: Plan, facts: ModelFacts, cluster: Cluster) -> Plan:
    """The plan with the number that checkpoint.every: auto stands for."""
    assert plan.predicted.estimate is not None
    best = campaign(Candidate("", plan, plan.predicted.estimate), cluster, facts)
    checkpoint = plan.config.checkpoint.model_copy(update={"every": best.every})
    line = (
        f"checkpoint.every auto: {best.every} steps, {best.every * best.step:.3g} s at {best.step:.3g} s a step; with a fault of a device"
        f" in {cluster.mtbf_hours or MTBF_HOURS:,.0f} hours, {best.goodput():.1%} of the time is training"
    )
    return plan.model_copy(
        update={
            "config": plan.config.model_copy(update={"checkpoint": checkpoint}),
            "why": [line, *plan.why],
        }
    )


def find_roles(config: Config, policy: Found, on_progress: OnProgress) -> dict[str, RolePlan]:
    """By name what each role is and where it lies. Raises ModelError for one that reads other tokens than the policy writes, and for one
    without a trained head that stays frozen."""
    roles = roles_of(config, policy, lambda model: find_model(model, on_progress, weights=True))
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        model, path = roles[name].model, roles[name].model_path
        if model != config.model:
            tokenizer = load_tokenizer(policy.path, config.model)
            require_same_tokens(model, path, tokenizer, wanted.where)
            models.check_fits(
                models.load_config(path, model), tokenizer, config.data.max_length, wanted.where
            )
        if not wanted.trainable:
            lay_out(path, model, 0, head=wanted.head, draws=False)
    return roles


def require_same_tokens(model: ModelConfig, path: str | None, tokenizer: Any, where: str) -> None:
    """Raises ModelError where a model comes with a tokenizer that has other tokens than `tokenizer`."""
    if (
        model.tokenizer is None
        and path is not None
        and Path(path).is_dir()
        and not any(Path(path).glob("*token*"))
    ):
        return
    theirs = load_tokenizer(path, model).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs != ours:
        token = next((t for t, number in ours.items() if theirs.get(t) != number), None) or next(
            t for t in theirs if t not in ours
        )
        numbers = [
            ("none" if v.get(token) is None else f"number {v[token]}") for v in (ours, theirs)
        ]
        what = f"its tokenizer is not the policy's: token {token!r} has {numbers[0]} in the policy's and {numbers[1]} in this one"
        raise ModelError(
            what,
            where=where,
            fix="give it the policy's new_tokens, or name a model with the same tokenizer",
        )


def _require_runs(plan: Plan) -> None:
    """Raises PlanError and ModelError for what shows where the models are built, or run alone: tried here, on small copies."""
    config, own = (
        plan.config,
        [role for role in plan.roles.values() if role.model != plan.config.model],
    )

    def built(path: str | None, described: ModelConfig, head: Head) -> Any:
        return models.on_meta(
            with_classes(models.load_config(path, described), head, plan.labels), head
        )

    wanted = [
        (plan.model_path, config.model, config.head),
        *((role.model_path, role.model, role.head) for role in own),
    ]
    if config.optimizer.groups:
        policy = built(plan.model_path, config.model, config.head)
        freeze(policy, config.model.freeze)
        if config.adapter.kind == "lora":
            adapters.inject(policy, config.adapter, seed=0)
        config.optimizer.require_groups(learning(policy))
    for path, described, head in wanted:
        if head not in LM and plan.engine != "pipeline":
            continue
        model = built(path, described, head)
        if head in LM:
            attend_by_documents(model, plan, on_host=True)
            require_next_token(model, "cpu", config.packs)
        if plan.engine == "pipeline":
            from drumline.parallel.stages import find_cuts

            find_cuts(model)


def _require_measured(config: Config, labels: tuple[str, ...]) -> None:
    """Raises ConfigError where eval.metric is one that classes as few as these have not."""
    metric, names = config.eval.metric, config.algorithm.measures(labels)
    if not metric.startswith("tasks/") and metric.rpartition("/")[2] in {
        *config.algorithm.metrics
    } - {*names}:
        what = f"{metric!r} is not measured with {len(labels)} classes"
        raise ConfigError(what, where="eval.metric", fix=f"one of {', '.join(names)}")


def _check_prompts(rollout: RolloutSpec, config: Config, base: Path, data: DataPlan | None) -> None:
    """Raises ConfigError and PlanError where rewards or the curriculum do not fit the columns and domains of the prompts."""
    columns = None if data is None else data_prepare.prompt_columns(data)
    rewards.check(rollout.rewards, base.absolute(), columns)
    if "completion" in (columns or ()) and any(
        reward.kind == "function" for reward in rollout.rewards
    ):
        notes(
            [
                "the rows' column `completion` is not given to reward functions, which get what was sampled: rename it if they need it"
            ]
        )
    if rollout.curriculum.kind == "weights":
        require_domains(
            rollout.curriculum.weights, data_prepare.prompt_domains(data, config.data.train)
        )


def _require_written(plan: Plan, base: Path) -> None:
    """Raises DataError and ConfigError where eval.samples finds no prompts, and where eval.tasks cannot be had."""
    if plan.config.eval.samples:
        from drumline.train.sampling import prompts  # what generates takes a second to import

        prompts(plan)
    if plan.config.eval.tasks:
        from drumline.train import tasks

        tasks.require(plan.config.eval, base)


def own_plan(request: Request, dry_run: bool, on_progress: OnProgress) -> Plan:
    """The same for a module of the user's own, of which only it itself knows what it computes: nothing is predicted."""
    config, base = request.loaded.config, request.loaded.base_dir.absolute()
    if config.checkpoint.every == "auto":
        what = "auto follows from the seconds of a step, which are not predicted for a module of your own"
        raise PlanError(what, where="checkpoint.every", fix="give a number of steps")
    find_builder(config.model, base)
    config.algorithm.build_in(base)
    samples = read_samples(config.data.train, base, Draws(0).used)
    held_out = {
        name: len(read_samples(sources, base, Draws(0).used))
        for name, sources in config.data.eval_sets.items()
    }
    data = DataPlan(
        train_cache="train",
        eval_caches={name: f"eval/{name}" for name in held_out},
        train_samples=len(samples),
        eval_samples=sum(held_out.values()),
        identity=identify_samples(config.data.train, base, samples),
    )
    plan = _resolved(
        request, config, request.machine or detect(), data, facts=None, model_path=None
    )
    module, _ = lay_out_spreadable(
        plan, own_build(plan), "cpu", config.model.units, config.model.tp_plan
    )
    config.optimizer.require_groups(learning(module))
    if plan.engine == "pipeline":
        from drumline.parallel.own_pipeline import cut

        cut(module, plan.mesh.pp)  # raises PlanError where it cannot be
    if not dry_run:
        plan.config.strategy.require(plan, on_progress)
    return plan.model_copy(
        update={"why": [*plan.why, *batch_norm_why(config, plan.batch, len(batch_norms(module)))]}
    )


def _resolved(
    request: Request, config: Config, machine: Machine, data: DataPlan | None, **model: Any
) -> Plan:
    loaded = request.loaded
    run_dir, base_dir = (
        config.run.dir or default_run_dir(loaded.path),
        str(loaded.base_dir.absolute()),
    )
    plan = resolve(
        config,
        run_dir=run_dir,
        machine=machine,
        world_size=request.world_size,
        data=data,
        base_dir=base_dir,
        **model,
    )
    if plan.steps is not None and plan.warmup_steps >= plan.steps:
        notes(
            [
                f"warm-up takes {plan.warmup_steps} steps and the run has {plan.steps}: the rate never reaches its peak"
            ]
        )
    if (wanted := config.run.profile) is not None:
        ranks, last = plan.mesh.world_size, plan.steps
        if (rank := max(wanted.ranks)) >= ranks:
            fix = f"name ranks from 0 to {ranks - 1}" if ranks > 1 else "leave it out"
            raise PlanError(
                f"there is no rank {rank}: the run has {ranks}", where="run.profile.ranks", fix=fix
            )
        if last is not None and wanted.at > last:
            what = f"the trace begins at step {wanted.at}, and the run has {last} step" + "s" * (
                last > 1
            )
            raise PlanError(what, where="run.profile.at", fix="choose an earlier step")
    return plan


def predict(plan: Plan, facts: ModelFacts, cluster: Cluster) -> Plan:
    """The plan with what it is expected to need on `cluster`."""
    expected = estimate(plan, facts, cluster)
    return plan.model_copy(
        update={"predicted": plan.predicted.model_copy(update={"estimate": expected})}
    )


def claim_run_dir(plan: Plan, request: Request) -> tuple[Path, str | None]:
    """Write config.yaml and plan.json into the run folder, whose lease the caller holds. Returns plan.json and the checkpoint to go on
    from.

    Raises EnvironmentFault (another run is there, not writable, too little space) or CheckpointError (nothing to resume from,
    or a config that differs in what matters).
    """
    run_dir = Path(plan.run_dir)
    recover(run_dir / CHECKPOINTS)
    start = resume_from(run_dir, request, plan)
    there = (
        {entry.name for entry in run_dir.iterdir() if not entry.name.startswith(lease.NAME)}
        if run_dir.is_dir()
        else set()
    )
    if request.resume is None and there - {EVAL_RESULTS}:
        fix = "add --resume to go on with it, or choose another with run.dir=…"
        raise EnvironmentFault("the run folder is not empty", where=str(run_dir), fix=fix)
    if request.resume is None and plan.config.checkpoint.url:
        require_unused(plan.config.checkpoint.url)
    if copies := plan.config.checkpoint.memory_copies:
        require_room(copies * plan.checkpoint_bytes)
    # A run keeps at least one while it writes the next.
    needed, free = (
        plan.checkpoint_bytes if plan.saves else 0,
        free_bytes(run_dir),
    )
    if free < needed:
        what = f"one checkpoint needs about {size(needed)}, {size(free)} are free"
        raise EnvironmentFault(
            what, where=str(run_dir), fix="free space, or choose another disk with run.dir=…"
        )
    _make_fallback(plan)
    fix = "choose another with run.dir=…"
    forget_job(run_dir)
    with disk_errors("cannot write the run folder", str(run_dir), EnvironmentFault, fix):
        (run_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "config.yaml", to_yaml(plan.config), private=True)
        plan_path = run_dir / "plan.json"
        plan.save(plan_path)
    return plan_path, start


def _make_fallback(plan: Plan) -> None:
    """Raises EnvironmentFault now where checkpoint.fallback_dir could not be used in need."""
    folder = fallback_folder(plan.config, plan.run_dir)
    with disk_errors(
        "cannot be used",
        f"checkpoint.fallback_dir {folder and folder.parent}",
        EnvironmentFault,
        "name another folder",
    ):
        if folder is not None:
            with temporary_folder(folder):
                pass
            with suppress(OSError):
                folder.rmdir()  # it is made in need


def resume_from(run_dir: Path, request: Request, plan: Plan) -> str | None:
    """What `--resume` means to the ranks: `newest` (a start at step 0 where there is nothing yet), a checkpoint's folder or URL, the
    folder of a run, or None.

    Only a look at the config and the data that were saved: the ranks verify the checkpoint itself, each a part of it.
    """
    if request.resume is None:
        return None
    found = _to_go_on_from(request.resume, plan)
    if found is not None:
        _check_same_run(*found, plan, request.allow)
    return (
        "newest"
        if found is None
        else request.resume
        if request.resume == "newest" or of_run(request.resume)
        else found[0]
    )


def as_before(plan: Plan, request: Request) -> Plan:
    """The plan with the learning rate that the run has had, where no more than the devices that it is scaled by is new. Where the next
    step's rate is not that of the schedule so far, a line says so. Raises CheckpointError."""
    found = _to_go_on_from(request.resume, plan) if request.resume is not None else None
    if found is None:
        return plan
    plan = _with_rate_of(found, plan, request)
    why = _change_of_schedule(found[1], plan)
    if why is None:
        return plan
    path, state = found
    saved = saved_config(state["config"], plan.config, request.allow, path)
    _, refused_keys = _changed_keys(saved, state, plan, request.allow)
    if refused_keys:  # `claim_run_dir` refuses this start, with a line of its own
        return plan
    notes([why])
    return plan.model_copy(update={"why": [*plan.why, why]})


def _with_rate_of(found: tuple[str, dict[str, Any]], plan: Plan, request: Request) -> Plan:
    """The plan with the learning rate of a checkpoint, where the rate is scaled by devices and nothing but their number has changed it."""
    path, state = found
    lr = state.get("lr")  # older checkpoints do not say
    may = any(
        key in ("all", "optimizer") or key.startswith("optimizer.lr") for key in request.allow
    )
    is_new_batch = (
        state["global_samples"] != plan.batch.global_samples if "global_samples" in state else True
    )
    if plan.config.optimizer.lr_scaling == "none" or lr in (None, plan.lr) or may or is_new_batch:
        return plan
    why = f"learning rate {lr:.4g}, as in {path}: on {plan.mesh.data_ranks} data ranks it would be {plan.lr:.4g}"
    notes([f"{why}, which --allow optimizer.lr takes"])
    return plan.model_copy(update={"lr": lr, "why": [*plan.why, why]})


def _change_of_schedule(state: dict[str, Any], plan: Plan) -> str | None:
    """A line with the learning rate of the last step and of the next one, and why they lie apart; None where the schedule goes on as it
    was, and for older checkpoints, which do not say how long theirs was."""
    step, lr, steps = state["trainer"].get("step"), state.get("lr"), state.get("steps")
    if not step or lr is None or steps is None or plan.steps is None or step >= plan.steps:
        return None
    try:
        schedule = ScheduleConfig.model_validate(state["config"]["schedule"])
    except (ValidationError, KeyError, TypeError):
        return None
    warmup = state["warmup_steps"]
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
    return f"the learning rate was {last:.3g} at step {step:,} and is {now:.3g} at step {step + 1:,}: {'; '.join(reasons)}"


def _to_go_on_from(resume: str, plan: Plan) -> tuple[str, dict[str, Any]] | None:
    """A checkpoint and its state; None where there is no newest one yet."""
    return (
        newest_state(Path(plan.run_dir) / CHECKPOINTS, plan.config.checkpoint.url)
        if resume == "newest"
        else named(resume)
    )


def _changed_keys(
    saved: Config, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]
) -> tuple[str, list[str]]:
    """The keys that differ from a checkpoint's config and may not, as of `refused`, however the same batch is written and cut up."""
    is_same_batch = state.get("global_samples") == plan.batch.global_samples
    may = (*allow, "batch") if is_same_batch else allow
    return refused(saved, plan.config, may)


def _check_same_run(path: str, state: dict[str, Any], plan: Plan, allow: tuple[str, ...]) -> None:
    """Raises CheckpointError where a checkpoint was made with another config or other data, as far as nobody has allowed it."""
    before, size = state.get("global_samples"), plan.batch.global_samples
    saved = saved_config(state["config"], plan.config, allow, path)
    changes, keys = _changed_keys(saved, state, plan, allow)
    if keys:
        fix = f"take the change back, or accept it with --allow {','.join(keys)}"
        raise CheckpointError(
            f"the config differs in what the run depends on: {changes}", where=path, fix=fix
        )
    strategy_line = strategy_change(saved, plan.config, path)
    if strategy_line is not None:
        notes([strategy_line])
    if (
        isinstance(before, int)
        and before != size
        and not any(key.partition(".")[0] in ("batch", "all") for key in allow)
    ):
        what = f"a step took {before} samples, and takes {size} now (data ranks: {plan.mesh.data_ranks})"
        fix = f"keep it with batch.global_samples={before} batch.accumulation=null, or accept the new one with --allow batch.global_samples"
        raise CheckpointError(what, where=path, fix=fix)
    if (
        None not in (base := state.get("base"), plan.base)
        and base != plan.base
        and not allowed("model", allow)
    ):
        what = f"the frozen weights in {plan.model_path} are not those that this checkpoint was trained on top of"
        raise CheckpointError(
            what, where=path, fix="bring the old ones back, or accept the new with --allow model"
        )
    now = plan.data.identity if plan.data else None
    if now is None:
        return
    if state.get("data") is None:
        notes(
            [
                f"{path} does not say what data it was trained on: whether these have changed since is not known"
            ]
        )
        return
    changed = what_changed(DataIdentity.model_validate(state["data"]), now)
    if changed and not (
        allowed("data", allow) or any(key.startswith("data.train") for key in allow)
    ):
        fix = "bring the old data back, or accept the new with --allow data: some samples may come twice and others never"
        raise CheckpointError(
            f"the training data changed since this checkpoint: {changed}", where=path, fix=fix
        )
    if changed:
        notes(
            [
                f"the training data changed since {path}: {changed}; some samples may come twice and others never"
            ]
        )

"""The composition root: it builds a rank's `Loop` from a plan, with everything that the loop needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drumline.algorithms.base import Algorithm
from drumline.checkpoint.ranks import RankGroup
from drumline.config.resume import Resume
from drumline.data.cache import TokenCache, verify_in_background
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import SumReducer
from drumline.dist.seeds import use_deterministic_kernels
from drumline.dist.start import RankInfo, gpu
from drumline.engine.build import ModuleParts, build_engine, build_module, stats_with_frozen
from drumline.engine.engine import Engine
from drumline.errors import CheckpointError, DataError
from drumline.hardware.detect import cache_dir
from drumline.models.own import own_build
from drumline.plan.plan import Plan
from drumline.plan.resolve import plan_after_resume
from drumline.system.signals import StopFlag
from drumline.telemetry.devices import Meter
from drumline.telemetry.events import Emit, Event, series
from drumline.telemetry.measure import Measure, process_bytes
from drumline.telemetry.traffic import Traffic
from drumline.train.data_loaders import Batches, DataLoaders, FirstPass, build_data_loaders
from drumline.train.loop import Loop
from drumline.train.references import Reference, ScoreBatches
from drumline.train.restore import ResumePoint, checkpointer_of, memory_checkpoints_of, metric_order
from drumline.train.saving import Saver
from drumline.train.state import Goodput, TrainState
from drumline.train.teachers import Ask, TeacherLoaders
from drumline.train.timeouts import CollectiveTimeout


def build(
    plan: Plan,
    ranks: RankInfo,
    resume: Resume | None,
    emit: Emit,
    stop_flag: StopFlag,
    past: list[Event],
    goodput: Goodput,
) -> Loop:
    """Return the loop of one rank, with everything that it needs. Collective.

    `resume`: None for a run that starts afresh. `past`: the events of the run so far.
    """
    config = plan.config
    timeout = CollectiveTimeout(plan)
    if config.run.deterministic:
        use_deterministic_kernels()
    set_kernels(plan)
    device = f"cuda:{gpu(ranks)}" if plan.device == "cuda" else plan.device_type
    verification = _verify_caches(plan, ranks)

    # The model, and what the run resumes from.
    began = time.time()
    memory_checkpoints = None
    if plan.saves:
        resumes_newest = resume is not None and resume.is_newest_of_run
        memory_checkpoints = memory_checkpoints_of(plan, resumes_newest)
    resume_point: ResumePoint | None = None
    if resume is not None:
        with goodput.spend("restore"):
            resume_point = ResumePoint.resolve(plan, resume, memory_checkpoints)
    search_seconds = time.time() - began
    checkpoint: Path | None = None
    checkpoint_keys = frozenset[str]()
    if resume_point is not None:
        checkpoint = resume_point.path
        checkpoint_keys = resume_point.checkpoint_keys
    engine = _build_engine(plan, device, checkpoint_keys)
    goodput.end_part("model")
    checkpointer = checkpointer_of(plan, metric_order(plan))
    if memory_checkpoints is not None:
        memory_checkpoints.open_writer()
    state = TrainState()
    if resume_point is not None:
        with goodput.spend("restore"):
            state = resume_point.restore(engine, emit, time.time() - search_seconds)
    # Changes `steps` and `warmup_steps` if the steps before had batches of another size.
    plan = plan_after_resume(plan, state.step, state.position)

    # The algorithm and the data.
    reducer = SumReducer(
        ranks.rank, ranks.world_size, device, contributes=plan.mesh.is_counted(ranks.rank)
    )
    is_new = checkpoint is None
    training = _build_training(plan, ranks, engine, state, is_new, reducer, emit, stop_flag)
    eval_generators = _build_eval_generators(plan, engine, training.rollouts, device, emit)
    # Raises on all ranks if any rank has found damage to a cache.
    RankGroup.all(error_type=DataError).run_on_all(verification.result)
    goodput.end_part("data")

    saved_step = -1
    if checkpoint is not None and checkpointer.is_kept(checkpoint):
        saved_step = state.step
    saver = Saver(
        plan,
        engine,
        state,
        checkpointer,
        emit,
        reducer,
        stop_flag,
        saved_step,
        memory_checkpoints=memory_checkpoints,
    )
    traffic = Traffic(config.strategy.step_kind, device)
    measure = Measure(plan, lambda: stats_with_frozen(engine), reducer, emit, traffic)
    return Loop(
        plan=plan,
        engine=engine,
        algorithm=training.algorithm,
        rollouts=training.rollouts,
        rewind=training.rewind,
        batches=training.batches,
        held_out=training.held_out,
        meter=_build_meter(plan, ranks),
        answers=eval_generators.answers,
        tasks=eval_generators.tasks,
        saver=saver,
        emit=emit,
        reducer=reducer,
        timeout=timeout,
        stop_flag=stop_flag,
        memory_bytes=_gpu_memory if plan.device == "cuda" else _host_memory,
        state=state,
        goodput=goodput,
        measure=measure,
        seen_step=max(series(past, "loss"), default=0),
    )


def _gpu_memory() -> int:
    """Return the peak of the allocator, in bytes."""
    return torch.cuda.max_memory_allocated()


def _host_memory() -> int:
    """Return the resident set of this process, in bytes."""
    return process_bytes()["VmRSS"]


@dataclass(frozen=True)
class Training:
    """What the loop trains on: the algorithm, and the batches."""

    algorithm: Algorithm
    batches: Iterable[GlobalBatch]
    # For each evaluation set, by name: a function that returns its batches.
    held_out: dict[str, Batches]
    rollouts: Any = None
    # Restores the newest checkpoint, and returns the batches from there on; None for rollouts,
    # which cannot go back.
    rewind: Callable[[], Iterable[GlobalBatch]] | None = None


def _build_training(
    plan: Plan,
    ranks: RankInfo,
    engine: Engine,
    state: TrainState,
    is_new: bool,
    reducer: SumReducer,
    emit: Emit,
    stop_flag: StopFlag,
) -> Training:
    """Return the algorithm and the batches from `state` on. Collective.

    `is_new`: whether the policy is untrained.
    """
    rollout = plan.config.algorithm.rollout
    if rollout is not None:
        from drumline.train.build_rollouts import (
            build_rollouts,  # importing the generators takes a second
        )

        algorithm, rollouts, batches = build_rollouts(
            plan, rollout, ranks, engine, state, reducer, emit
        )
        return Training(algorithm, batches, {}, rollouts)
    algorithm = plan.config.algorithm.build_in(Path(plan.base_dir))
    source = DataSource(plan, ranks, engine, algorithm, state, reducer, emit, stop_flag)
    loaders = source.data_loaders_from(state.position, is_new)
    return Training(algorithm, loaders.training, loaders.held_out, rewind=source.rewind)


@dataclass(frozen=True)
class DataSource:
    """Builds the data loaders of prepared data, at the start and after each rollback."""

    plan: Plan
    ranks: RankInfo
    engine: Engine
    algorithm: Any
    state: TrainState
    reducer: SumReducer
    emit: Emit
    stop_flag: StopFlag
    # What answers for a reference or a teacher, which is kept when the loaders are built again.
    scores_by_folder: dict[str, ScoreBatches] = field(default_factory=dict)
    ask_by_folder: dict[str, Ask] = field(default_factory=dict)

    def data_loaders_from(self, position: int, is_new: bool) -> DataLoaders:
        """Return the data loaders from a position on, with a reference's or first pass's numbers.

        Collective.
        """
        data_rank = self.plan.mesh.data_rank(self.ranks.rank)
        loaders = build_data_loaders(
            self.plan,
            data_rank,
            position,
            self.reducer.device,
            self.ranks.local_rank == 0,
            self.state.stream,
            self.state.step,
        )
        if self.plan.config.algorithm.teaching is not None:
            teacher = TeacherLoaders(
                self.plan,
                self.ranks,
                self.reducer.device,
                self.engine,
                loaders,
                self.emit,
                self.stop_flag,
                self.ask_by_folder,
            )
            loaders = teacher.add_to_data_loaders()
        elif self.plan.config.algorithm.reference_of(self.plan.config) != "none":
            reference = Reference(
                self.plan,
                self.ranks,
                self.reducer.device,
                self.engine,
                self.algorithm,
                loaders,
                is_new,
                self.emit,
                self.stop_flag,
                self.scores_by_folder,
            )
            loaders = reference.add_to_data_loaders()
        extract = self.algorithm.first_pass
        if extract is not None:
            first_pass = FirstPass(
                self.algorithm, extract, self.engine, self.reducer.contributes, self.reducer.device
            )
            loaders = first_pass.add_to(loaders)
        return loaders

    def rewind(self) -> Iterable[GlobalBatch]:
        """Restore the newest checkpoint, and return the training batches from there on.

        Collective.
        """
        resume_point = ResumePoint.resolve(self.plan, Resume.newest_of_run())
        if resume_point.path is None:
            # The loop has asked for this only because a save was in flight, which has failed.
            raise CheckpointError(
                "no checkpoint to go back to",
                where=self.plan.run_dir,
                fix="start anew, or set health.on_spike=skip",
            )
        restored = resume_point.restore(self.engine, self.emit, time.time())
        # The loop and the saver share this object.
        vars(self.state).update(vars(restored))
        return self.data_loaders_from(self.state.position, is_new=False).training


class EvalGenerators(NamedTuple):
    """What generates text at evaluations; None for what is not set."""

    answers: Any = None  # sampling.Answers, which answers held-out prompts (`eval.samples`)
    tasks: Any = None  # tasks.Tasks, which scores tasks of lm-eval (`eval.tasks`)


def _build_eval_generators(
    plan: Plan, engine: Engine, rollouts: Any, device: str, emit: Emit
) -> EvalGenerators:
    """Return what generates text at evaluations. It shares the generator of rollouts, if any."""
    options = plan.config.eval
    if not options.generates:
        return EvalGenerators()
    from drumline.train import sampling  # importing the generators takes a second
    from drumline.train.tasks import Tasks

    tokenizer = sampling.tokenizer_of(plan)
    if rollouts is None:
        generate = sampling.generation_for_evaluation(plan, engine, tokenizer, device)
    else:
        generate = rollouts.sample
    answers: Any = None
    if options.samples:
        answers = sampling.Answers(generate, sampling.prompts(plan), tokenizer, emit)
    tasks: Any = None
    if options.tasks:
        tasks = Tasks(plan, generate.model, tokenizer)
    return EvalGenerators(answers, tasks)


def _build_meter(plan: Plan, ranks: RankInfo) -> Meter:
    """Return the meter of the devices of this rank.

    It reads the GPU that the rank computes on and, on the first rank of a host, the host's CPUs.
    """
    is_first_of_host = ranks.local_rank == 0
    if plan.device != "cuda":
        return Meter(None, False, is_first_of_host)
    uuid = torch.cuda.get_device_properties(gpu(ranks)).uuid
    # If ranks share one GPU, the first of them measures it.
    measures_gpu = torch.cuda.device_count() > 1 or is_first_of_host
    return Meter(str(uuid), measures_gpu, is_first_of_host)


def _build_engine(plan: Plan, device: str, checkpoint_keys: frozenset[str]) -> Engine:
    """Return the engine of the policy. `checkpoint_keys`: weights that a checkpoint will fill."""
    if not plan.config.has_own_module:
        return build_engine(plan, device, checkpoint_keys)
    model = plan.config.model
    parts = ModuleParts(model.units, model.tp_plan)
    return build_module(plan, own_build(plan), device, checkpoint_keys, parts=parts)


def _verify_caches(plan: Plan, ranks: RankInfo) -> Future[None]:
    """Begin to verify the token caches, shared out to the ranks, while the model is loaded."""
    folders: list[str] = []
    if plan.data is not None and plan.config.data.verify and not plan.config.has_own_module:
        if not plan.data.stream:
            folders.append(plan.data.train_cache)
        folders += plan.data.eval_caches.values()
    caches = [TokenCache.open(Path(folder)) for folder in folders]
    digests = [(cache.folder, cache.info["sha256"]) for cache in caches]
    return verify_in_background(digests, ranks.rank, ranks.world_size)


def set_kernels(plan: Plan) -> None:
    """Switch kernels of torch on or off: TF32, and cuDNN's attention.

    On Hopper torch prefers cuDNN's attention, which has to prepare for each new shape. So it is used
    only if all batches have one width, and not with rollouts, which grow by a token at a time.
    """
    torch.backends.cuda.matmul.allow_tf32 = plan.config.precision.tf32
    torch.backends.cudnn.allow_tf32 = plan.config.precision.tf32
    # What is compiled serves the next run, too; torch's own folder is below /tmp.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "compiled"))
    rolls_out = plan.config.algorithm.rollout is not None
    torch.backends.cuda.enable_cudnn_sdp(plan.fixed_width is not None and not rolls_out)

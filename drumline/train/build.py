"""The composition root: the only place where the plan's names become objects."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.disks import Disks, Gatherer, fetch
from drumline.checkpoint.load import Found, check, compensations, load, newest, of_run, read_state
from drumline.checkpoint.manifest import make_newest, read_manifest, step_of
from drumline.checkpoint.memory import Memory
from drumline.checkpoint.ranks import Ranks as RankGroup
from drumline.checkpoint.remote import Store
from drumline.checkpoint.retention import best_of, recover
from drumline.checkpoint.save import Checkpointer
from drumline.core.files import is_own_checkpoint
from drumline.core.load import refused, saved_config
from drumline.core.plan import Plan
from drumline.core.resolve import going_on
from drumline.core.run import EvalConfig
from drumline.core.signals import StopFlag
from drumline.core.urls import FETCHED, is_url
from drumline.data.cache import TokenCache, verify_in_background
from drumline.data.stream import GlobalBatch
from drumline.dist.reduce import Gather
from drumline.dist.seeds import deterministic
from drumline.dist.start import Ranks, gpu
from drumline.errors import CheckpointError, DataError
from drumline.hardware.detect import cache_dir
from drumline.models.own import own_build
from drumline.parallel.engine import OPTIONAL, Engine
from drumline.strategies.build import build_engine, build_module, stats_with_frozen
from drumline.telemetry.devices import Meter
from drumline.telemetry.events import Emit, Event, Restore, series
from drumline.telemetry.measure import Measure, process_bytes
from drumline.telemetry.traffic import Traffic
from drumline.train.loop import Loop
from drumline.train.references import Reference
from drumline.train.saving import Saver
from drumline.train.state import Goodput, TrainState, judged
from drumline.train.streams import Batches, FirstPass, Streams, build_streams, fixed_width
from drumline.train.timeouts import CollectiveTimeout

# The section of weights, of the policy or of another role (ROLE/model.…).
MODEL = re.compile(r"(^|(?<=/))model\.")


def build(
    plan: Plan,
    ranks: Ranks,
    resume: str | None,
    emit: Emit,
    stop_flag: StopFlag,
    past: list[Event],
    goodput: Goodput,
) -> Loop:
    """Everything of one rank, wired. `past`: the events of the run so far."""
    config = plan.config
    timeout = CollectiveTimeout(plan)
    if config.run.deterministic:
        deterministic()
    set_kernels(plan)
    device = f"cuda:{gpu(ranks)}" if plan.device == "cuda" else plan.place
    verification = _verification(plan, ranks)
    start, state, began = None, TrainState(), time.time()
    memory = memory_of(plan, resume == "newest") if plan.saves else None
    if resume is not None:
        with goodput.spend("restore"):
            start = Start.find(plan, resume, memory)
    searched = time.time() - began
    engine = _engine(plan, device, start.checkpoint_keys if start else frozenset())
    goodput.end_part("model")
    checkpointer = checkpointer_of(plan, _mode(plan))
    if memory is not None:
        memory.begin()
    if start is not None:
        with goodput.spend("restore"):
            state = start.restore(engine, emit, time.time() - searched)
    plan = going_on(plan, state.step, state.position)
    gather = Gather(ranks.rank, ranks.world_size, device, counts=plan.mesh.counts(ranks.rank))
    rollouts, back, held_out = None, None, dict[str, Batches]()
    training: Iterable[GlobalBatch]
    if (rollout := config.algorithm.rollout) is not None:
        from drumline.train.reinforced import reinforced  # what generates takes a second to import

        algorithm, rollouts, training = reinforced(
            plan, rollout, ranks, engine, state, device, emit
        )
    else:
        algorithm = config.algorithm.build_in(Path(plan.base_dir))
        fresh = start is None or start.path is None
        training, held_out, back = _streams(
            plan, ranks, engine, algorithm, state, fresh, gather, emit, stop_flag
        )
    answers, tasks = _written(plan, engine, rollouts, device, emit)
    # Damage to a cache that any rank has found.
    RankGroup.all(error_type=DataError).each(verification.result)
    goodput.end_part("data")
    saved = state.step if start and start.path and checkpointer.is_kept(start.path) else -1
    return Loop(
        plan=plan,
        engine=engine,
        algorithm=algorithm,
        rollouts=rollouts,
        rewind=back,
        stream=training,
        held_out=held_out,
        meter=_meter(plan, ranks),
        answers=answers,
        tasks=tasks,
        saver=Saver(
            plan, engine, state, checkpointer, emit, gather, stop_flag, saved, memory=memory
        ),
        emit=emit,
        gather=gather,
        timeout=timeout,
        stop_flag=stop_flag,
        # The peak that the allocator handed out on a GPU, the resident set on a CPU.
        memory_bytes=lambda: (
            torch.cuda.max_memory_allocated() if plan.device == "cuda" else process_bytes()["VmRSS"]
        ),
        state=state,
        goodput=goodput,
        measure=Measure(
            plan,
            lambda: stats_with_frozen(engine),
            gather,
            emit,
            Traffic(config.strategy.step_kind, device),
        ),
        seen_step=max(series(past, "loss"), default=0),
    )


def _streams(
    plan: Plan,
    ranks: Ranks,
    engine: Engine,
    algorithm: Any,
    state: TrainState,
    is_new: bool,
    gather: Gather,
    emit: Emit,
    stop_flag: StopFlag,
) -> tuple[Iterable[GlobalBatch], dict[str, Batches], Batches]:
    """Training batches, what gives held-out ones by set, and what goes back to the newest checkpoint and gives those after."""

    def after(position: int, is_new: bool) -> Streams:
        here = plan.mesh.data_rank(ranks.rank), position
        streams = build_streams(
            plan, *here, gather.device, ranks.local_rank == 0, state.stream, state.step
        )
        if plan.config.algorithm.reference_of(plan.config) != "none":
            streams = Reference(
                plan, ranks, gather.device, engine, algorithm, streams, is_new, emit, stop_flag
            ).prepared()
        if (read := algorithm.first_pass) is not None:
            streams = FirstPass(algorithm, read, engine, gather.counts, gather.device).prepared(
                streams
            )
        return streams

    def rewind() -> Iterable[GlobalBatch]:
        found = Start.find(plan, "newest")
        if found.path is None:  # the save that was on its way has failed
            raise CheckpointError(
                "no checkpoint to go back to",
                where=plan.run_dir,
                fix="start anew, or set health.on_spike=skip",
            )
        vars(state).update(vars(found.restore(engine, emit, time.time())))
        return after(state.position, False).training

    streams = after(state.position, is_new)
    return streams.training, streams.held_out, rewind


def _written(plan: Plan, engine: Engine, rollouts: Any, device: str, emit: Emit) -> tuple[Any, Any]:
    """What answers held-out prompts, and what scores tasks, by the sampler of rollouts where there is one; None for what is not set."""
    if not plan.config.eval.generates:
        return None, None
    from drumline.train import sampling  # what generates takes a second to import
    from drumline.train.tasks import Tasks

    options, tokenizer = plan.config.eval, sampling.tokenizer_of(plan)
    sample = (
        sampling.of_evaluation(plan, engine, tokenizer, device)
        if rollouts is None
        else rollouts.sample
    )
    answers = (
        sampling.Answers(sample, sampling.prompts(plan), tokenizer, emit)
        if options.samples
        else None
    )
    return answers, Tasks(plan, sample.model, tokenizer) if options.tasks else None


def _meter(plan: Plan, ranks: Ranks) -> Meter:
    """Of the GPU that this rank computes on, and, on the first rank of a host, of its CPUs."""
    if plan.device != "cuda":
        return Meter(None, False, ranks.local_rank == 0)
    number = gpu(ranks)
    seen = torch.cuda.device_count()
    return Meter(
        str(torch.cuda.get_device_properties(number).uuid),
        seen > 1 or ranks.local_rank == 0,
        ranks.local_rank == 0,
    )


def _mode(plan: Plan) -> str:
    """What rates its checkpoints (`Retention`)."""
    return f"{plan.config.eval.mode} {plan.config.eval.metric}"


def checkpointer_of(plan: Plan, mode: str) -> Checkpointer:
    """What writes the checkpoints of a run. Collective."""
    saves, root = plan.config.checkpoint, Path(plan.run_dir) / "checkpoints"
    return Checkpointer(
        root,
        saves.keep,
        saves.keep_best,
        mode,
        saves.asynchronous,
        url=saves.url,
        replicas=saves.replicas,
    )


def _engine(plan: Plan, device: str, checkpoint_keys: frozenset[str]) -> Engine:
    model = plan.config.model
    if plan.config.plain:
        return build_module(
            plan, own_build(plan), device, checkpoint_keys, units=model.units, tp_plan=model.tp_plan
        )
    return build_engine(plan, device, checkpoint_keys)


def _verification(plan: Plan, ranks: Ranks) -> Future[None]:
    """Of the token caches, shared out to the ranks, while the model is loaded."""
    data = plan.data if plan.config.data.verify and not plan.config.plain else None
    folders = (
        [*([] if data.stream else [data.train_cache]), *data.eval_caches.values()] if data else []
    )
    caches = [TokenCache.open(folder) for folder in folders]
    return verify_in_background(
        [(cache.folder, cache.info["sha256"]) for cache in caches], ranks.rank, ranks.world_size
    )


@dataclass(frozen=True)
class Start:
    """What a run goes on from: a whole checkpoint, or step 0 (`path` None); the damaged ones that were passed over."""

    path: Path | None
    skipped: list[dict[str, str]]
    # Names of the models' tensors that are in it, without their section.
    checkpoint_keys: frozenset[str]
    # Of the plan: its metric and mode rate checkpoints.
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    @classmethod
    def find(cls, plan: Plan, resume: str, memory: Memory | None = None) -> Start:
        """`resume`: a checkpoint's folder or URL, or `newest` for the newest whole one, on disk or in memory, or the folder of a run, for
        that of it. Collective."""
        verify, skipped = plan.config.checkpoint.verify, []
        path: Path | None = Path(resume)
        RankGroup.all(error_type=CheckpointError).each(
            partial(recover, Path(plan.run_dir) / "checkpoints")
        )
        if (newest_own := resume == "newest") or RankGroup.all(error_type=CheckpointError).first(
            lambda: of_run(resume)
        ):
            found = (
                _newest(plan)
                if newest_own
                else newest(Path(resume) / "checkpoints", verify, to_train=True)
            )
            if newest_own and memory is not None:
                later = memory.newest(
                    step_of(found.path.name) or 0 if found.path else 0,
                    lambda state: _misfit(plan, state),
                )
                found = Found(later.path or found.path, [*later.skipped, *found.skipped])
            path, skipped = (
                found.path,
                [{"path": str(p), "reason": reason} for p, reason in found.skipped],
            )
            if path is None and (skipped or not newest_own):
                what, where = (
                    "no checkpoint is whole: " + "; ".join(s["reason"] for s in skipped),
                    plan.run_dir if newest_own else resume,
                )
                raise CheckpointError(
                    what, where=where, fix="start again in another folder with run.dir=…"
                )
        elif is_url(resume):
            path = fetch(resume, Path(plan.run_dir) / FETCHED)
        else:
            check(Path(resume), verify)
            own = (
                plan.saves
                and not plan.config.checkpoint.apart
                and is_own_checkpoint(Path(resume), Path(plan.run_dir))
            )
            if own:  # a restart, or a spike, goes back to it, and not beyond
                RankGroup.all(error_type=CheckpointError).first(partial(make_newest, Path(resume)))
        names = read_manifest(path).tensors if path else ()
        keys = frozenset(re.sub(MODEL, "", name) for name in names if re.search(MODEL, name))
        return cls(path, skipped, keys, plan.config.eval)

    def keys_of(self, name: str) -> frozenset[str]:
        """Of one of the models that a session has; "" for the only one."""
        prefix = f"{name}/" if name else ""
        return frozenset(
            key.removeprefix(prefix) for key in self.checkpoint_keys if key.startswith(prefix)
        )

    def restore(self, engine: Engine, emit: Emit, began: float) -> TrainState:
        """Fill the engine; the event has the seconds since `began` (unix). Collective."""
        state = TrainState()
        if self.path is not None:
            tensors, saved = engine.tensors(), read_state(self.path)
            lost = compensations(self.path, tensors)
            sections = {name.partition(".")[0] for name in tensors}
            optional = frozenset(
                section for section in sections if section.rpartition("/")[2] in OPTIONAL
            )
            load(
                self.path,
                tensors | {name: value for name, (_, value) in lost.items()},
                optional=optional,
            )
            for weight, value in lost.values():
                tensors[weight].add_(value)
            state = TrainState(**saved["trainer"])
            before = saved["config"].get("eval", {})
            rating = {"metric": self.evaluation.metric, "mode": self.evaluation.mode}
            if any(before.get(key, value) != value for key, value in rating.items()):
                state.best, state.mark, state.stale = None, None, 0  # measured by another metric
            manifest = read_manifest(self.path)
            # After steps that changed nothing (`skips`) the metric of the same weights was counted before the save.
            was_rated_later = 0 <= state.evaluated < state.step and not state.skips
            if (
                was_rated_later
                and manifest.metric is not None
                and manifest.rated == f"{self.evaluation.mode} {self.evaluation.metric}"
            ):
                # An evaluation after the save, whose metric was written beside it (Checkpointer.write_metric).
                judged({self.evaluation.metric: manifest.metric}, self.evaluation, state)
                state.evaluated = state.step
            engine.load_state({**saved["engine"], "step": state.step}, tensors)
            if state.step < 0 or state.position < 0:
                raise CheckpointError(
                    f"state.json says step {state.step}, position {state.position}",
                    where=str(self.path),
                )
            if self.path.parent.name == FETCHED:
                RankGroup.all().each(lambda: None)  # all have read it
                shutil.rmtree(self.path.parent, ignore_errors=True)
        path = None if self.path is None else str(self.path)
        emit(Restore(step=state.step, path=path, seconds=time.time() - began, skipped=self.skipped))
        return state


def _newest(plan: Plan) -> Found:
    """The newest whole checkpoint of a run; where its files may lie on several disks or at a URL, put together on each disk. Collective."""
    saves, root, mode = plan.config.checkpoint, Path(plan.run_dir) / "checkpoints", _mode(plan)
    if not saves.apart:
        return newest(root, saves.verify, to_train=True)
    ranks = RankGroup.all(error_type=CheckpointError)
    gatherer = Gatherer(
        root, saves.verify, Store(saves.url) if saves.url else None, Disks.find(root, ranks)
    )
    return gatherer.newest(lambda known: best_of(known, mode) if saves.keep_best else None)


def _misfit(plan: Plan, state: dict[str, Any]) -> str | None:
    """Why a state in memory, which nobody has compared with this start's plan yet, is not one to go on from."""
    changes, keys = refused(
        saved_config(state["config"], plan.config, (), "memory"), plan.config, ()
    )
    identity = plan.data.identity.model_dump() if plan.data and plan.data.identity else None
    return (
        f"made with another config: {changes}"
        if keys
        else "made with other data"
        if state["data"] != identity
        else None
    )


def memory_of(plan: Plan, goes_on: bool) -> Memory | None:
    """Where hosts keep states in memory, if they do (`Memory`). Collective."""
    return Memory(Path(plan.run_dir), goes_on) if plan.config.checkpoint.in_memory_every else None


def set_kernels(plan: Plan) -> None:
    """Set the kernels of a plan: TF32 in products and in convolutions, and cuDNN's attention where all batches are of one width.

    On Hopper torch prefers cuDNN's attention, which makes a plan for each new shape; rollouts grow by a token, and rows vary.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        plan.config.precision.tf32
    )
    # What is compiled serves the next run, too; torch's own folder is below /tmp.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "compiled"))
    rolls_out = plan.config.algorithm.rollout is not None
    torch.backends.cuda.enable_cudnn_sdp(fixed_width(plan) is not None and not rolls_out)

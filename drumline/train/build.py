"""The composition root: the only place where the plan's names become objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drumline.algorithms.base import Algorithm
from drumline.algorithms.classify import Classify
from drumline.algorithms.tokens import NextToken
from drumline.checkpoint.load import check, load, newest, read_state
from drumline.checkpoint.manifest import read_manifest
from drumline.checkpoint.save import Checkpointer
from drumline.config.algorithms import ClassifyConfig, PretrainConfig, SFTConfig
from drumline.config.schema import Config
from drumline.data.batches import collate
from drumline.data.cache import TokenCache
from drumline.data.stream import BatchStream, GlobalBatch, GlobalOrder
from drumline.data.vision import collate_vision
from drumline.dist.reduce import Gather
from drumline.dist.seeds import derive, deterministic
from drumline.dist.start import Ranks
from drumline.dist.traffic import Traffic
from drumline.errors import CheckpointError
from drumline.models.load import load_config, load_tokenizer, pad_token_id
from drumline.models.vision import find_vision
from drumline.plan.communication import step_kind
from drumline.plan.plan import BatchPlan, Plan
from drumline.plan.resolve import total_samples
from drumline.report.events import series
from drumline.strategies.build import build_engine
from drumline.strategies.engine import OPTIONAL, Engine
from drumline.train.labelled import labelled_collator
from drumline.train.loop import Asked, Loop
from drumline.train.state import Goodput, TrainState

Emit = Callable[..., None]


def build(plan: Plan, ranks: Ranks, resume: str | None, emit: Emit, asked: Asked, past: list[dict[str, Any]], goodput: Goodput) -> Loop:
    """Everything of one rank, wired. `past`: the events of the run so far."""
    config = plan.config
    if config.run.deterministic:
        deterministic()
    torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
    device = f"cuda:{ranks.local_rank}" if plan.device == "cuda" else "cpu"
    start, searched = None, 0.0
    if resume is not None:
        with goodput.spend("restore"):
            began = time.time()
            start = Start.find(plan, resume)
            searched = time.time() - began
    engine = build_engine(plan, device, start.held if start else frozenset())
    checkpointer = Checkpointer(
        Path(plan.run_dir) / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        mode=config.eval.mode,
        asynchronous=config.checkpoint.asynchronous,
    )
    state = TrainState()
    if start is not None:
        with goodput.spend("restore"):
            state = start.restore(engine, emit, time.time() - searched)
    stream, held_out = build_streams(plan, plan.mesh.data_rank(ranks.rank), state.position, device)
    losses = series(past, "loss")
    return Loop(
        plan=plan,
        engine=engine,
        algorithm=build_algorithm(config),
        stream=stream,
        held_out=held_out,
        checkpointer=checkpointer,
        emit=emit,
        gather=Gather(ranks.rank, ranks.world_size, device, counts=plan.mesh.counts(ranks.rank)),
        asked=asked,
        memory_bytes=lambda: memory_in_use(plan.device),
        state=state,
        goodput=goodput,
        random_stream=plan.mesh.stream(ranks.rank),
        traffic=Traffic(lambda step: step_kind(config.strategy, step), device),
        seen_step=max(losses, default=0),
        saved_step=state.step if resume is not None else -1,
    )


def build_algorithm(config: Config) -> Algorithm:
    algorithm = config.algorithm
    if isinstance(algorithm, PretrainConfig | SFTConfig):
        return NextToken(algorithm.loss_chunk, answers=algorithm.kind == "sft")
    if isinstance(algorithm, ClassifyConfig):
        return Classify(algorithm.label_smoothing)
    raise AssertionError(algorithm.kind)


def build_streams(
    plan: Plan, data_rank: int, position: int, device: str
) -> tuple[Iterable[GlobalBatch], Callable[[], Iterable[GlobalBatch]] | None]:
    """Training batches from `position` on, and a way to go through the held-out set once."""
    config, data = plan.config, plan.data
    assert data is not None, "workers get plans of prepared data"
    # Compiled blocks and the stages of a pipeline want one shape; otherwise a micro-batch is as wide as its longest row.
    width = config.data.max_length if config.compile.enabled or plan.mesh.pp * plan.mesh.cp > 1 else None

    collator = labelled_collator(plan, width) if isinstance(config.algorithm, ClassifyConfig) else _token_collator(plan, width)

    def stream(folder: str, batch: BatchPlan, shuffle: bool, start: int, stop: int, prefetch: int) -> BatchStream:
        cache = TokenCache.open(Path(folder))
        order = GlobalOrder(len(cache), derive(config.run.seed, "order"), shuffle)
        return BatchStream(cache, order, batch, data_rank, plan.mesh.data_ranks, start, stop, collator(cache), prefetch)

    def on_device(batches: BatchStream) -> Iterable[GlobalBatch]:
        with batches:
            for batch in batches:
                yield replace(batch, micro_batches=[b.to(device) for b in batch.micro_batches])

    def held_out() -> Iterable[GlobalBatch]:
        assert data is not None and data.eval_cache is not None
        micro = plan.batch.eval_micro_batch
        # Stages work side by side on the micro-batches of one draw.
        several = plan.mesh.pp
        samples = micro * several * plan.mesh.data_ranks
        whole = BatchPlan(global_samples=samples, micro_batch=micro, accumulation=several, eval_micro_batch=micro)
        return on_device(stream(data.eval_cache, whole, False, 0, data.eval_samples, 0))

    stop = total_samples(config, plan.batch, data)
    training = stream(data.train_cache, plan.batch, config.data.order == "shuffle", position, stop, config.data.prefetch)
    return on_device(training), held_out if data.eval_cache else None


def _token_collator(plan: Plan, width: int | None) -> Callable[[TokenCache], Callable[[list[int]], Any]]:
    model = plan.config.model
    pad = pad_token_id(load_tokenizer(plan.model_path, model))
    vision = find_vision(load_config(plan.model_path, model), plan.model_path, model)
    if vision is not None:
        return lambda cache: lambda ids: collate_vision(cache, ids, pad, width, vision)
    return lambda cache: lambda ids: collate([cache.segments(sample) if sample >= 0 else None for sample in ids], pad, width)


@dataclass(frozen=True)
class Start:
    """What a run goes on from: a whole checkpoint, or step 0 (`path` None); the damaged ones that were passed over."""

    path: Path | None
    skipped: list[dict[str, str]]
    held: frozenset[str]  # names of the model's tensors that are in it

    @classmethod
    def find(cls, plan: Plan, resume: str) -> Start:
        """`resume`: a checkpoint folder, or `newest` for the newest whole one. Collective."""
        verify = plan.config.checkpoint.verify
        path, skipped = Path(resume), []
        if resume == "newest":
            found = newest(Path(plan.run_dir) / "checkpoints", verify)
            skipped = [{"path": str(p), "reason": reason} for p, reason in found.skipped]
            if found.path is None and skipped:
                raise CheckpointError(
                    "no checkpoint is whole: " + "; ".join(s["reason"] for s in skipped),
                    where=plan.run_dir,
                    fix="start again in another folder with run.dir=…",
                )
            if found.path is None:
                return cls(None, skipped, frozenset())
            path = found.path
        else:
            check(path, verify)
        names = read_manifest(path).tensors
        return cls(path, skipped, frozenset(name.removeprefix("model.") for name in names if name.startswith("model.")))

    def restore(self, engine: Engine, emit: Emit, began: float) -> TrainState:
        """Fill the engine; the event says the seconds since `began` (unix). Collective."""
        state = TrainState()
        if self.path is not None:
            tensors = engine.tensors()
            load(self.path, tensors, optional=OPTIONAL)
            saved = read_state(self.path)
            state = TrainState.load(saved["trainer"])
            engine.load_state({**saved["engine"], "step": state.step}, tensors)
            if state.step < 0 or state.position < 0:
                raise CheckpointError(f"state.json says step {state.step}, position {state.position}", where=str(self.path))
        path = None if self.path is None else str(self.path)
        emit("restore", step=state.step, path=path, seconds=time.time() - began, skipped=self.skipped)
        return state


def memory_in_use(device: str) -> int:
    """Bytes: the peak that the allocator handed out on a GPU, the resident set on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    import psutil

    return psutil.Process().memory_info().rss

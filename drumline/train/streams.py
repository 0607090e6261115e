"""Batches of one rank: what a sample becomes under each algorithm, the streams that the loop goes through, and numbers over a whole global
batch that an objective needs before its loss: a pass without gradients comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from drumline.algorithms.base import Algorithm
from drumline.core import heartbeat
from drumline.core.plan import BatchPlan, Plan
from drumline.core.resolve import total_samples
from drumline.data.batches import First, pinned
from drumline.data.blocks import Blocks, Maker, hold, remove_older_blocks
from drumline.data.cache import TokenCache
from drumline.data.make import Task
from drumline.data.samples import read_samples
from drumline.data.stream import BatchStream, GlobalBatch, GlobalOrder, MixedOrder, Order
from drumline.dist.copies import copied_to
from drumline.dist.reduce import add_up
from drumline.dist.seeds import Draws, derive
from drumline.models.load import load_config
from drumline.models.vision import vision_of
from drumline.parallel.engine import Engine, Read

Batches = Callable[[], Iterable[GlobalBatch]]


@dataclass(frozen=True)
class Streams:
    """Batches of one data rank, on its device: `training`; each evaluation set by name, gone through once; `once`: all of a cache folder,
    once."""

    training: Iterable[GlobalBatch]
    held_out: dict[str, Batches]
    once: Callable[[str], Iterable[GlobalBatch]]


def fixed_width(plan: Plan) -> int | None:
    """Tokens that every micro-batch is wide: compiled blocks and the stages of a pipeline want one shape. None: as its longest row."""
    fixed = plan.config.compile.enabled or plan.mesh.pp * plan.mesh.cp > 1
    return plan.config.data.max_length if fixed else None


def open_samples(plan: Plan, folder: str) -> Any:
    """The token cache in a folder; where any module is trained, the samples of the sources that `folder` names: train, or eval/SET."""
    if not plan.config.plain:
        return TokenCache.open(Path(folder))
    data, (section, _, name) = plan.config.data, folder.partition("/")
    return read_samples(
        data.train if section == "train" else data.eval_sets[name],
        Path(plan.base_dir),
        Draws(0).used,
    )


def order_of(plan: Plan, samples: int) -> Order:
    """The order of the training samples, of which there are so many."""
    config, sources = plan.config, plan.data.sources if plan.data else ()
    seed, shuffle, curriculum = (
        derive(config.run.seed, "order"),
        config.data.order == "shuffle",
        config.data.curriculum,
    )
    if curriculum is None and not config.data.mixed:
        return GlobalOrder(samples, seed, shuffle)
    parts = (
        [(each.samples or 0, each.per_epoch) for each in sources]
        if config.data.mixed
        else [(samples, samples)]
    )
    sizes, counts = zip(*parts, strict=True)
    assert sum(sizes) == samples, "the plan is of this cache"
    return MixedOrder(
        sizes,
        counts,
        seed,
        shuffle,
        curriculum.epochs if curriculum else 0,
        curriculum.reverse if curriculum else False,
    )


def open_blocks(plan: Plan, makes: bool, known: dict[str, Any]) -> Blocks:
    config, data = plan.config, plan.data
    assert data is not None and config.data.stream is not None
    root, maker, curriculum = Path(data.train_cache), None, config.data.curriculum
    if makes and hold(root, plan.run_dir):
        remove_older_blocks(root)
        vision = vision_of(config, plan.model_path, load_config(plan.model_path, config.model))
        task = Task(config, config.data.train, root, None, vision)
        maker = Maker(task, config.model.tokenizer or plan.model_path or "", Path(plan.base_dir))
    seed = (
        derive(config.run.seed, "order")
        if config.data.order == "shuffle" and curriculum is None
        else None
    )
    margin = (config.data.prefetch + 2) * plan.batch.global_samples
    falling = curriculum is not None and curriculum.reverse
    weighted = any(source.weight is not None for source in config.data.train)
    return Blocks(
        root,
        config.data.stream,
        maker,
        seed,
        falling=falling,
        known=known,
        margin=margin,
        weighted=weighted,
    )


class Copies:
    """Micro-batches onto the device. On a GPU they come from page-locked memory, which the thread that collates fills, by a stream of their
    own: the host is ahead of the device, so a copy runs beside the step before."""

    def __init__(self, device: str) -> None:
        self.device, self.stream = (
            device,
            torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None,
        )

    def pinned(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        return collate if self.stream is None else lambda *columns: collate(*columns).each(pinned)

    def moved(self, micro_batches: list[Any]) -> list[Any]:
        if self.stream is None:
            return [batch.to(self.device) for batch in micro_batches]
        with torch.cuda.stream(self.stream):
            there = [batch.to(self.device) for batch in micro_batches]
        user = torch.cuda.current_stream(self.device)
        user.wait_stream(self.stream)

        def lent(tensor: torch.Tensor) -> torch.Tensor:
            """Its memory is the copying stream's, which must not take it back for a next batch while the step still reads."""
            tensor.record_stream(user)
            return tensor

        return [batch.each(lent) for batch in there]


def build_streams(
    plan: Plan,
    data_rank: int,
    position: int,
    device: str,
    makes: bool = True,
    known: dict[str, Any] | None = None,
    step: int = 0,
) -> Streams:
    """Training batches go on after `step`, from `position`. `makes`: this rank makes blocks of a stream; `known`: see `Blocks.state`."""
    config, data = plan.config, plan.data
    assert data is not None, "workers get plans of prepared data"
    collator, copies = config.algorithm.collator(plan, fixed_width(plan)), Copies(device)

    def stream(
        cache: Any,
        order: Order,
        batch: BatchPlan,
        start: int,
        stop: int,
        prefetch: int,
        of: Literal["batch", "all"],
    ) -> BatchStream:
        previous = of if config.algorithm.pairs_with_previous else "none"
        return BatchStream(
            cache,
            order,
            batch,
            data_rank,
            plan.mesh.data_ranks,
            start,
            stop,
            copies.pinned(collator(cache)),
            prefetch,
            previous,
        )

    def on_device(batches: BatchStream) -> Iterable[GlobalBatch]:
        with (
            batches,
            closing(batches.cache) if isinstance(batches.cache, Blocks) else nullcontext(),
        ):
            for batch in batches:
                yield replace(batch, micro_batches=copies.moved(batch.micro_batches))

    def once(folder: str) -> Iterable[GlobalBatch]:
        cache, micro = open_samples(plan, folder), plan.batch.eval_micro_batch
        # Stages work side by side on the micro-batches of one draw.
        stages = plan.mesh.pp
        samples = micro * stages * plan.mesh.data_ranks
        whole = BatchPlan(
            global_samples=samples, micro_batch=micro, accumulation=stages, eval_micro_batch=micro
        )
        return on_device(
            stream(cache, GlobalOrder(len(cache), 0, shuffle=False), whole, 0, len(cache), 0, "all")
        )

    stop, held_out = total_samples(config, plan.batch, data, step, position), data.eval_caches
    cache: Any = (
        open_blocks(plan, makes, known or {})
        if data.stream
        else open_samples(plan, data.train_cache)
    )
    order = cache if data.stream else order_of(plan, len(cache))
    training = stream(cache, order, plan.batch, position, stop, config.data.prefetch, "batch")
    heartbeat.answer("samples", lambda: training.ids(heartbeat.position()).tolist())
    return Streams(
        on_device(training),
        {name: partial(once, folder) for name, folder in held_out.items()},
        once,
    )


@dataclass(frozen=True)
class FirstPass:
    """`Algorithm.first_pass` on one rank. `counts`: no other rank adds the numbers of the same samples."""

    algorithm: Algorithm
    read: Read
    engine: Engine
    counts: bool
    device: str

    def prepared(self, streams: Streams) -> Streams:
        """The streams, with `first` and `places_P` in every micro-batch. Drawing is collective. The numbers in a batch that is evaluated
        are those of the whole evaluation set, which is gone through twice: how it is cut depends on how many ranks there are."""
        return Streams(
            training=(filled(batch, First(self.numbers(batch)), 0) for batch in streams.training),
            held_out={
                name: partial(self._whole, batches) for name, batches in streams.held_out.items()
            },
            once=lambda folder: self._whole(lambda: streams.once(folder)),
        )

    def numbers(self, batch: GlobalBatch) -> torch.Tensor:
        """fp64[N, K]: what `read` gives for the N samples of the global batch, in its order, fillers left out. The same on every rank, and
        on any number of ranks: one rank adds each sample's numbers, the others add zeros."""
        numbers_of = self.engine.infer(
            [self.algorithm.first_batch(b) for b in batch.micro_batches], self.read
        )
        table_GK = torch.zeros(
            len(batch.sample_ids), numbers_of[0].shape[1], dtype=torch.float64, device=self.device
        )
        if self.counts:
            for places, numbers_PK in zip(batch.places, numbers_of, strict=True):
                table_GK[copied_to(self.device, torch.from_numpy(places))] = numbers_PK.double()
        # By numbers of rows: of a mask the host would have to ask the device how many it chooses.
        real_N = torch.from_numpy(np.flatnonzero(batch.sample_ids >= 0))
        return add_up(table_GK)[copied_to(self.device, real_N)]

    def _whole(self, batches: Callable[[], Iterable[GlobalBatch]]) -> Iterator[GlobalBatch]:
        numbers_of = [self.numbers(batch) for batch in batches()]
        first, start = First(torch.cat(numbers_of)), 0
        for batch, numbers_NK in zip(batches(), numbers_of, strict=True):
            yield filled(batch, first, start)
            start += len(numbers_NK)


def filled(batch: GlobalBatch, first: First, start: int) -> GlobalBatch:
    """The batch with `first` and `places_P` in its micro-batches; its own samples begin at row `start` of the numbers."""
    is_real_G = batch.sample_ids >= 0
    rows_G = np.where(is_real_G, is_real_G.cumsum() - 1 + start, -1)
    device = first.numbers_NK.device
    micro_batches = []
    for micro_batch, places in zip(batch.micro_batches, batch.places, strict=True):
        places_P = copied_to(device, torch.from_numpy(rows_G[places]))
        micro_batches.append(replace(micro_batch, first=first, places_P=places_P))
    return replace(batch, micro_batches=micro_batches)

"""The batches of one rank, for training and evaluation, on its device.

Some objectives need numbers over a whole global batch before they can compute a loss. `FirstPass`
computes these in a pass without gradients, and puts them into the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from drumline.algorithms.base import Algorithm
from drumline.data.batches import FirstPassNumbers, pin_memory
from drumline.data.blocks import BlockMaker, Blocks, remove_older_blocks, try_lock_stream
from drumline.data.cache import TokenCache
from drumline.data.make import CacheBuild
from drumline.data.order import BatchStream, GlobalBatch, GlobalOrder, MixedOrder, Order
from drumline.data.samples import read_samples
from drumline.dist.copies import copied_to
from drumline.dist.reduce import add_up
from drumline.dist.seeds import Draws, derive
from drumline.engine.engine import Engine, Extract
from drumline.models.load import load_config
from drumline.models.vision import vision_of
from drumline.plan.plan import BatchPlan, Plan
from drumline.plan.resolve import total_samples
from drumline.system import heartbeat

Batches = Callable[[], Iterable[GlobalBatch]]


@dataclass(frozen=True)
class Streams:
    """Batches of one data rank, on its device."""

    training: Iterable[GlobalBatch]
    # For each evaluation set, by name: a function that returns its batches, with each sample once.
    held_out: dict[str, Batches]
    # Returns batches with all samples of a cache folder, each once.
    once: Callable[[str], Iterable[GlobalBatch]]


def open_samples(plan: Plan, folder: str) -> Any:
    """Return the token cache in a folder.

    For a module of the user's own there is no cache. Then `folder` is "train" or "eval/SET", and
    the samples of those sources are returned.
    """
    if not plan.config.plain:
        return TokenCache.open(Path(folder))
    section, _, name = folder.partition("/")
    if section == "train":
        sources = plan.config.data.train
    else:
        sources = plan.config.data.eval_sets[name]
    return read_samples(sources, Path(plan.base_dir), Draws(0).used)


def training_order(plan: Plan, samples: int) -> Order:
    """Return the order in which the samples of the training cache are taken, the same on all ranks.

    `samples`: how many there are.
    """
    config = plan.config
    seed = derive(config.run.seed, "order")
    shuffles = config.data.order == "shuffle"
    curriculum = config.data.curriculum
    if curriculum is None and not config.data.mixed:
        return GlobalOrder(samples, seed, shuffles)
    sizes: tuple[int, ...] = (samples,)
    counts: tuple[int, ...] = (samples,)
    if config.data.mixed:
        # How many samples each source has, and how many of them an epoch takes.
        sources = plan.data.sources if plan.data else ()
        sizes = tuple(source.samples or 0 for source in sources)
        counts = tuple(source.per_epoch for source in sources)
    assert sum(sizes) == samples, "the plan is of this cache"
    if curriculum is None:
        return MixedOrder(sizes, counts, seed, shuffles, 0, False)
    return MixedOrder(sizes, counts, seed, shuffles, curriculum.epochs, curriculum.reverse)


def open_blocks(plan: Plan, makes: bool, known: dict[str, Any]) -> Blocks:
    """Return the blocks of a stream of data. `makes` and `known`: as in `build_streams`."""
    config = plan.config
    assert plan.data is not None and config.data.stream is not None
    root = Path(plan.data.train_cache)
    maker: BlockMaker | None = None
    if makes and try_lock_stream(root, plan.run_dir):
        remove_older_blocks(root)
        vision = vision_of(config, plan.model_path, load_config(plan.model_path, config.model))
        build = CacheBuild(config, config.data.train, root, None, vision)
        tokenizer_path = config.model.tokenizer or plan.model_path or ""
        maker = BlockMaker(build, tokenizer_path, Path(plan.base_dir))
    curriculum = config.data.curriculum
    seed: int | None = None
    if config.data.order == "shuffle" and curriculum is None:
        seed = derive(config.run.seed, "order")
    return Blocks(
        root,
        config.data.stream,
        maker,
        seed,
        reverse=curriculum is not None and curriculum.reverse,
        resume_state=known,
        # The global batches that are drawn ahead, the one that is trained on, and one more.
        margin=(config.data.prefetch + 2) * plan.batch.global_samples,
        weighted=any(source.weight is not None for source in config.data.train),
    )


class Copies:
    """Copies micro-batches to the device, while the device still computes the step before.

    For that, on a GPU, micro-batches are collated into page-locked memory, and copied on a CUDA
    stream of their own.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def pin(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collate function whose tensors are in page-locked memory, if there is a GPU."""
        if self.stream is None:
            return collate
        return lambda *columns: collate(*columns).each(pin_memory)

    def move(self, micro_batches: list[Any]) -> list[Any]:
        """Return micro-batches on the device.

        The host does not wait for the copies; the step's stream does.
        """
        if self.stream is None:
            return [batch.to(self.device) for batch in micro_batches]
        with torch.cuda.stream(self.stream):
            copies = [batch.to(self.device) for batch in micro_batches]
        stream_of_step = torch.cuda.current_stream(self.device)
        stream_of_step.wait_stream(self.stream)

        def keep_until_step(tensor: torch.Tensor) -> torch.Tensor:
            """Keep the copying stream from reusing memory that the step still reads."""
            tensor.record_stream(stream_of_step)
            return tensor

        return [batch.each(keep_until_step) for batch in copies]


def build_streams(
    plan: Plan,
    data_rank: int,
    position: int,
    device: str,
    makes: bool = True,
    known: dict[str, Any] | None = None,
    step: int = 0,
) -> Streams:
    """Return the batches of a data rank. Training goes on after `step`, from sample `position`.

    For a stream of data (`data.stream`): `makes` says whether this rank makes its blocks, and
    `known` is what `Blocks.checkpoint_state` returned.
    """
    builder = StreamBuilder(plan, data_rank, device)
    return builder.build(position, makes, known or {}, step)


class StreamBuilder:
    """Makes the streams of a data rank.

    They share the algorithm's collator and the copies to the device.
    """

    def __init__(self, plan: Plan, data_rank: int, device: str) -> None:
        self.plan = plan
        self.data_rank = data_rank
        self.collator = plan.config.algorithm.collator(plan, plan.fixed_width)
        self.copies = Copies(device)

    def build(self, position: int, makes: bool, known: dict[str, Any], step: int) -> Streams:
        """Return all streams. Arguments as those of `build_streams`."""
        plan = self.plan
        data = plan.data
        assert data is not None, "workers get plans of prepared data"
        stop = total_samples(plan.config, plan.batch, data, step, position)
        if data.stream:
            blocks = open_blocks(plan, makes, known)
            cache: Any = blocks
            order: Order = blocks
        else:
            cache = open_samples(plan, data.train_cache)
            order = training_order(plan, len(cache))
        training = self._stream(
            cache, order, plan.batch, position, stop, plan.config.data.prefetch, "batch"
        )
        heartbeat.answer("samples", lambda: training.ids(heartbeat.position()).tolist())
        held_out: dict[str, Batches] = {}
        for name, folder in data.eval_caches.items():
            held_out[name] = partial(self.once, folder)
        return Streams(self._on_device(training), held_out, self.once)

    def once(self, folder: str) -> Iterable[GlobalBatch]:
        """Return the batches of all samples of a folder, each once."""
        cache = open_samples(self.plan, folder)
        micro_batch = self.plan.batch.eval_micro_batch
        # A global batch has a micro-batch for each stage of a pipeline, so that all stages work.
        stages = self.plan.mesh.pp
        batch = BatchPlan(
            global_samples=micro_batch * stages * self.plan.mesh.data_ranks,
            micro_batch=micro_batch,
            accumulation=stages,
            eval_micro_batch=micro_batch,
        )
        samples = len(cache)
        order = GlobalOrder(samples, 0, shuffle=False)
        stream = self._stream(cache, order, batch, 0, samples, 0, "all")
        return self._on_device(stream)

    def _stream(
        self,
        cache: Any,
        order: Order,
        batch: BatchPlan,
        start: int,
        stop: int,
        prefetch: int,
        pairs_within: Literal["batch", "all"],
    ) -> BatchStream:
        """Return the batches from position `start` to `stop`, still on the host.

        `pairs_within`: for an algorithm that pairs each sample with the one before it, whether the
        first sample of a batch follows the last one of its batch, or of all samples.
        """
        predecessor_scope: Literal["none", "batch", "all"] = "none"
        if self.plan.config.algorithm.pairs_with_previous:
            predecessor_scope = pairs_within
        return BatchStream(
            cache,
            order,
            batch,
            self.data_rank,
            self.plan.mesh.data_ranks,
            start,
            stop,
            self.copies.pin(self.collator(cache)),
            prefetch,
            predecessor_scope,
        )

    def _on_device(self, batches: BatchStream) -> Iterator[GlobalBatch]:
        """Yield batches with their micro-batches on the device, and close the stream at the end."""
        with ExitStack() as stack:
            stack.enter_context(batches)
            if isinstance(batches.cache, Blocks):
                stack.enter_context(closing(batches.cache))
            for batch in batches:
                yield replace(batch, micro_batches=self.copies.move(batch.micro_batches))


@dataclass(frozen=True)
class FirstPass:
    """Computes the numbers of `Algorithm.first_pass` over each global batch, before its loss."""

    algorithm: Algorithm
    read: Extract
    engine: Engine
    # Whether this rank counts its samples. Of several ranks with the same samples only one does.
    counts: bool
    device: str

    def add_to(self, streams: Streams) -> Streams:
        """Return the streams with `first` and `places_P` in every micro-batch.

        Drawing from them is collective. In training the numbers are over the global batch. In
        evaluation they are over the whole set, which is gone through twice: how a set is cut into
        batches depends on the number of ranks, and the result must not.
        """
        held_out: dict[str, Batches] = {}
        for name, batches in streams.held_out.items():
            held_out[name] = partial(self._whole, batches)
        return Streams(
            training=self._filled_batches(streams.training),
            held_out=held_out,
            once=lambda folder: self._whole(lambda: streams.once(folder)),
        )

    def _filled_batches(self, batches: Iterable[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Yield batches, each with the numbers of its own samples."""
        for batch in batches:
            yield add_first_numbers(batch, FirstPassNumbers(self.numbers(batch)), 0)

    def numbers(self, batch: GlobalBatch) -> torch.Tensor:
        """Return what `read` returns for the samples of a global batch, fp64[N, K]. Collective.

        The N samples are in the batch's order, without fillers. The result is the same on every
        rank, and for any number of ranks: each sample's numbers come from one rank, and zeros are
        added to them.
        """
        first_batches = [self.algorithm.first_batch(each) for each in batch.micro_batches]
        numbers_of = self.engine.infer(first_batches, self.read)
        samples = len(batch.sample_ids)
        width = numbers_of[0].shape[1]
        table_GK = torch.zeros(samples, width, dtype=torch.float64, device=self.device)
        if self.counts:
            for places, numbers_PK in zip(batch.sample_indices, numbers_of, strict=True):
                places_P = copied_to(self.device, torch.from_numpy(places))
                table_GK[places_P] = numbers_PK.double()
        # Rows are chosen by number: with a mask the host would have to ask the device how many.
        real_N = torch.from_numpy(np.flatnonzero(batch.sample_ids >= 0))
        summed_GK = add_up(table_GK)
        return summed_GK[copied_to(self.device, real_N)]

    def _whole(self, batches: Batches) -> Iterator[GlobalBatch]:
        """Yield the batches of a set, each with the numbers of all samples of the set.

        `batches` is called twice: all numbers have to be there before the first loss.
        """
        numbers_of = [self.numbers(batch) for batch in batches()]
        first = FirstPassNumbers(torch.cat(numbers_of))
        start = 0
        for batch, numbers_NK in zip(batches(), numbers_of, strict=True):
            yield add_first_numbers(batch, first, start)
            start += len(numbers_NK)


def add_first_numbers(batch: GlobalBatch, first: FirstPassNumbers, start: int) -> GlobalBatch:
    """Return a batch whose micro-batches have `first`, and in `places_P` the rows of their samples.

    The batch's own samples begin at row `start` of the numbers in `first`.
    """
    is_real_G = batch.sample_ids >= 0
    # Fillers have no row.
    row_of_real_G = is_real_G.cumsum() - 1 + start
    rows_G = np.where(is_real_G, row_of_real_G, -1)
    device = first.numbers_NK.device
    micro_batches = []
    for micro_batch, places in zip(batch.micro_batches, batch.sample_indices, strict=True):
        places_P = copied_to(device, torch.from_numpy(rows_G[places]))
        micro_batches.append(replace(micro_batch, first=first, places_P=places_P))
    return replace(batch, micro_batches=micro_batches)

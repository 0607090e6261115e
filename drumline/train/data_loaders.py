"""The data loaders of one rank: its batches for training and evaluation, on its device.

Some objectives need numbers over a whole global batch before they can compute a loss. `FirstPass`
computes these in a pass without gradients, and puts them into the batches.

Letters of shapes: P samples of a micro-batch; G places of a global batch, with fillers; N samples,
without fillers; K numbers of a sample. `places_P` are the samples' rows in a table.
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
from drumline.dist.copies import copy_to_device
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
class DataLoaders:
    """The data loaders of one data rank. Their batches are on its device."""

    training: Iterable[GlobalBatch]
    # For each evaluation set, by name: a function that returns its batches, with each sample once.
    held_out: dict[str, Batches]
    # Returns batches with all samples of a cache folder, each sample once.
    batches_of_folder: Callable[[str], Iterable[GlobalBatch]]


def open_samples(plan: Plan, folder: str) -> Any:
    """Return the token cache in a folder.

    For a module of the user's own there is no cache. Then `folder` is "train" or "eval/SET", and
    the samples of those sources are returned.
    """
    if not plan.config.has_own_module:
        return TokenCache.open(Path(folder))
    section, _, name = folder.partition("/")
    if section == "train":
        sources = plan.config.data.train
    else:
        sources = plan.config.data.eval_sets[name]
    return read_samples(sources, Path(plan.base_dir), Draws(0).use)


def training_order(plan: Plan, samples: int) -> Order:
    """Return the order in which the samples of the training cache are taken, the same on all ranks.

    `samples`: how many there are.
    """
    config = plan.config
    seed = derive(config.run.seed, "order")
    shuffles = config.data.order == "shuffle"
    curriculum = config.data.curriculum
    if curriculum is None and not config.data.is_mixed:
        return GlobalOrder(samples, seed, shuffles)
    sizes: tuple[int, ...] = (samples,)
    counts: tuple[int, ...] = (samples,)
    if config.data.is_mixed:
        # How many samples each source has, and how many of them an epoch takes.
        sources = plan.data.sources if plan.data else ()
        sizes = tuple(source.samples or 0 for source in sources)
        counts = tuple(source.per_epoch for source in sources)
    assert sum(sizes) == samples, "the plan is of this cache"
    if curriculum is None:
        return MixedOrder(sizes, counts, seed, shuffles, 0, False)
    return MixedOrder(sizes, counts, seed, shuffles, curriculum.epochs, curriculum.reverse)


def open_blocks(plan: Plan, writes_blocks: bool, block_state: dict[str, Any]) -> Blocks:
    """Return the blocks of a streaming dataset.

    `writes_blocks` and `block_state`: as in `build_data_loaders`.
    """
    config = plan.config
    assert plan.data is not None and config.data.stream is not None
    root = Path(plan.data.train_cache)
    maker: BlockMaker | None = None
    # `try_lock_stream` takes the folder's lock. It returns False if another process of this run has it.
    if writes_blocks and try_lock_stream(root, plan.run_dir):
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
        resume_state=block_state,
        # The global batches that are drawn ahead, the one that is trained on, and one more.
        margin=(config.data.prefetch + 2) * plan.batch.global_samples,
        weighted=any(source.weight is not None for source in config.data.train),
    )


class Copies:
    """Copies micro-batches to the device, while the device still computes the step before.

    For that, on a GPU, micro-batches are collated into page-locked memory, and copied on a CUDA
    stream of their own (`copy_stream`).
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.copy_stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self.copy_stream = torch.cuda.Stream(device)

    def pin(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collate function whose tensors are in page-locked memory, if there is a GPU."""
        if self.copy_stream is None:
            return collate
        return lambda *columns: collate(*columns).each(pin_memory)

    def move(self, micro_batches: list[Any]) -> list[Any]:
        """Return micro-batches on the device.

        The host does not wait for the copies; the CUDA stream of the step does.
        """
        if self.copy_stream is None:
            return [batch.to(self.device) for batch in micro_batches]
        with torch.cuda.stream(self.copy_stream):
            copies = [batch.to(self.device) for batch in micro_batches]
        compute_stream = torch.cuda.current_stream(self.device)
        compute_stream.wait_stream(self.copy_stream)

        def keep_until_step(tensor: torch.Tensor) -> torch.Tensor:
            """Keep the copying stream from reusing memory that the step still reads."""
            tensor.record_stream(compute_stream)
            return tensor

        return [batch.each(keep_until_step) for batch in copies]


def build_data_loaders(
    plan: Plan,
    data_rank: int,
    position: int,
    device: str,
    writes_blocks: bool = True,
    block_state: dict[str, Any] | None = None,
    step: int = 0,
) -> DataLoaders:
    """Return the data loaders of a data rank.

    Training goes on after `step`, from sample `position`.

    The other arguments are for a streaming dataset (`data.stream`). `writes_blocks`: whether this
    rank tokenises rows into blocks; else it reads those of another rank of its host.
    `block_state`: what `Blocks.checkpoint_state` returned for the checkpoint; None for a new run.
    """
    builder = DataLoaderBuilder(plan, data_rank, device)
    return builder.build(position, writes_blocks, block_state or {}, step)


class DataLoaderBuilder:
    """Builds the data loaders of a data rank.

    They share the algorithm's collator and the copies to the device.
    """

    def __init__(self, plan: Plan, data_rank: int, device: str) -> None:
        self.plan = plan
        self.data_rank = data_rank
        self.collator = plan.config.algorithm.collator(plan, plan.fixed_width)
        self.copies = Copies(device)

    def build(
        self, position: int, writes_blocks: bool, block_state: dict[str, Any], step: int
    ) -> DataLoaders:
        """Return all data loaders. Arguments as those of `build_data_loaders`."""
        plan = self.plan
        data = plan.data
        assert data is not None, "workers get plans of prepared data"
        stop_position = total_samples(plan.config, plan.batch, data, step, position)
        if data.stream:
            blocks = open_blocks(plan, writes_blocks, block_state)
            cache: Any = blocks
            order: Order = blocks
        else:
            cache = open_samples(plan, data.train_cache)
            order = training_order(plan, len(cache))
        training = self._batch_stream(
            cache, order, plan.batch, position, stop_position, plan.config.data.prefetch, "batch"
        )
        heartbeat.register_answer("samples", lambda: training.ids(heartbeat.position()).tolist())
        held_out: dict[str, Batches] = {}
        for name, folder in data.eval_caches.items():
            held_out[name] = partial(self.batches_of_folder, folder)
        return DataLoaders(self._copy_to_device(training), held_out, self.batches_of_folder)

    def batches_of_folder(self, folder: str) -> Iterable[GlobalBatch]:
        """Return the batches of all samples of a folder, each sample once."""
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
        batches = self._batch_stream(cache, order, batch, 0, samples, 0, "all")
        return self._copy_to_device(batches)

    def _batch_stream(
        self,
        cache: Any,
        order: Order,
        batch: BatchPlan,
        start_position: int,
        stop_position: int,
        prefetch: int,
        pairs_within: Literal["batch", "all"],
    ) -> BatchStream:
        """Return the batches of this data rank between two positions, still on the host.

        `pairs_within`: for an algorithm that pairs each sample with the one before it (KTO): what
        the samples are paired within. "batch": the global batch, so its first sample is paired with
        its last one. "all": all samples, so only the first sample of the set is paired with the
        last one of the set.
        """
        predecessor_scope: Literal["none", "batch", "all"] = "none"
        if self.plan.config.algorithm.needs_mismatched_pairs:
            predecessor_scope = pairs_within
        return BatchStream(
            cache,
            order,
            batch,
            self.data_rank,
            self.plan.mesh.data_ranks,
            start_position,
            stop_position,
            self.copies.pin(self.collator(cache)),
            prefetch,
            predecessor_scope,
        )

    def _copy_to_device(self, batches: BatchStream) -> Iterator[GlobalBatch]:
        """Yield batches with their micro-batches on the device, and close `batches` at the end."""
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
    # `Algorithm.first_pass`: computes the numbers from the outputs of the model.
    extract: Extract
    engine: Engine
    # Whether this rank contributes its samples' numbers to the sum over the ranks. Of several ranks
    # with the same samples exactly one does.
    contributes: bool
    device: str

    def add_to(self, loaders: DataLoaders) -> DataLoaders:
        """Return the data loaders with `first` and `places_P` in every micro-batch.

        Taking a batch from them is collective. In training the numbers are over the global batch.
        In evaluation they are over the full set, which is gone through twice: how a set is cut into
        batches depends on the number of ranks, and the result must not.
        """
        held_out: dict[str, Batches] = {}
        for name, batches in loaders.held_out.items():
            held_out[name] = partial(self._add_numbers_of_set, batches)

        def batches_of_folder(folder: str) -> Iterator[GlobalBatch]:
            return self._add_numbers_of_set(lambda: loaders.batches_of_folder(folder))

        return DataLoaders(
            training=self._add_numbers_of_batch(loaders.training),
            held_out=held_out,
            batches_of_folder=batches_of_folder,
        )

    def _add_numbers_of_batch(self, batches: Iterable[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Yield batches, each with the numbers of its own samples."""
        for batch in batches:
            combined_NK = self.algorithm.combine_first(self.numbers(batch), trains=True)
            yield add_first_numbers(batch, FirstPassNumbers(combined_NK), 0)

    def numbers(self, batch: GlobalBatch) -> torch.Tensor:
        """Return what `extract` returns for the samples of a global batch, fp64[N, K]. Collective.

        The N samples are in the batch's order, without fillers. The result is the same on every
        rank, and for any number of ranks: each sample's numbers come from one rank, and zeros are
        added to them.
        """
        first_batches = [self.algorithm.first_batch(each) for each in batch.micro_batches]
        numbers_of_micro_batches = self.engine.infer(first_batches, self.extract)
        global_samples = len(batch.sample_ids)
        numbers_per_sample = numbers_of_micro_batches[0].shape[1]
        table_GK = torch.zeros(
            global_samples, numbers_per_sample, dtype=torch.float64, device=self.device
        )
        if self.contributes:
            for places, numbers_PK in zip(
                batch.sample_indices, numbers_of_micro_batches, strict=True
            ):
                places_P = copy_to_device(self.device, torch.from_numpy(places))
                table_GK[places_P] = numbers_PK.double()
        # Rows are chosen by number: with a mask the host would have to ask the device how many.
        real_N = torch.from_numpy(np.flatnonzero(batch.sample_ids >= 0))
        summed_GK = add_up(table_GK)
        return summed_GK[copy_to_device(self.device, real_N)]

    def _add_numbers_of_set(self, batches: Batches) -> Iterator[GlobalBatch]:
        """Yield the batches of a set, each with the numbers of all samples of the set.

        `batches` is called twice: all numbers have to be there before the first loss.
        """
        numbers_of_batches = [self.numbers(batch) for batch in batches()]
        combined_NK = self.algorithm.combine_first(torch.cat(numbers_of_batches), trains=False)
        first = FirstPassNumbers(combined_NK)
        first_row = 0
        for batch, numbers_NK in zip(batches(), numbers_of_batches, strict=True):
            yield add_first_numbers(batch, first, first_row)
            first_row += len(numbers_NK)


def add_first_numbers(batch: GlobalBatch, first: FirstPassNumbers, first_row: int) -> GlobalBatch:
    """Return a batch whose micro-batches have `first`, and in `places_P` the rows of their samples.

    The batch's own samples begin at row `first_row` of the numbers in `first`.
    """
    is_real_G = batch.sample_ids >= 0
    # Fillers have no row.
    row_of_real_G = is_real_G.cumsum() - 1 + first_row
    rows_G = np.where(is_real_G, row_of_real_G, -1)
    device = first.numbers_NK.device
    micro_batches = []
    for micro_batch, places in zip(batch.micro_batches, batch.sample_indices, strict=True):
        places_P = copy_to_device(device, torch.from_numpy(rows_G[places]))
        micro_batches.append(replace(micro_batch, first=first, places_P=places_P))
    return replace(batch, micro_batches=micro_batches)

"""Batches of one rank: what a sample becomes under each algorithm, and the streams that the loop goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.core.algorithms import ClassifyConfig
from drumline.core.plan import BatchPlan, Plan
from drumline.core.resolve import total_samples
from drumline.data.batches import collate, collate_pairs
from drumline.data.cache import TokenCache
from drumline.data.labelled import ImageCollator, TextCollator
from drumline.data.stream import BatchStream, GlobalBatch, GlobalOrder
from drumline.data.vision import collate_vision
from drumline.dist.seeds import derive
from drumline.models.load import load_config, load_tokenizer, pad_token_id
from drumline.models.vision import find_vision, load_processor, side_of


@dataclass(frozen=True)
class Streams:
    """Batches of one data rank, on its device: `training`; the held-out set, gone through once; `once`: all of a cache folder, once."""

    training: Iterable[GlobalBatch]
    held_out: Callable[[], Iterable[GlobalBatch]] | None
    once: Callable[[str], Iterable[GlobalBatch]]


def fixed_width(plan: Plan) -> int | None:
    """Tokens that every micro-batch is wide: compiled blocks and the stages of a pipeline want one shape. None: as its longest row."""
    fixed = plan.config.compile.enabled or plan.mesh.pp * plan.mesh.cp > 1
    return plan.config.data.max_length if fixed else None


def build_streams(plan: Plan, data_rank: int, position: int, device: str) -> Streams:
    """Training batches go on from `position`."""
    config, data = plan.config, plan.data
    assert data is not None, "workers get plans of prepared data"
    width = fixed_width(plan)

    collator = labelled_collator(plan, width) if isinstance(config.algorithm, ClassifyConfig) else _token_collator(plan, width)

    def stream(cache: TokenCache, batch: BatchPlan, shuffle: bool, start: int, stop: int, prefetch: int) -> BatchStream:
        order = GlobalOrder(len(cache), derive(config.run.seed, "order"), shuffle)
        return BatchStream(cache, order, batch, data_rank, plan.mesh.data_ranks, start, stop, collator(cache), prefetch)

    def on_device(batches: BatchStream) -> Iterable[GlobalBatch]:
        with batches:
            for batch in batches:
                yield replace(batch, micro_batches=[b.to(device) for b in batch.micro_batches])

    def once(folder: str) -> Iterable[GlobalBatch]:
        cache, micro = TokenCache.open(Path(folder)), plan.batch.eval_micro_batch
        # Stages work side by side on the micro-batches of one draw.
        several = plan.mesh.pp
        samples = micro * several * plan.mesh.data_ranks
        whole = BatchPlan(global_samples=samples, micro_batch=micro, accumulation=several, eval_micro_batch=micro)
        return on_device(stream(cache, whole, False, 0, len(cache), 0))

    cache, stop, held_out = TokenCache.open(Path(data.train_cache)), total_samples(config, plan.batch, data), data.eval_cache
    training = stream(cache, plan.batch, config.data.order == "shuffle", position, stop, config.data.prefetch)
    return Streams(on_device(training), None if held_out is None else lambda: once(held_out), once)


def _token_collator(plan: Plan, width: int | None) -> Callable[[TokenCache], Callable[[list[int]], Any]]:
    model = plan.config.model
    pad = pad_token_id(load_tokenizer(plan.model_path, model))
    if plan.batch.rows_per_sample == 2:
        return lambda cache: lambda ids: collate_pairs(cache, ids, pad, width)
    vision = find_vision(load_config(plan.model_path, model), plan.model_path, model, plan.config.data.image_max_pixels)
    if vision is not None:
        return lambda cache: lambda ids: collate_vision(cache, ids, pad, width, vision)
    return lambda cache: lambda ids: collate([cache.segments(sample) if sample >= 0 else None for sample in ids], pad, width)


def labelled_collator(plan: Plan, width: int | None) -> Callable[[TokenCache], Callable[[list[int]], Any]]:
    """What makes micro-batches of the samples of a cache. `width`: of all batches of text; None: as wide as their longest row."""
    config, algorithm = plan.config, plan.config.algorithm
    assert plan.data is not None and isinstance(algorithm, ClassifyConfig)
    labels = plan.data.labels
    if algorithm.modality == "text":
        pad = pad_token_id(load_tokenizer(plan.model_path, config.model))
        return lambda cache: TextCollator(cache, labels, pad, plan.looks_ahead, plan.first_position, width)
    hf_config = load_config(plan.model_path, config.model)
    processor = load_processor(plan.model_path, config.model, hf_config, algorithm.image_size)
    channels = int(getattr(hf_config, "num_channels", 3))
    side = side_of(processor, channels)
    return lambda cache: ImageCollator(cache, labels, processor, side, channels)

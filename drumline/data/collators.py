"""Makes the collate functions of the algorithms: from ids of samples to a micro-batch.

`width` is the number of tokens of every row; with None it is that of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drumline.data.batches import collate, collate_labelled_texts, collate_pairs, read_segments
from drumline.data.cache import TokenCache
from drumline.data.images import collate_labelled_images, collate_vision, collate_vision_pairs
from drumline.data.judged import collate_judged, collate_mismatched
from drumline.data.retrieval import collate_candidates, collate_retrieval
from drumline.data.seq2seq import collate_seq2seq
from drumline.data.taught import collate_taught
from drumline.models.image_tokens import Vision
from drumline.models.load import load_config
from drumline.models.tokenizer import load_tokenizer, pad_token_id
from drumline.models.vision import load_processor, side_of, vision_of
from drumline.plan.attention import row_multiple
from drumline.plan.plan import Plan

# Takes sample ids, and returns their micro-batch. The id -1 stands for a filler row.
CollateFunction = Callable[[list[int]], Any]
# Takes a token cache, and returns the collate function for its samples.
CollatorFactory = Callable[[TokenCache], CollateFunction]


def padding_id(plan: Plan) -> int:
    """Return the id of the padding token."""
    tokenizer = load_tokenizer(plan.model_path, plan.config.model)
    return pad_token_id(tokenizer)


def text_collator(plan: Plan, width: int | None) -> CollatorFactory:
    """Return the factory for rows of text, with images if the model takes some.

    Args:
        plan: the plan of the run.
        width: tokens of every row; None: those of the longest row.
    """
    pad = padding_id(plan)
    vision = find_vision(plan)
    if vision is not None:
        return lambda cache: lambda ids: collate_vision(cache, ids, pad, width, vision)

    return lambda cache: lambda ids: collate(read_segments(cache, ids), pad, width)


def taught_collator(plan: Plan, width: int | None) -> CollatorFactory:
    """Return the factory for rows of text beside which a teacher's distributions stand.

    `width`: tokens of every row; None: those of the longest row.
    """
    pad = padding_id(plan)
    return lambda cache: lambda ids: collate_taught(cache, ids, pad, width)


def find_vision(plan: Plan) -> Vision | None:
    """Return how the plan's model reads images; None for a model of text."""
    hf_config = load_config(plan.model_path, plan.config.model)
    vision = vision_of(plan.config, plan.model_path, hf_config)
    if vision is None or plan.mesh.cp == 1:
        return vision
    multiple = row_multiple(plan.mesh.cp, plan.cp_method, plan.precision, plan.device)
    return replace(vision, row_multiple=multiple)


def seq2seq_collator(plan: Plan, width: int | None) -> CollatorFactory:
    """Return the factory for prompts of an encoder with completions of a decoder.

    `width`: tokens of every row; None: those of the longest row of each side.
    """
    pad = padding_id(plan)
    return lambda cache: lambda ids: collate_seq2seq(read_segments(cache, ids), pad, width)


def pair_collator(plan: Plan, width: int | None) -> CollatorFactory:
    """Return the factory for preference pairs, with images if the model takes some.

    `width`: tokens of every row; None: those of the longest row.
    """
    pad = padding_id(plan)
    vision = find_vision(plan)
    if vision is not None:
        return lambda cache: lambda ids: collate_vision_pairs(cache, ids, pad, width, vision)
    return lambda cache: lambda ids: collate_pairs(cache, ids, pad, width)


def judged_collator(
    plan: Plan, width: int | None, has_mismatched: bool
) -> Callable[[TokenCache], Callable[..., Any]]:
    """Return the factory for answers that are labelled good or bad.

    With `has_mismatched` the batches also have mismatched answers, see `data.judged`. The collate
    function then takes a second list of ids: see `collate_mismatched`.
    """
    pad = padding_id(plan)
    vision = find_vision(plan)
    if not has_mismatched:
        return lambda cache: lambda ids: collate_judged(cache, ids, pad, width, vision)
    max_length = plan.config.data.max_length
    return lambda cache: (
        lambda ids, predecessor_ids: collate_mismatched(
            cache, ids, predecessor_ids, pad, width, max_length, vision
        )
    )


def retrieval_collator(plan: Plan, width: int | None, texts: int) -> CollatorFactory:
    """Return the factory for queries with texts that do and do not answer them.

    Args:
        plan: the plan of the run.
        width: tokens of every row; None: those of the longest row.
        texts: rows of each sample.
    """
    pad = padding_id(plan)
    return lambda cache: lambda ids: collate_retrieval(plan, cache, ids, pad, width, texts)


def candidate_collator(plan: Plan, width: int | None, candidates: int) -> CollatorFactory:
    """Return the factory for queries, each with a text in one row.

    `width`: as of `retrieval_collator`. `candidates`: rows of each sample.
    """
    pad = padding_id(plan)
    hf_config = load_config(plan.model_path, plan.config.model)
    # BERT has two types of tokens, and RoBERTa only one.
    has_types = (getattr(hf_config, "type_vocab_size", None) or 0) > 1
    return lambda cache: (
        lambda ids: collate_candidates(plan, cache, ids, pad, width, candidates, has_types)
    )


def labelled_collator(plan: Plan, width: int | None, image_size: int | None) -> CollatorFactory:
    """Return the factory for texts or images with a class.

    Args:
        plan: the plan of the run, which has the names of the classes.
        width: tokens of every row of texts; None: those of the longest row.
        image_size: see `ClassifyConfig`.
    """
    if not plan.config.images_alone:
        pad = padding_id(plan)
        return lambda cache: lambda ids: collate_labelled_texts(plan, cache, ids, pad, width)
    hf_config = load_config(plan.model_path, plan.config.model)
    processor = load_processor(plan.model_path, plan.config.model, hf_config, image_size)
    # Most configs do not set it, since their models take images in colour.
    channels = int(getattr(hf_config, "num_channels", 3))
    side = side_of(processor, channels)
    return lambda cache: (
        lambda ids: collate_labelled_images(cache, ids, plan.labels, processor, side, channels)
    )

"""Batches with images: of vision-language models, and of image classifiers.

B rows, T tokens, N images, C channels, H × W pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from drumline.data.batches import (
    Batch,
    EpisodeBatch,
    Episodes,
    ImageInputs,
    PairBatch,
    TokenBatch,
    collate,
    collate_episodes,
    episode_rows,
    pair_batch,
    pair_rows,
    read_labels,
    read_metas,
    read_segments,
    row_width,
)
from drumline.data.cache import Segment, TokenCache
from drumline.data.image_files import VIDEO_FILES, image_paths_in_meta
from drumline.data.video_files import video_state
from drumline.models.image_tokens import Grid, Pixels, Vision
from drumline.models.pictures import read_image
from drumline.models.vision import pixels

AnyTokenBatch = TypeVar("AnyTokenBatch", bound=TokenBatch)


def join_metas(
    metas: Sequence[bytes], rows: Sequence[int], packs: Iterable[Sequence[int]]
) -> list[bytes]:
    """Return the meta of each pack: the images of its rows in order.

    Args:
        metas: the JSON of rows; empty for a row without images.
        rows: indices of `metas`.
        packs: the members of each pack, as indices of `rows`.
    """
    joined = []
    for pack in packs:
        images: list[str] = []
        grids: list[Any] = []
        video_files: dict[str, str] = {}
        has_images = False
        for index in pack:
            text = metas[rows[index]]
            if text:
                meta = json.loads(text)
                images += meta["images"]
                grids += meta["grid"]
                video_files |= meta.get(VIDEO_FILES, {})
                has_images = True
        if has_images:
            whole: dict[str, Any] = {"images": images, "grid": grids}
            if video_files:
                whole[VIDEO_FILES] = video_files
            joined.append(json.dumps(whole, ensure_ascii=False).encode())
        else:
            joined.append(b"")
    return joined


def folders_of(metas: Iterable[bytes]) -> set[Path]:
    """Return the folders that the images of samples with these metas lie in."""
    folders = set()
    for text in metas:
        if not text:
            continue
        for path in image_paths_in_meta(json.loads(text)):
            folders.add(Path(path).parent)
    return folders


def lacks_images(cache: TokenCache) -> bool:
    """Return whether images that were written with a cache are gone.

    The user's own images are not checked.
    """
    folders = cache.info.get("image_folders")
    if not folders:
        return False
    # A listing of each folder is faster than a look for each of many images.
    present: set[str] = set()
    for folder in map(Path, folders):
        if folder.is_dir():
            present.update(str(path) for path in folder.iterdir())
    for sample in range(len(cache)):
        for path in image_paths_in_meta(cache.meta(sample)):
            is_ours = str(Path(path).parent) in folders
            if is_ours and path not in present:
                return True
    return False


def has_changed_videos(cache: TokenCache) -> bool:
    """Return whether a video has changed, or is gone, since its frames were taken for a cache."""
    if not cache.info.get("samples_with_videos"):
        return False
    known: dict[str, str] = {}
    for sample in range(len(cache)):
        for path, state in cache.meta(sample).get(VIDEO_FILES, {}).items():
            # A video that changed while rows were read has two states, one of which is old.
            if known.setdefault(path, state) != state:
                return True
    return any(video_state(Path(path)) != state for path, state in known.items())


def count_images(metas: Sequence[bytes], vision: Vision | None, sides: int = 1) -> dict[str, int]:
    """Count images and their tokens in samples with these metas, and samples with images and videos.

    Args:
        metas: the JSON of each sample; empty for one without images.
        vision: of the model; None for a model of text, or of images alone.
        sides: segments of a sample that have the tokens of all of its images: 2 of a pair.
    """
    images = 0
    tokens = 0
    samples_with_images = 0
    samples_with_videos = 0
    for text in metas:
        if not text or vision is None:
            continue
        meta = json.loads(text)
        if VIDEO_FILES in meta:
            samples_with_videos += 1
        grids = meta.get("grid")
        if grids:
            samples_with_images += 1
            images += len(grids)
            for grid in grids:
                tokens += sides * vision.tokens(tuple(grid))
    return {
        "images": images,
        "image_tokens": tokens,
        "samples_with_images": samples_with_images,
        "samples_with_videos": samples_with_videos,
    }


def add_images(
    batch: AnyTokenBatch,
    rows: Sequence[Sequence[Segment] | None],
    metas: Sequence[Mapping[str, Any]],
    vision: Vision,
) -> AnyTokenBatch:
    """Return a batch of tokens with the images of its rows, which are read from their files.

    A micro-batch of text alone gets the smallest image, of zeros, whose tokens lie in the padding
    at the end of its first row (`width_with_images`), where no target depends on them. So the
    vision tower runs in every micro-batch of every rank, which the collectives of DDP, FSDP2 and
    ZeRO require, and no number changes.

    Args:
        batch: the batch.
        rows: the segments of each of its rows; None for a filler.
        metas: the images of each row, see `image_rows`.
        vision: the model's images.

    Raises DataError for an image that cannot be read any more.
    """
    rope_3BT = _rope_of_batch(rows, metas, batch.input_ids_BT.shape[1], vision)
    read, grids = _read_pixels(metas, vision)
    if not read:
        grids = [vision.blank_grid]
        read = [vision.blank_pixels()]
        batch.input_ids_BT[0, -vision.blank_size :] = vision.token_id
    arguments = vision.arguments(read, grids, batch.input_ids_BT)
    return replace(batch, images=ImageInputs(arguments, rope_3BT))


def width_with_images(
    rows: Sequence[Sequence[Segment] | None],
    metas: Sequence[Mapping[str, Any]],
    width: int | None,
    vision: Vision,
) -> int:
    """Return the tokens of each row of a batch, with room for the image of zeros if it needs one.

    Args:
        rows: the segments of each row; None for a filler.
        metas: the images of each row.
        width: tokens of each row of all batches; None: those of the longest row of this one.
        vision: the model's images.
    """
    if width is not None:
        # The shape is that of all batches, with and without images.
        parts = math.ceil((width + vision.blank_size) / vision.row_multiple)
        return parts * vision.row_multiple
    longest = max(map(row_width, rows))
    if any(meta.get("images") for meta in metas):
        return longest
    return longest + vision.blank_size


def collate_vision(
    cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None, vision: Vision
) -> TokenBatch:
    """Return a micro-batch of text with its images.

    Args:
        cache: the token cache.
        ids: samples of the cache; -1 is a filler.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest row.
        vision: the model's images.
    """
    rows = read_segments(cache, ids)
    metas = read_metas(cache, ids)
    own_width = width_with_images(rows, metas, width, vision)
    return add_images(collate(rows, pad_id, own_width), rows, metas, vision)


def collate_vision_pairs(
    cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None, vision: Vision
) -> PairBatch:
    """Return a micro-batch of pairs, see `collate_vision`. Both sides have the pair's images."""
    pairs = read_segments(cache, ids)
    metas = read_metas(cache, ids)
    rows = pair_rows(pairs)
    metas_of_rows = metas + metas
    own_width = width_with_images(rows, metas_of_rows, width, vision)
    batch = pair_batch(pairs, ids, metas, pad_id, own_width)
    return add_images(batch, rows, metas_of_rows, vision)


def collate_vision_episodes(
    episodes: Episodes, picks: Sequence[int], pad_id: int, width: int | None, vision: Vision
) -> EpisodeBatch:
    """Return a micro-batch of episodes with the images of their prompts.

    Args:
        episodes: all episodes of a rollout.
        picks: the indices of those of the batch; -1 is a filler.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest episode.
        vision: the model's images.
    """
    rows = episode_rows(episodes, picks)
    metas = [episodes.images[pick] if pick >= 0 else {} for pick in picks]
    own_width = width_with_images(rows, metas, width, vision)
    batch = collate_episodes(episodes, picks, pad_id, own_width)
    return add_images(batch, rows, metas, vision)


def images_of_segments(
    segments: Sequence[npt.NDArray[Any]], meta: Mapping[str, Any], vision: Vision
) -> list[dict[str, Any]]:
    """Return the images of each segment of a sample, as the sample's meta has them.

    Args:
        segments: the tokens of each segment, from the start of the sample on.
        meta: the images of all of its segments.
        vision: the model's images.
    """
    paths = list(meta.get("images", ()))
    grids = list(meta.get("grid", ()))
    found = []
    for tokens in segments:
        left = int((tokens == vision.token_id).sum())
        count = 0
        while left > 0:
            left -= vision.tokens(tuple(grids[count]))
            count += 1
        found.append({"images": paths[:count], "grid": grids[:count]})
        paths = paths[count:]
        grids = grids[count:]
    return found


def image_arguments(
    metas: Sequence[Mapping[str, Any]], ids_BT: torch.Tensor, vision: Vision
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model that completes prompts, for the images of these prompts.

    Args:
        metas: the images of each prompt; a prompt may have none.
        ids_BT: int64, the tokens of the prompts.
        vision: the model's images.
    """
    read, grids = _read_pixels(metas, vision)
    if not read:
        return {}
    return vision.arguments(read, grids, ids_BT) | vision.generation_arguments(ids_BT)


def _read_pixels(
    metas: Sequence[Mapping[str, Any]], vision: Vision
) -> tuple[list[Pixels], list[Grid]]:
    """Return the pixels and the grids of the images of some rows, in order.

    An image that several rows have is read once: both sides of a pair, or a group of completions.
    """
    read: list[Pixels] = []
    grids: list[Grid] = []
    known: dict[tuple[str, Grid], Pixels] = {}
    for meta in metas:
        for path, values in zip(meta.get("images", ()), meta.get("grid", ()), strict=True):
            grid = tuple(values)
            if (path, grid) not in known:
                known[path, grid] = vision.patches(path, grid)
            read.append(known[path, grid])
            grids.append(grid)
    return read, grids


def _rope_of_batch(
    rows: Sequence[Sequence[Segment] | None],
    metas: Sequence[Mapping[str, Any]],
    width: int,
    vision: Vision,
) -> torch.Tensor | None:
    """Return int64[3, rows, width]: the positions of all tokens; None if they are 0, 1, 2, …

    Those of padding count from 0.
    """
    rope_3BT = np.tile(np.arange(width, dtype=np.int64), (3, len(rows), 1))
    for index, (row, meta) in enumerate(zip(rows, metas, strict=True)):
        start = 0
        grids = [tuple(grid) for grid in meta.get("grid", ())]
        for tokens, _ in row or ():
            stop = start + len(tokens)
            positions = vision.rotary_positions(tokens, grids)
            if positions is None:
                return None
            rope_3BT[:, index, start:stop] = positions
            rope_3BT[:, index, stop:] = np.arange(width - stop)
            start = stop
    return torch.from_numpy(rope_3BT)


@dataclass(frozen=True)
class ImageBatch(Batch):
    """Images with a class each.

    Attributes:
        pixels_BCHW: float32, zero for a filler.
        labels_B: int64, the number of each image's class, IGNORE for a filler.
        weight: the number of images.
    """

    pixels_BCHW: torch.Tensor
    labels_B: torch.Tensor
    weight: int

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model."""
        return {"pixel_values": self.pixels_BCHW}


def collate_labelled_images(
    cache: TokenCache,
    ids: Sequence[int],
    labels: tuple[str, ...],
    processor: Any,
    side: int,
    channels: int,
) -> ImageBatch:
    """Return a micro-batch of images, read from their files.

    Args:
        cache: the token cache.
        ids: samples of the cache; -1 is a filler.
        labels: the names of the classes, in the order of their numbers.
        processor: the model's image processor.
        side: pixels of a side of the square images that the model takes.
        channels: channels of these images.

    Raises DataError for an image that cannot be read any more.
    """
    pixels_BCHW = torch.zeros(len(ids), channels, side, side)
    rows = []
    images = []
    for row, sample in enumerate(ids):
        if sample >= 0:
            meta = cache.meta(sample)
            rows.append(row)
            images.append(read_image(meta["path"], meta["origin"]))
    if images:
        pixels_BCHW[rows] = torch.from_numpy(pixels(processor, images, channels))
    labels_B = torch.tensor(read_labels(cache, ids, labels))
    return ImageBatch(pixels_BCHW, labels_B, len(images))


def placeholder_labelled_images(rows: int, side: int, channels: int) -> ImageBatch:
    """Return a placeholder batch of black images, `side` pixels square, all of the first class."""
    pixels_BCHW = torch.zeros(rows, channels, side, side)
    labels_B = torch.zeros(rows, dtype=torch.int64)
    return ImageBatch(pixels_BCHW, labels_B, rows)

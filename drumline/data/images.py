"""Rows of a vision-language model: the places of images in a conversation, their tokens, and batches with their patches. And batches of an
image classifier.

A row names its images by path, relative to the folder of its data file, or holds their bytes (`files.image_path`): in the content of a
message (`{"type": "image", "image": PATH}`), or in a column `images`, for places marked by `{"type": "image"}` alone, or by `<image>` in a
text; without any such place they stand before the first question. A sample's meta is
`{"images": [absolute paths], "grid": [[t, h, w], …]}`, in order; pixels are read for each batch.

B rows, T tokens, N images, P patches of all of them, D numbers of a patch, C channels, H × W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.core.data import DataConfig
from drumline.data.batches import FILLER_WIDTH, Batch, TokenBatch, collate, labels_of
from drumline.data.cache import TokenCache
from drumline.data.files import image_path, root_of
from drumline.data.sources import Row, is_image
from drumline.data.templates import Encoded, Encoder, Example, truncate
from drumline.data.turns import as_messages
from drumline.errors import DataError
from drumline.foreign import expanded
from drumline.models.vision import Grid, Vision, pixels, read_image

PLACE = "<image>"
# Columns that other libraries read beside a conversation.
UNREAD = (
    "video",
    "videos",
    "audio",
    "audios",
)


@dataclass(frozen=True)
class Expanded:
    """A row as tokens: `images`, and the token range [start, stop) of each in `example`."""

    example: Example
    images: list[tuple[str, Grid]]
    spans: list[tuple[int, int]]

    def encoded(self, truncated: bool) -> Encoded:
        meta = {
            "images": [path for path, _ in self.images],
            "grid": [grid for _, grid in self.images],
        }
        return Encoded(
            [self.example], meta if self.images and self.example.learned else None, truncated
        )


class ImageRows:
    """Encodes conversations with and without images. Image tokens are never targets."""

    def __init__(self, tokenizer: Any, data: DataConfig, vision: Vision) -> None:
        self.encoder, self.data, self.vision, self.root = (
            Encoder(tokenizer, False, data),
            data,
            vision,
            root_of(data),
        )

    def encode(self, row: Row) -> Encoded | None:
        """The row cut to data.max_length. An image that does not fit is left out as a whole."""
        _require_read(row)
        placed, paths = place_images(row, self.root)
        if paths:
            self.encoder.require_template("images need a chat template", row)
        short = self.encoder.encode(placed)
        images = [(path, self.vision.grid(path, row.origin)) for path in paths]
        found = int((short.tokens == self.vision.token_id).sum())
        if found != len(images):
            raise DataError(
                f"{len(images)} images, but the chat template writes {found} places for them",
                where=row.origin,
            )
        full = expand(short, images, self.vision)
        kept = truncate(full.example, self.data.max_length, self.data.truncation, row.origin)
        if kept is None or len(kept.tokens) == len(full.example.tokens):
            return None if kept is None else full.encoded(truncated=False)
        if full.example.learned and not kept.learned:  # none of its answer is left
            return None
        return cut(full, len(kept.tokens), self.data.truncation == "left").encoded(truncated=True)


def _require_read(row: Row) -> None:
    """Raises DataError for a row that has something which the model would not see: videos, sounds, or images beside a document."""
    images = (
        {"image": row.extra.get("image"), "images": row.values.get("images")}
        if "text" in row.values
        else {}
    )
    unread = {name: row.extra.get(name) for name in UNREAD}
    if name := next((name for name, held in (images | unread).items() if held), None):
        fix = (
            "give a prompt and a completion beside it"
            if name in images
            else "take the column or the row out"
        )
        raise DataError(f"what column {name!r} holds would be left out", where=row.origin, fix=fix)


def expand(short: Example, images: Sequence[tuple[str, Grid]], vision: Vision) -> Expanded:
    """The example with the placeholder of each image repeated for all of its tokens, none of which is a target."""
    at = np.flatnonzero(short.tokens == vision.token_id)
    repeats = np.ones(len(short.tokens), np.int64)
    repeats[at] = [vision.tokens(grid) for _, grid in images]
    stops = np.cumsum(repeats)
    learn = np.repeat(
        np.where(short.tokens == vision.token_id, 0, short.learn).astype(np.uint8), repeats
    )
    spans = list(zip((stops - repeats)[at].tolist(), stops[at].tolist(), strict=True))
    return Expanded(Example(np.repeat(short.tokens, repeats), learn), list(images), spans)


def cut(full: Expanded, size: int, left: bool) -> Expanded:
    """The last `size` tokens (`left`) or the first, without the part of an image that the cut goes through."""
    total = len(full.example.tokens)
    start, stop = (total - size, total) if left else (0, size)
    for first, last in full.spans:
        if first < start < last:
            start = last
        if first < stop < last:
            stop = first
    inside = [
        index for index, (first, last) in enumerate(full.spans) if start <= first and last <= stop
    ]
    example = Example(full.example.tokens[start:stop], full.example.learn[start:stop])
    return Expanded(
        example,
        [full.images[i] for i in inside],
        [(full.spans[i][0] - start, full.spans[i][1] - start) for i in inside],
    )


def place_images(row: Row, root: Path) -> tuple[Row, list[str]]:
    """The row with its images as `{"type": "image"}` parts of contents, the form of chat templates, and their absolute paths in order; for
    those that it holds see `image_path`. Raises DataError for a URL, and if places and images do not match."""
    given = row.values.get("images")
    waiting = (
        None
        if given is None
        else list(given)
        if isinstance(given, list) or given == ""
        else [given]
    )
    paths: list[str] = []

    def image(part: dict[str, Any]) -> dict[str, Any]:
        named = next(
            (
                part[key]
                for key in ("image", "path", "url", "image_url")
                if part.get(key) is not None
            ),
            None,
        )
        if named is None and not waiting:
            raise DataError(
                "there are more places for images than images",
                where=row.origin,
                fix="name each in the column `images`",
            )
        path = image_path(waiting.pop(0) if named is None and waiting else named, row.origin, root)
        paths.append(str((row.folder / expanded(path)).absolute()))
        return {"type": "image"}

    def content(value: Any) -> Any:
        if isinstance(value, str):
            if waiting is None or PLACE not in value:
                return value
            parts: list[dict[str, Any]] = []
            for number, text in enumerate(value.split(PLACE)):
                parts += [image({})] if number else []
                parts += [{"type": "text", "text": text}] if text else []
            return parts
        return [image(part) if is_image(part) else part for part in value]

    roles = {"messages": "user", "prompt": "user", "completion": "assistant"}
    talks = {
        key: as_messages(value, roles[key]) for key, value in row.values.items() if key in roles
    }
    turns = [(key, number, turn) for key, talk in talks.items() for number, turn in enumerate(talk)]
    if waiting and not any(_has_place(turn.get("content")) for _, _, turn in turns):
        questions = (
            (key, n, turn)
            for key, n, turn in turns
            if turn["role"] == "user" and isinstance(turn.get("content"), str)
        )
        for key, number, turn in islice(questions, 1):
            talks[key] = [
                *talks[key][:number],
                {**turn, "content": PLACE * len(waiting) + turn["content"]},
                *talks[key][number + 1 :],
            ]
    values = row.values | {
        key: [
            {**turn, "content": content(turn["content"])} if "content" in turn else turn
            for turn in talk
        ]
        for key, talk in talks.items()
    }
    if waiting:
        fix = f'say where: {{"type": "image"}} in a content, or {PLACE} in a text'
        raise DataError(
            f"{len(waiting)} more images than places for them", where=row.origin, fix=fix
        )
    return (replace(row, values=values) if paths else row), paths


def _has_place(content: Any) -> bool:
    return PLACE in content if isinstance(content, str) else any(map(is_image, content or []))


def join_metas(
    metas: Sequence[bytes], rows: Sequence[int], packs: Iterable[Sequence[int]]
) -> list[bytes]:
    """The meta of each pack: the images of its rows in order. `packs` hold indices of `rows`, which are indices of `metas`."""
    joined = []
    for pack in packs:
        parts = [json.loads(metas[rows[index]]) for index in pack if metas[rows[index]]]
        whole = {key: [item for part in parts for item in part[key]] for key in ("images", "grid")}
        joined.append(json.dumps(whole, ensure_ascii=False).encode() if parts else b"")
    return joined


def folders_of(metas: Iterable[bytes]) -> set[Path]:
    """The folders that the images of samples with these metas lie in."""
    return {Path(path).parent for meta in metas if meta for path in _paths(json.loads(meta))}


def lacks_images(cache: TokenCache) -> bool:
    """Whether images are gone that were written for the samples of a cache."""
    if not (folders := cache.info.get("image_folders")):
        return False
    there = {
        str(path) for folder in map(Path, folders) if folder.is_dir() for path in folder.iterdir()
    }
    paths = (path for sample in range(len(cache)) for path in _paths(cache.meta(sample)))
    return any(path not in there for path in paths if str(Path(path).parent) in folders)


def _paths(meta: dict[str, Any]) -> list[str]:
    return [*meta.get("images", ()), *([meta["path"]] if "path" in meta else ())]


def count_images(metas: Sequence[bytes]) -> dict[str, int]:
    """The numbers of images and patches of samples with these metas, and the number of samples with images."""
    grids = [grid for meta in metas if meta and (grid := json.loads(meta).get("grid"))]
    patches = sum(t * h * w for grid in grids for t, h, w in grid)
    return {"images": sum(map(len, grids)), "patches": patches, "samples_with_images": len(grids)}


@dataclass(frozen=True)
class VisionBatch(TokenBatch):
    """A TokenBatch with its images. `rope_3BT` int64: position in time, height and width of each token, as the model's get_rope_index
    counts them, restarted in each segment. `pixels_PD` float32; `grid_N3` int64: patches in time, height, width. A micro-batch of text
    alone has one image of zeros, with its one token in the padding, where no target depends on it. So the vision tower runs in every
    micro-batch of every rank, which the collectives of DDP, FSDP2 and ZeRO require, and no number changes."""

    rope_3BT: torch.Tensor
    pixels_PD: torch.Tensor
    grid_N3: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a model. Of the four positions the first separates documents, the others are for the rotary embedding."""
        positions_4BT = torch.cat((self.position_ids_BT[None], self.rope_3BT))
        images = {"pixel_values": self.pixels_PD, "image_grid_thw": self.grid_N3}
        return {"input_ids": self.input_ids_BT, "position_ids": positions_4BT, **images}


def collate_vision(
    cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None, vision: Vision
) -> VisionBatch:
    """A micro-batch of sample ids (-1: a filler). Reads images. `width`: as in `collate`, of the samples alone: a batch without images has
    one more token, and with a fixed width all have. Raises DataError for an image that cannot be read any more.
    """
    rows = [cache.segments(sample) if sample >= 0 else None for sample in ids]
    metas = [cache.meta(sample) if sample >= 0 else {} for sample in ids]
    images = [
        named
        for meta in metas
        for named in zip(meta.get("images", ()), meta.get("grid", ()), strict=True)
    ]
    if width is None and not images:
        width = max(
            FILLER_WIDTH if row is None else sum(len(tokens) for tokens, _ in row) for row in rows
        )
    batch = collate(rows, pad_id, None if width is None else width + 1)
    rope_3BT = np.tile(np.arange(batch.input_ids_BT.shape[1], dtype=np.int64), (3, len(rows), 1))
    for index, (row, meta) in enumerate(zip(rows, metas, strict=True)):
        start, grids = 0, list(meta.get("grid", ()))
        for tokens, _ in row or ():
            stop = start + len(tokens)
            rope_3BT[:, index, start:stop] = rope_positions(tokens, grids, vision)
            rope_3BT[:, index, stop:] = np.arange(rope_3BT.shape[2] - stop)
            start = stop
    if images:
        pixels, grids = (
            [vision.patches(path, grid) for path, grid in images],
            [grid for _, grid in images],
        )
    else:
        grids = [(1, vision.merge, vision.merge)]
        pixels = [np.zeros((vision.merge**2, vision.width), np.float32)]
        batch.input_ids_BT[0, -1] = vision.token_id
    return VisionBatch(
        **vars(batch),
        rope_3BT=torch.from_numpy(rope_3BT),
        pixels_PD=torch.from_numpy(np.concatenate(pixels)),
        grid_N3=torch.tensor(grids, dtype=torch.int64),
    )


def rope_positions(
    tokens: npt.NDArray[Any], grids: list[Grid], vision: Vision
) -> npt.NDArray[np.int64]:
    """int64[3, n]: positions in time, height and width of a segment's tokens (M-RoPE; Qwen2-VL, Wang et al. 2024, section 2.1). Text counts
    in all three at once; an image's tokens share one time, and the text behind it continues after its longer side. Removes the segment's
    images from the front of `grids`."""
    positions, next_position, at = np.empty((3, len(tokens)), np.int64), 0, 0
    is_image = tokens == vision.token_id
    while at < len(tokens):
        if is_image[at]:
            height, width = (side // vision.merge for side in grids.pop(0)[1:])
            stop = at + height * width
            positions[0, at:stop] = next_position
            positions[1, at:stop] = next_position + np.repeat(np.arange(height), width)
            positions[2, at:stop] = next_position + np.tile(np.arange(width), height)
            next_position += max(height, width)
        else:
            later = np.flatnonzero(is_image[at:])
            stop = at + int(later[0]) if len(later) else len(tokens)
            positions[:, at:stop] = np.arange(next_position, next_position + stop - at)
            next_position += stop - at
        at = stop
    return positions


@dataclass(frozen=True)
class ImageBatch(Batch):
    """`pixels_BCHW` float32, zero for a filler; `labels_B` int64, IGNORE for a filler. `weight`: the number of images."""

    pixels_BCHW: torch.Tensor
    labels_B: torch.Tensor
    weight: int

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels_BCHW}


def collate_images(
    cache: TokenCache,
    ids: Sequence[int],
    labels: tuple[str, ...],
    processor: Any,
    side: int,
    channels: int,
) -> ImageBatch:
    """The images of sample ids (-1: a filler), read from their files."""
    tensor_BCHW = torch.zeros(len(ids), channels, side, side)
    metas = [(place, cache.meta(sample)) for place, sample in enumerate(ids) if sample >= 0]
    if metas:
        images = [read_image(meta["path"], meta["origin"]) for _, meta in metas]
        tensor_BCHW[[place for place, _ in metas]] = torch.from_numpy(
            pixels(processor, images, channels)
        )
    return ImageBatch(tensor_BCHW, torch.tensor(labels_of(cache, ids, labels)), len(metas))


def labelled_images(rows: int, side: int, channels: int) -> ImageBatch:
    """Square images of `side` pixels, all of the first class."""
    return ImageBatch(
        torch.zeros(rows, channels, side, side), torch.zeros(rows, dtype=torch.int64), rows
    )

"""Encodes and collates rows with images: of vision-language models, and of image classifiers.

A row names its images by path, relative to the folder of its data file, or holds their bytes
(`image_files.resolve_image_path`). An image is in the content of a message (`{"type": "image",
"image": PATH}`) or in the column `images`. The images of that column go to the slots of the
conversation: a part `{"type": "image"}` alone, or `<image>` in a text. Without any slot they stand
before the first question. A sample's meta is `{"images": [absolute paths], "grid": [[t, h, w],
…]}`, in order. Pixels are read for each batch.

B rows, T tokens, N images, P patches of all of them, D numbers of a patch, C channels, H × W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.config.data import DataConfig
from drumline.data.batches import (
    Batch,
    TokenBatch,
    collate,
    read_labels,
    read_metas,
    read_segments,
    row_width,
)
from drumline.data.cache import Segment, TokenCache, cache_root
from drumline.data.image_files import image_paths_in_meta, resolve_image_path
from drumline.data.sources import Row, is_image
from drumline.data.targets import EncodedSample, Encoder, TokenSegment, truncate
from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError
from drumline.foreign import expanded
from drumline.models.vision import Grid, Vision, pixels, read_image

# The mark in a text at which an image stands.
IMAGE_MARK = "<image>"
# Columns that other libraries read beside a conversation. No model gets them here, so rows with
# them are refused.
UNSUPPORTED_COLUMNS = (
    "video",
    "videos",
    "audio",
    "audios",
)
# Column that may hold a conversation → the role of a plain text in it.
_ROLES = {"messages": "user", "prompt": "user", "completion": "assistant"}
# Keys of a part of a content that may name its image, in the order in which they count.
_IMAGE_KEYS = ("image", "path", "url", "image_url")


@dataclass(frozen=True)
class RowWithImageTokens:
    """An encoded row, with as many tokens for each image as the model's vision tower gives.

    Attributes:
        segment: the tokens.
        images: (absolute path, patches in time, height and width) of each image.
        spans: the token range [start, stop) of each image in `segment`.
    """

    segment: TokenSegment
    images: list[tuple[str, Grid]]
    spans: list[tuple[int, int]]

    def encoded(self, truncated: bool) -> EncodedSample:
        """Return the row as `EncodedSample`. `truncated`: whether something was cut off."""
        meta = None
        # A sample with a meta is kept even without a target. Without a meta such a sample is left
        # out.
        if self.images and self.segment.target_count:
            meta = {
                "images": [path for path, _ in self.images],
                "grid": [grid for _, grid in self.images],
            }
        return EncodedSample([self.segment], meta, truncated)


class VisionRowEncoder:
    """Encodes conversations with and without images. Image tokens are never targets."""

    def __init__(self, tokenizer: Any, data: DataConfig, vision: Vision) -> None:
        self.encoder = Encoder(tokenizer, False, data)
        self.data = data
        self.vision = vision
        self.root = cache_root(data)

    def encode(self, row: Row) -> EncodedSample | None:
        """Return the row cut to data.max_length, without any image that does not fit whole.

        None if the row is dropped, or if the cut takes all of its targets. Raises DataError that
        names the row.
        """
        _refuse_unsupported_media(row)
        placed, paths = place_images(row, self.root)
        if paths:
            self.encoder.require_template("images need a chat template", row)
        # Here each image is one placeholder token.
        with_placeholders = self.encoder.encode(placed)
        images = [(path, self.vision.grid(path, row.origin)) for path in paths]
        is_placeholder = with_placeholders.tokens == self.vision.token_id
        found = int(is_placeholder.sum())
        if found != len(images):
            raise DataError(
                f"{len(images)} images, but the chat template writes {found} places for them",
                where=row.origin,
            )
        full = expand_placeholders(with_placeholders, images, self.vision)
        truncated_segment = truncate(
            full.segment, self.data.max_length, self.data.truncation, row.origin
        )
        if truncated_segment is None:
            return None
        size = len(truncated_segment.tokens)
        if size == len(full.segment.tokens):
            return full.encoded(truncated=False)
        lost_its_answers = full.segment.target_count and not truncated_segment.target_count
        if lost_its_answers:
            return None
        # `truncated_segment` may have a part of an image at its end; this has none.
        shortened = cut_between_images(full, size, self.data.truncation == "left")
        return shortened.encoded(truncated=True)


def _refuse_unsupported_media(row: Row) -> None:
    """Raise DataError for a row with videos, sounds, or images beside a document.

    The model would not get them.
    """
    if "text" in row.values:
        images = {"image": row.extra.get("image"), "images": row.values.get("images")}
        _require_empty(images, row, "give a prompt and a completion beside it")
    unsupported = {name: row.extra.get(name) for name in UNSUPPORTED_COLUMNS}
    _require_empty(unsupported, row, "take the column or the row out")


def _require_empty(columns: dict[str, Any], row: Row, fix: str) -> None:
    """Raise DataError for the first of some columns of a row that holds anything."""
    for name, value in columns.items():
        if value:
            what = f"what column {name!r} holds would be left out"
            raise DataError(what, where=row.origin, fix=fix)


def expand_placeholders(
    with_placeholders: TokenSegment, images: Sequence[tuple[str, Grid]], vision: Vision
) -> RowWithImageTokens:
    """Return the segment with each image's placeholder repeated for all of the image's tokens.

    None of these tokens is a target.

    Args:
        with_placeholders: a row with one placeholder for each image.
        images: (path, patches in time, height and width) of each image, in order.
        vision: the model's images.
    """
    is_placeholder = with_placeholders.tokens == vision.token_id
    placeholders = np.flatnonzero(is_placeholder)
    repeats = np.ones(len(with_placeholders.tokens), np.int64)
    repeats[placeholders] = [vision.tokens(grid) for _, grid in images]

    # The range of tokens that each token of `with_placeholders` becomes.
    stops = np.cumsum(repeats)
    starts = stops - repeats
    spans = zip(starts[placeholders].tolist(), stops[placeholders].tolist(), strict=True)

    tokens = np.repeat(with_placeholders.tokens, repeats)
    learn = np.where(is_placeholder, 0, with_placeholders.learn).astype(np.uint8)
    segment = TokenSegment(tokens, np.repeat(learn, repeats))
    return RowWithImageTokens(segment, list(images), list(spans))


def cut_between_images(full: RowWithImageTokens, size: int, left: bool) -> RowWithImageTokens:
    """Return the first `size` tokens of a row, or the last ones (`left`).

    An image that the cut would divide is left out whole.
    """
    total = len(full.segment.tokens)
    start = 0
    stop = size
    if left:
        start = total - size
        stop = total
    # The vision tower returns all tokens of an image, so a part of them cannot be used.
    for first, last in full.spans:
        if first < start < last:
            start = last
        if first < stop < last:
            stop = first
    images = []
    spans = []
    for image, (first, last) in zip(full.images, full.spans, strict=True):
        if start <= first and last <= stop:
            images.append(image)
            spans.append((first - start, last - start))
    segment = TokenSegment(full.segment.tokens[start:stop], full.segment.learn[start:stop])
    return RowWithImageTokens(segment, images, spans)


def place_images(row: Row, root: Path) -> tuple[Row, list[str]]:
    """Return a row with its images as parts `{"type": "image"}` of contents, and their paths.

    That is the form that chat templates read. The paths are absolute, in order.

    Args:
        row: the row.
        root: the folder below which `image_files.resolve_image_path` writes images that the row
            holds as bytes.

    Raises DataError for a URL, and if the numbers of slots and images differ.
    """
    placer = _ImagePlacer(row, root)
    conversations: dict[str, Messages] = {}
    for key, value in row.values.items():
        if key in _ROLES:
            conversations[key] = as_messages(value, _ROLES[key])
    if placer.waiting and not _have_image_slots(conversations):
        _add_slots_to_first_question(conversations, len(placer.waiting))
    values = dict(row.values)
    for key, conversation in conversations.items():
        values[key] = [placer.place_in_turn(turn) for turn in conversation]
    if placer.waiting:
        what = f"{len(placer.waiting)} more images than places for them"
        fix = f'say where: {{"type": "image"}} in a content, or {IMAGE_MARK} in a text'
        raise DataError(what, where=row.origin, fix=fix)
    if placer.paths:
        row = replace(row, values=values)
    return row, placer.paths


class _ImagePlacer:
    """Assigns the images of a row to the slots of its conversation.

    Attributes:
        row: the row of the conversation.
        root: see `place_images`.
        waiting: the images of the column `images` that have no slot yet; None if the row has no
            such column.
        paths: absolute paths of the images that have a slot, in order.
    """

    def __init__(self, row: Row, root: Path) -> None:
        self.row = row
        self.root = root
        self.waiting = _listed_images(row)
        self.paths: list[str] = []

    def place_in_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the images of its content as parts."""
        if "content" not in turn:
            return turn
        content = turn["content"]
        if isinstance(content, str):
            content = self._place_in_text(content)
        else:
            content = self._place_in_parts(content)
        return {**turn, "content": content}

    def _place_in_text(self, text: str) -> str | list[dict[str, Any]]:
        """Return a text as parts, split at `<image>`; as it is if the row lists no images."""
        if self.waiting is None or IMAGE_MARK not in text:
            return text
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(text.split(IMAGE_MARK)):
            # A mark stands between two pieces.
            if number:
                parts.append(self._place({}))
            if piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _place_in_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the parts of a content, those of images as `{"type": "image"}`."""
        placed = []
        for part in parts:
            if is_image(part):
                part = self._place(part)
            placed.append(part)
        return placed

    def _place(self, part: dict[str, Any]) -> dict[str, Any]:
        """Note the path of an image, and return the part that stands for it.

        The part may name its image. If it does not, the next image of the column `images` is taken.
        Raises DataError if there is none.
        """
        image = _named_image(part)
        if image is None:
            if not self.waiting:
                raise DataError(
                    "there are more places for images than images",
                    where=self.row.origin,
                    fix="name each in the column `images`",
                )
            image = self.waiting.pop(0)
        path = expanded(resolve_image_path(image, self.row.origin, self.root))
        self.paths.append(str((self.row.folder / path).absolute()))
        return {"type": "image"}


def _listed_images(row: Row) -> list[Any] | None:
    """Return the images of a row's column `images`; None without the column."""
    images = row.values.get("images")
    if images is None:
        return None
    if isinstance(images, list):
        # A copy: `_ImagePlacer` takes images out of it.
        return list(images)
    # An empty cell of a CSV.
    if images == "":
        return []
    return [images]


def _named_image(part: dict[str, Any]) -> Any:
    """Return the image that a part of a content names; None if it names none."""
    for key in _IMAGE_KEYS:
        if part.get(key) is not None:
            return part[key]
    return None


def _have_image_slots(conversations: dict[str, Messages]) -> bool:
    """Return whether any message of some conversations has a slot for an image."""
    for conversation in conversations.values():
        for turn in conversation:
            if _has_image_slot(turn.get("content")):
                return True
    return False


def _has_image_slot(content: Any) -> bool:
    """Return whether a content, a text or parts, has a slot for an image."""
    if isinstance(content, str):
        return IMAGE_MARK in content
    return any(map(is_image, content or []))


def _add_slots_to_first_question(conversations: dict[str, Messages], count: int) -> None:
    """Put `count` slots for images before the first question that is a text."""
    for key, conversation in conversations.items():
        for number, turn in enumerate(conversation):
            content = turn.get("content")
            if turn["role"] == "user" and isinstance(content, str):
                marked = {**turn, "content": IMAGE_MARK * count + content}
                # A new list: the row's own messages stay as they are.
                conversations[key] = [*conversation[:number], marked, *conversation[number + 1 :]]
                return


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
        has_images = False
        for index in pack:
            text = metas[rows[index]]
            if text:
                meta = json.loads(text)
                images += meta["images"]
                grids += meta["grid"]
                has_images = True
        if has_images:
            whole = {"images": images, "grid": grids}
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


def count_images(metas: Sequence[bytes]) -> dict[str, int]:
    """Count the images and patches of samples with these metas, and the samples with images."""
    images = 0
    patches = 0
    samples_with_images = 0
    for text in metas:
        if not text:
            continue
        grids = json.loads(text).get("grid")
        if grids:
            samples_with_images += 1
            images += len(grids)
            for time, height, width in grids:
                patches += time * height * width
    return {"images": images, "patches": patches, "samples_with_images": samples_with_images}


@dataclass(frozen=True)
class VisionBatch(TokenBatch):
    """A TokenBatch with its images.

    A micro-batch of text alone has one image of zeros, with its one token in the padding, where no
    target depends on it. So the vision tower runs in every micro-batch of every rank, which the
    collectives of DDP, FSDP2 and ZeRO require, and no number changes.

    Attributes:
        rope_3BT: int64, position in time, height and width of each token, as the model's
            get_rope_index counts them, restarted in each segment.
        pixels_PD: float32, the patches of all images, end to end.
        grid_N3: int64, patches in time, height and width of each image.
    """

    rope_3BT: torch.Tensor
    pixels_PD: torch.Tensor
    grid_N3: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model.

        Of the four positions the first separates documents, the others are for the rotary embedding.
        """
        positions_4BT = torch.cat((self.position_ids_BT[None], self.rope_3BT))
        return {
            "input_ids": self.input_ids_BT,
            "position_ids": positions_4BT,
            "pixel_values": self.pixels_PD,
            "image_grid_thw": self.grid_N3,
        }


def collate_vision(
    cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None, vision: Vision
) -> VisionBatch:
    """Return a micro-batch with its images, which are read from their files.

    Args:
        cache: the token cache.
        ids: samples of the cache; -1 is a filler.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest row. The batch has `width` + 1
            columns, since the last one is kept free for the image of zeros. With None there is an
            additional column only if the batch has no images.
        vision: the model's images.

    Raises DataError for an image that cannot be read any more.
    """
    rows = read_segments(cache, ids)
    metas = read_metas(cache, ids)
    images: list[tuple[str, Grid]] = []
    for meta in metas:
        images += zip(meta.get("images", ()), meta.get("grid", ()), strict=True)
    if width is None and not images:
        width = max(map(row_width, rows))
    # One more token, in the padding, for the image of zeros.
    padded_width = None if width is None else width + 1
    batch = collate(rows, pad_id, padded_width)
    own_width = batch.input_ids_BT.shape[1]
    rope_3BT = _rope_of_batch(rows, metas, own_width, vision)
    if images:
        grids = [grid for _, grid in images]
        patches = [vision.patches(path, grid) for path, grid in images]
    else:
        # The smallest image: its patches are merged into one token.
        grids = [(1, vision.merge, vision.merge)]
        patches = [np.zeros((vision.merge**2, vision.width), np.float32)]
        batch.input_ids_BT[0, -1] = vision.token_id
    return VisionBatch(
        **vars(batch),
        rope_3BT=torch.from_numpy(rope_3BT),
        pixels_PD=torch.from_numpy(np.concatenate(patches)),
        grid_N3=torch.tensor(grids, dtype=torch.int64),
    )


def _rope_of_batch(
    rows: Sequence[Sequence[Segment] | None],
    metas: Sequence[dict[str, Any]],
    width: int,
    vision: Vision,
) -> npt.NDArray[np.int64]:
    """Return int64[3, rows, width]: the positions of all tokens; those of padding count from 0."""
    rope_3BT = np.tile(np.arange(width, dtype=np.int64), (3, len(rows), 1))
    for index, (row, meta) in enumerate(zip(rows, metas, strict=True)):
        start = 0
        grids = list(meta.get("grid", ()))
        for tokens, _ in row or ():
            stop = start + len(tokens)
            rope_3BT[:, index, start:stop] = rope_positions(tokens, grids, vision)
            rope_3BT[:, index, stop:] = np.arange(width - stop)
            start = stop
    return rope_3BT


def rope_positions(
    tokens: npt.NDArray[Any], grids: list[Grid], vision: Vision
) -> npt.NDArray[np.int64]:
    """Return the positions in time, height and width of a segment's tokens.

    This is M-RoPE (Qwen2-VL, Wang et al. 2024, section 2.1). Text counts in all three at once. An
    image's tokens share one time, and the text behind it continues after its longer side.

    Args:
        tokens: the n tokens of a segment.
        grids: patches in time, height and width of the images that are still to come. Those of the
            segment are removed from its front.
        vision: the model's images.

    Returns:
        int64[3, n].
    """
    positions = np.empty((3, len(tokens)), np.int64)
    next_position = 0
    start = 0
    is_image_token = tokens == vision.token_id
    while start < len(tokens):
        if is_image_token[start]:
            _, height, width = grids.pop(0)
            # Of the image's tokens, each of which stands for merge × merge patches.
            height //= vision.merge
            width //= vision.merge
            stop = start + height * width
            rows = np.repeat(np.arange(height), width)
            columns = np.tile(np.arange(width), height)
            positions[0, start:stop] = next_position
            positions[1, start:stop] = next_position + rows
            positions[2, start:stop] = next_position + columns
            next_position += max(height, width)
        else:
            # Text up to the next image, or to the end.
            later_images = np.flatnonzero(is_image_token[start:])
            if len(later_images):
                stop = start + int(later_images[0])
            else:
                stop = len(tokens)
            stop_position = next_position + stop - start
            positions[:, start:stop] = np.arange(next_position, stop_position)
            next_position = stop_position
        start = stop
    return positions


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

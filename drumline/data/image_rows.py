"""Encodes rows with images for vision-language models.

A row names its images by path, relative to the folder of its data file, or holds their bytes
(`image_files.resolve_image_path`). An image is in the content of a message (`{"type": "image",
"image": PATH}`) or in the column `images`. The images of that column go to the slots of the
conversation: a part `{"type": "image"}` alone, or `<image>` in a text. Without any slot they stand
before the first question. Videos are named in the same way, by `{"type": "video"}`, the column
`videos` and `<video>`; their frames become images in their place. A sample's meta is
`{"images": [absolute paths], "grid": [grid of each, …]}`, in order. Pixels are read for each batch.
With videos that are files or folders it also has `VIDEO_FILES`: {absolute path: `video_state`}, by
which a change of them is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from drumline.config.data import DataConfig
from drumline.data.cache import cache_root
from drumline.data.encode import (
    AnswerRowEncoder,
    JudgedRowEncoder,
    PairRowEncoder,
    PromptRowEncoder,
    TextRowEncoder,
    prompt_meta,
)
from drumline.data.image_files import VIDEO_FILES, resolve_image_path
from drumline.data.pairs import TextOrMessages
from drumline.data.sources import (
    IMAGE_MARK,
    VIDEO_COLUMNS,
    VIDEO_MARK,
    Row,
    has_marked_videos,
    holds_images,
    is_image,
    is_video,
)
from drumline.data.targets import EncodedSample, Encoder, TokenSegment, truncate
from drumline.data.turns import Messages, as_messages
from drumline.data.video_files import find_frames, video_state
from drumline.errors import DataError
from drumline.foreign import expand_home
from drumline.models.image_tokens import Grid, Vision

# Columns that other libraries read beside a conversation. No model gets them here, so rows with
# them are refused.
UNSUPPORTED_COLUMNS = (
    "audio",
    "audios",
)
# Column that may hold a conversation → the role of a plain text in it.
_ROLES = {"messages": "user", "prompt": "user", "completion": "assistant"}
# Keys of a part of a content that may name its image or video, in the order in which they count.
_IMAGE_KEYS = ("image", "path", "url", "image_url")
_VIDEO_KEYS = ("video", "path", "url", "video_url")


@dataclass(frozen=True)
class RowWithImageTokens:
    """An encoded row with the tokens of its images.

    Attributes:
        segment: the tokens.
        images: (absolute path, grid) of each image.
        spans: the token range [start, stop) of each image in `segment`.
        video_files: the state of each video whose frames are among the images, by its path.
    """

    segment: TokenSegment
    images: list[tuple[str, Grid]]
    spans: list[tuple[int, int]]
    video_files: dict[str, str] = field(default_factory=dict)

    def to_sample(self, truncated: bool) -> EncodedSample:
        """Return the row as `EncodedSample`. `truncated`: whether something was cut off."""
        meta = None
        # A sample with a meta is kept even without a target. Without a meta such a sample is left
        # out.
        if self.images and self.segment.target_count:
            paths = [path for path, _ in self.images]
            grids = [grid for _, grid in self.images]
            meta = _meta_of_images(paths, grids, self.video_files)
        return EncodedSample([self.segment], meta, truncated, self.segment.hides_reasoning)


class PlacedRow(NamedTuple):
    """A row whose images are parts of its contents.

    Attributes:
        row: the row.
        paths: absolute paths of the images, in order.
        video_files: the state of each video that is a file or a folder, by its absolute path.
    """

    row: Row
    paths: list[str]
    video_files: dict[str, str]


class ImageRows:
    """Finds the images of rows, and puts their tokens in the place of the marks of images.

    Args:
        tokenizer: a tokenizer of transformers.
        data: the settings of `data`.
        vision: the model's images.
    """

    def __init__(self, tokenizer: Any, data: DataConfig, vision: Vision) -> None:
        self.vision = vision
        self.root = cache_root(data)
        self.most_frames = data.video_max_frames
        self.mark = tokenizer.convert_ids_to_tokens(vision.mark_id)
        self.token = tokenizer.convert_ids_to_tokens(vision.token_id)

    def encoder(self, tokenizer: Any, data: DataConfig) -> Encoder:
        """Return the encoder of text, which leaves a mark for each image."""
        before, behind = self.vision.text_around
        replaced = {}
        if before or behind:
            replaced[self.mark] = f"{before}{self.mark}{behind}"
        return Encoder(tokenizer, False, data, replaced)

    def place(self, row: Row) -> PlacedRow:
        """Return `place_images` of a row. Raises DataError, also for media that no model gets."""
        _refuse_unsupported_media(row)
        return place_images(row, self.root, self.most_frames)

    def expand(self, marked: TokenSegment, paths: list[str], origin: str) -> RowWithImageTokens:
        """Return a row with the tokens of its images, whose paths are in the order of the marks.

        Raises DataError that names the row, `origin`, also for a text that holds a token of images:
        the model would take a feature of another image for it, or stop for the lack of one.
        """
        found = int((marked.tokens == self.vision.mark_id).sum())
        if found != len(paths):
            what = f"{len(paths)} images, but the chat template writes {found} places for them"
            fix = f"take {self.mark} out of the row's texts, or set another model.chat_template"
            raise DataError(what, where=origin, fix=fix)
        has_own_mark = self.vision.mark_id != self.vision.token_id
        if has_own_mark and (marked.tokens == self.vision.token_id).any():
            what = f"a text of this row holds {self.token}, which stands for a part of an image"
            raise DataError(what, where=origin, fix="take it out of the text")
        images = [(path, self.vision.grid(path, origin, len(paths))) for path in paths]
        return expand_marks(marked, images, self.vision)


class VisionRowEncoder:
    """Encodes conversations with and without images. Image tokens are never targets."""

    def __init__(self, tokenizer: Any, data: DataConfig, vision: Vision) -> None:
        self.images = ImageRows(tokenizer, data, vision)
        self.encoder = self.images.encoder(tokenizer, data)
        self.data = data

    def encode(self, row: Row) -> EncodedSample | None:
        """Return the row cut to data.max_length, without any image that does not fit whole.

        None if the row is dropped, or if the cut takes all of its targets. Raises DataError that
        names the row.
        """
        placed = self.images.place(row)
        if placed.paths:
            self.encoder.require_template("images need a chat template", row)
        marked = self.encoder.encode(placed.row)
        expanded_row = self.images.expand(marked, placed.paths, row.origin)
        full = replace(expanded_row, video_files=placed.video_files)
        truncated_segment = truncate(
            full.segment, self.data.max_length, self.data.truncation, row.origin
        )
        if truncated_segment is None:
            return None
        size = len(truncated_segment.tokens)
        if size == len(full.segment.tokens):
            return full.to_sample(truncated=False)
        lost_its_answers = full.segment.target_count and not truncated_segment.target_count
        if lost_its_answers:
            return None
        # `truncated_segment` may have a part of an image at its end; this has none.
        shortened = cut_between_images(full, size, self.data.truncation == "left")
        has_lost_images = len(shortened.images) < len(full.images)
        if has_lost_images and self.images.vision.counts_images:
            return None
        return shortened.to_sample(truncated=True)


class VisionDocumentEncoder(TextRowEncoder):
    """Encodes documents for a vision-language model. They have no images, nor tokens of them.

    Args:
        tokenizer: a tokenizer of transformers.
        learn_all: see `TextRowEncoder`.
        data: the settings of `data`.
        vision: the model's images.
    """

    def __init__(self, tokenizer: Any, learn_all: bool, data: DataConfig, vision: Vision) -> None:
        super().__init__(tokenizer, learn_all, data)
        self.images = ImageRows(tokenizer, data, vision)

    def encode(self, row: Row) -> EncodedSample | None:
        if holds_images(row) or has_marked_videos(row):
            what = "this row holds images or videos, and documents are read without any"
            raise DataError(what, where=row.origin, fix="use algorithm sft")
        _refuse_unsupported_media(row)
        sample = super().encode(row)
        if sample is not None:
            for segment in sample.segments:
                self.images.expand(segment, [], row.origin)
        return sample


class _PromptImages:
    """The images in the prompt of a row with answers, see `AnswerRowEncoder.images_of`.

    Attributes:
        prompt: the messages of the prompt, with a part for each image.
        paths: absolute paths of the images, in order.
        video_files: see `PlacedRow`.
        grids: the grid of each image.
    """

    def __init__(self, images: ImageRows, row: Row, prompt: TextOrMessages) -> None:
        values: dict[str, Any] = {"prompt": prompt}
        if "images" in row.values:
            values["images"] = row.values["images"]
        placed = images.place(replace(row, values=values))
        self.images = images
        self.paths = placed.paths
        self.video_files = placed.video_files
        self.prompt: TextOrMessages = placed.row.values["prompt"]
        self.grids: list[Grid] = []

    def expand(self, segment: TokenSegment, origin: str) -> TokenSegment:
        """Return the tokens of prompt and answer with those of the images."""
        full = self.images.expand(segment, self.paths, origin)
        self.grids = [grid for _, grid in full.images]
        return replace(segment, tokens=full.segment.tokens, learn=full.segment.learn)

    def are_whole(self, before: TokenSegment, after: TokenSegment) -> bool:
        """Return whether a cut has left all image tokens of a segment."""
        token_id = self.images.vision.token_id
        kept = int((after.tokens == token_id).sum())
        return kept == int((before.tokens == token_id).sum())

    def meta(self) -> dict[str, Any]:
        """Return the values of the sample's meta; empty without images."""
        if not self.paths:
            return {}
        return _meta_of_images(self.paths, self.grids, self.video_files)


class _VisionAnswerEncoder(AnswerRowEncoder):
    """The base of encoders of answers to prompts that may have images."""

    def __init__(self, tokenizer: Any, data: DataConfig, vision: Vision) -> None:
        super().__init__(tokenizer, data)
        self.images = ImageRows(tokenizer, data, vision)
        self.encoder = self.images.encoder(tokenizer, data)

    def images_of(self, row: Row, prompt: TextOrMessages) -> _PromptImages:
        return _PromptImages(self.images, row, prompt)


class VisionPairEncoder(_VisionAnswerEncoder, PairRowEncoder):
    """Encodes pairs whose prompts may have images. Both sides have the same images.

    A pair that would lose an image to data.max_length is left out.
    """


class VisionJudgedEncoder(_VisionAnswerEncoder, JudgedRowEncoder):
    """Encodes judged answers whose prompts may have images.

    An answer whose prompt would lose an image to data.max_length is left out.
    """


class VisionPromptEncoder(PromptRowEncoder):
    """Encodes prompts of rollouts that may have images.

    Rewards read the absolute paths of the images as `images`. A prompt that would lose an image to
    data.max_length is left out.
    """

    def __init__(self, tokenizer: Any, new_tokens: int, data: DataConfig, vision: Vision) -> None:
        super().__init__(tokenizer, new_tokens, data)
        self.images = ImageRows(tokenizer, data, vision)
        self.encoder = self.images.encoder(tokenizer, data)

    def encode(self, row: Row) -> EncodedSample | None:
        placed = self.images.place(row)
        if placed.paths:
            self.encoder.require_template("images need a chat template", row)
        text, ids = self.encoder.prompt(placed.row)
        marked = TokenSegment(np.asarray(ids, np.int32), np.zeros(len(ids), np.uint8))
        full = self.images.expand(marked, placed.paths, row.origin)
        kept = self.cut(full.segment.tokens.tolist(), row)
        if kept is None:
            return None
        lost = len(full.segment.tokens) - len(kept)
        if lost and full.spans and full.spans[0][0] < lost:
            return None
        grids = [grid for _, grid in full.images]
        images = _meta_of_images(placed.paths, grids, placed.video_files)
        segment = TokenSegment(full.segment.tokens[lost:], full.segment.learn[lost:])
        return EncodedSample([segment], prompt_meta(row, text, images), truncated=lost > 0)


def _meta_of_images(
    paths: list[str], grids: list[Grid], video_files: dict[str, str]
) -> dict[str, Any]:
    """Return what the meta of a sample says of its images, see the top of this module."""
    meta: dict[str, Any] = {"images": paths, "grid": grids}
    if video_files:
        meta[VIDEO_FILES] = video_files
    return meta


def _refuse_unsupported_media(row: Row) -> None:
    """Raise DataError for a row with sounds, or with images or videos beside a document.

    The model would not get them.
    """
    if "text" in row.values:
        images = {"image": row.extra.get("image"), "images": row.values.get("images")}
        for name in VIDEO_COLUMNS:
            images[name] = row.extra.get(name)
        _require_empty(images, row, "give a prompt and a completion beside it")
    unsupported = {name: row.extra.get(name) for name in UNSUPPORTED_COLUMNS}
    _require_empty(unsupported, row, "take the column or the row out")


def _require_empty(columns: dict[str, Any], row: Row, fix: str) -> None:
    """Raise DataError for the first of some columns of a row that holds anything."""
    for name, value in columns.items():
        if value:
            what = f"what column {name!r} holds would be left out"
            raise DataError(what, where=row.origin, fix=fix)


def expand_marks(
    marked: TokenSegment, images: Sequence[tuple[str, Grid]], vision: Vision
) -> RowWithImageTokens:
    """Return the segment with the tokens of an image in the place of each mark.

    None of these tokens is a target.

    Args:
        marked: a row with one mark for each image.
        images: (absolute path, grid) of each image, in order.
        vision: the model's images.
    """
    marks = np.flatnonzero(marked.tokens == vision.mark_id)
    tokens = []
    learn = []
    spans = []
    start = 0
    size = 0
    for mark, (_, grid) in zip(marks.tolist(), images, strict=True):
        sequence = np.asarray(vision.sequence(grid), np.int32)
        tokens += [marked.tokens[start:mark], sequence]
        learn += [marked.learn[start:mark], np.zeros(len(sequence), np.uint8)]
        first = size + mark - start
        size = first + len(sequence)
        spans.append((first, size))
        start = mark + 1
    tokens.append(marked.tokens[start:])
    learn.append(marked.learn[start:])
    segment = TokenSegment(np.concatenate(tokens), np.concatenate(learn), marked.hides_reasoning)
    return RowWithImageTokens(segment, list(images), spans)


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
    segment = TokenSegment(
        full.segment.tokens[start:stop],
        full.segment.learn[start:stop],
        full.segment.hides_reasoning,
    )
    return RowWithImageTokens(segment, images, spans, full.video_files)


def place_images(row: Row, root: Path, most_frames: int = 8) -> PlacedRow:
    """Return a row with its images as parts `{"type": "image"}` of contents.

    That is the form that chat templates read.

    Args:
        row: the row.
        root: the folder below which `image_files.resolve_image_path` writes images that the row
            holds as bytes.
        most_frames: see data.video_max_frames.

    Raises DataError for a URL, and if the numbers of slots and images, or of slots and videos,
    differ.
    """
    placer = _ImagePlacer(row, root, most_frames)
    conversations: dict[str, Messages] = {}
    for key, value in row.values.items():
        if key in _ROLES:
            conversations[key] = as_messages(value, _ROLES[key])
    if placer.waiting and not _have_slots(conversations, IMAGE_MARK, is_image):
        _add_slots_to_first_question(conversations, "image", len(placer.waiting))
    if placer.videos and not _have_slots(conversations, VIDEO_MARK, is_video):
        _add_slots_to_first_question(conversations, "video", len(placer.videos))
    values = dict(row.values)
    for key, conversation in conversations.items():
        values[key] = [placer.place_in_turn(turn) for turn in conversation]
    if placer.waiting:
        what = f"{len(placer.waiting)} more images than places for them"
        fix = f'say where: {{"type": "image"}} in a content, or {IMAGE_MARK} in a text'
        raise DataError(what, where=row.origin, fix=fix)
    if placer.videos:
        what = f"{len(placer.videos)} more videos than places for them"
        fix = f'say where: {{"type": "video"}} in a content, or {VIDEO_MARK} in a text'
        raise DataError(what, where=row.origin, fix=fix)
    if placer.paths:
        row = replace(row, values=values)
    return PlacedRow(row, placer.paths, placer.video_files)


class _ImagePlacer:
    """Assigns the images of a row to the slots of its conversation.

    Attributes:
        row: the row of the conversation.
        root: see `place_images`.
        waiting: the images of the column `images` that have no slot yet; None if the row has no
            such column.
        videos: the same for the column `videos` or `video`.
        paths: absolute paths of the images that have a slot, in order.
        video_files: see `PlacedRow`.
    """

    def __init__(self, row: Row, root: Path, most_frames: int) -> None:
        self.row = row
        self.root = root
        self.most_frames = most_frames
        self.waiting = _listed_images(row)
        self.videos = _listed_videos(row)
        self.paths: list[str] = []
        self.video_files: dict[str, str] = {}

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
        """Return a text as parts, split at `<image>` and `<video>`.

        A mark is text if the row lists no such files. A text without marks is returned as it is.
        """
        marks = []
        if self.waiting is not None:
            marks.append(IMAGE_MARK)
        if self.videos is not None:
            marks.append(VIDEO_MARK)
        if not any(mark in text for mark in marks):
            return text
        parts: list[dict[str, Any]] = []
        # The pattern is a group, so the marks are pieces, too.
        for piece in re.split(f"({'|'.join(marks)})", text):
            if piece in marks and piece == IMAGE_MARK:
                parts.append(self._place({}))
            elif piece in marks:
                parts += self._place_video({})
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _place_in_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the parts of a content, those of images and frames as `{"type": "image"}`."""
        placed = []
        for part in parts:
            if is_image(part):
                placed.append(self._place(part))
            elif is_video(part):
                placed += self._place_video(part)
            else:
                placed.append(part)
        return placed

    def _place(self, part: dict[str, Any]) -> dict[str, Any]:
        """Note the path of an image, and return the part that stands for it.

        The part may name its image. If it does not, the next image of the column `images` is taken.
        Raises DataError if there is none.
        """
        image = _named_file(part, _IMAGE_KEYS)
        if image is None:
            image = self._next(self.waiting, "images")
        path = expand_home(resolve_image_path(image, self.row.origin, self.root))
        self.paths.append(str((self.row.folder / path).absolute()))
        return {"type": "image"}

    def _place_video(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """Note the paths of a video's frames, and return a part for each; see `_place`."""
        video = _named_file(part, _VIDEO_KEYS)
        if video is None:
            video = self._next(self.videos, "videos")
        if isinstance(video, str):
            # Before the frames are read: a change in between is then found later.
            path = (self.row.folder / expand_home(video)).absolute()
            self.video_files[str(path)] = video_state(path)
        frames = find_frames(video, self.row.folder, self.most_frames, self.row.origin, self.root)
        self.paths += frames
        return [{"type": "image"}] * len(frames)

    def _next(self, listed: list[Any] | None, column: str) -> Any:
        """Take the first entry off a column's list. Raises DataError if none is left."""
        if not listed:
            raise DataError(
                f"there are more places for {column} than {column}",
                where=self.row.origin,
                fix=f"name each in the column `{column}`",
            )
        return listed.pop(0)


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


def _listed_videos(row: Row) -> list[Any] | None:
    """Return the videos of a row's column; None without one.

    A list under `video` has the frames of one video, and a list under `videos` several videos.
    """
    for name in VIDEO_COLUMNS:
        videos = row.extra.get(name)
        if videos is None or videos == "":
            continue
        # An empty list under `video` is no video, and not one without frames.
        if isinstance(videos, list) and (name == "videos" or not videos):
            return list(videos)
        return [videos]
    return None


def _named_file(part: dict[str, Any], keys: Sequence[str]) -> Any:
    """Return the image or video that a part of a content names; None if it names none."""
    for key in keys:
        if part.get(key) is not None:
            return part[key]
    return None


def _have_slots(
    conversations: dict[str, Messages], mark: str, is_slot: Callable[[dict[str, Any]], bool]
) -> bool:
    """Return whether any message of some conversations has a slot for an image, or for a video.

    `mark`: such a slot in a text. `is_slot`: whether a part of a content is one.
    """
    for conversation in conversations.values():
        for turn in conversation:
            content = turn.get("content")
            if isinstance(content, str):
                if mark in content:
                    return True
            elif any(map(is_slot, content or [])):
                return True
    return False


def _add_slots_to_first_question(
    conversations: dict[str, Messages], medium: str, count: int
) -> None:
    """Put `count` slots before the first question. `medium`: image or video."""
    for key, conversation in conversations.items():
        for number, turn in enumerate(conversation):
            if turn["role"] != "user":
                continue
            content = turn.get("content") or ""
            if isinstance(content, str):
                content = f"<{medium}>" * count + content
            else:
                content = [{"type": medium}] * count + content
            marked = {**turn, "content": content}
            # A new list: the row's own messages stay as they are.
            conversations[key] = [*conversation[:number], marked, *conversation[number + 1 :]]
            return

"""Rows with images: where they stand in a conversation, and their tokens.

A row names its images by path, relative to the folder of its data file: in the content of a message (`{"type": "image", "image": PATH}`),
or in a column `images`, for places that only say `{"type": "image"}`, or `<image>` in a text. A sample's meta is
`{"images": [absolute paths], "grid": [[t, h, w], …]}`, in order; pixels are read when a batch is made (data.vision).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drumline.core.data import DataConfig
from drumline.data.sources import Row, is_image
from drumline.data.templates import Encoded, Encoder, Example, Messages, truncate
from drumline.errors import DataError
from drumline.models.vision import Grid, Vision

PLACE = "<image>"


@dataclass(frozen=True)
class Seen:
    """A row as tokens: `images`, and the token range [start, stop) of each in `example`."""

    example: Example
    images: list[tuple[str, Grid]]
    spans: list[tuple[int, int]]

    def encoded(self, truncated: bool) -> Encoded:
        meta = {"images": [path for path, _ in self.images], "grid": [grid for _, grid in self.images]}
        return Encoded([self.example], meta if self.images and self.example.learned else None, truncated)


class ImageRows:
    """Conversations for a vision-language model, with images and without. Image tokens are never learned."""

    def __init__(self, tokenizer: Any, data: DataConfig, vision: Vision) -> None:
        self.encoder, self.data, self.vision = Encoder(tokenizer, False, data), data, vision

    def encode(self, row: Row) -> Encoded | None:
        """The row cut to data.max_length. An image that does not fit as a whole is cut off as a whole."""
        placed, paths = place_images(row)
        if paths and not self.encoder.has_template:
            fix = "set model.chat_template to a Jinja file"
            raise DataError("images need a chat template and this tokenizer has none", where=row.origin, fix=fix)
        short = self.encoder.encode(placed)
        images = [(path, self.vision.grid(path, row.origin)) for path in paths]
        found = int((short.tokens == self.vision.token_id).sum())
        if found != len(images):
            raise DataError(f"{len(images)} images, but the chat template writes {found} places for them", where=row.origin)
        full = expand(short, images, self.vision)
        kept = truncate(full.example, self.data.max_length, self.data.truncation, row.origin)
        if kept is None or len(kept.tokens) == len(full.example.tokens):
            return None if kept is None else full.encoded(truncated=False)
        return cut(full, len(kept.tokens), self.data.truncation == "left").encoded(truncated=True)


def expand(short: Example, images: Sequence[tuple[str, Grid]], vision: Vision) -> Seen:
    """Repeat the one placeholder of each image for all of its tokens, and learn none of them."""
    at = np.flatnonzero(short.tokens == vision.token_id)
    repeats = np.ones(len(short.tokens), np.int64)
    repeats[at] = [vision.tokens(grid) for _, grid in images]
    stops = np.cumsum(repeats)
    learn = np.repeat(np.where(short.tokens == vision.token_id, 0, short.learn).astype(np.uint8), repeats)
    spans = list(zip((stops - repeats)[at].tolist(), stops[at].tolist(), strict=True))
    return Seen(Example(np.repeat(short.tokens, repeats), learn), list(images), spans)


def cut(full: Seen, size: int, left: bool) -> Seen:
    """The last `size` tokens (`left`) or the first, less the part of an image that the cut falls into."""
    total = len(full.example.tokens)
    start, stop = (total - size, total) if left else (0, size)
    for first, last in full.spans:
        if first < start < last:
            start = last
        if first < stop < last:
            stop = first
    inside = [index for index, (first, last) in enumerate(full.spans) if start <= first and last <= stop]
    example = Example(full.example.tokens[start:stop], full.example.learn[start:stop])
    return Seen(example, [full.images[i] for i in inside], [(full.spans[i][0] - start, full.spans[i][1] - start) for i in inside])


# ------------------------------------------------------------------------------------------------- where images stand


def place_images(row: Row) -> tuple[Row, list[str]]:
    """The row with its images as `{"type": "image"}` parts of contents, as chat templates want them, and their absolute paths in order.

    Raises DataError for a URL, and where places and images do not match.
    """
    given = row.values.get("images")
    waiting = None if given is None else list(given) if isinstance(given, list) else [given]
    paths: list[str] = []

    def image(part: dict[str, Any]) -> dict[str, Any]:
        named = next((part[key] for key in ("image", "path", "url", "image_url") if part.get(key) is not None), None)
        if named is None and not waiting:
            raise DataError("there are more places for images than images", where=row.origin, fix="name each in the column `images`")
        paths.append(_path(waiting.pop(0) if named is None and waiting else named, row))
        return {"type": "image"}

    def content(value: Any) -> Any:
        if isinstance(value, str):
            if waiting is None or PLACE not in value:
                return value
            first, *rest = value.split(PLACE)
            parts = [_text(first)]
            for text in rest:
                parts += [image({}), _text(text)]
            return [part for part in parts if part.get("text", PLACE)]
        return [image(part) if is_image(part) else part for part in value]

    def messages(value: Any, role: str) -> Messages:
        messages: Messages = [{"role": role, "content": value}] if isinstance(value, str) else value
        return [{**message, "content": content(message["content"])} if "content" in message else message for message in messages]

    roles = {"messages": "user", "prompt": "user", "completion": "assistant"}
    values = {key: messages(value, roles[key]) if key in roles else value for key, value in row.values.items()}
    if waiting:
        fix = f'say where: {{"type": "image"}} in a content, or {PLACE} in a text'
        raise DataError(f"{len(waiting)} more images than places for them", where=row.origin, fix=fix)
    return (replace(row, values=values) if paths else row), paths


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _path(named: Any, row: Row) -> str:
    if not isinstance(named, str):
        fix = "store images as files and name their paths"
        raise DataError(f"an image is given as {type(named).__name__}, not as a path", where=row.origin, fix=fix)
    if named.startswith("data:") or "://" in named:
        raise DataError(f"an image is a URL, not a path: {named[:60]}", where=row.origin, fix="download it and name the file")
    return str((row.folder / named).absolute())


# ------------------------------------------------------------------------------------------------------- metas of samples


def join_metas(metas: Sequence[bytes], rows: Sequence[int], packs: Iterable[Sequence[int]]) -> list[bytes]:
    """The meta of each pack: the images of its rows one after another. `packs` hold indices into `rows`, which are indices into `metas`."""
    joined = []
    for pack in packs:
        parts = [json.loads(metas[rows[index]]) for index in pack if metas[rows[index]]]
        whole = {key: [item for part in parts for item in part[key]] for key in ("images", "grid")}
        joined.append(json.dumps(whole, ensure_ascii=False).encode() if parts else b"")
    return joined


def count_images(metas: Sequence[bytes]) -> dict[str, int]:
    """How many images and patches the samples with these metas have, and how many of the samples have any."""
    grids = [grid for meta in metas if meta and (grid := json.loads(meta).get("grid"))]
    patches = sum(t * h * w for grid in grids for t, h, w in grid)
    return {"images": sum(map(len, grids)), "patches": patches, "samples_with_images": len(grids)}

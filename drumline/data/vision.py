"""Batches that a vision-language model takes: tokens, the positions of its rotary embedding, and patches of images.

B rows, T tokens, N images, P patches of all of them, D numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.data.batches import FILLER_WIDTH, TokenBatch, collate
from drumline.data.cache import TokenCache
from drumline.models.vision import Grid, Vision


@dataclass(frozen=True)
class VisionBatch(TokenBatch):
    """A TokenBatch with its images. `rope_3BT` int64: position in time, height and width of each token, as the model's own
    get_rope_index counts them, anew in each segment. `pixels_PD` float32; `grid_N3` int64: patches in time, height, width.

    A micro-batch of text alone carries one image of zeros, whose one token stands in the padding, where no learned token sees it. So the
    vision tower runs in every micro-batch of every rank, as the collectives of DDP, FSDP2 and ZeRO need it to, and nothing changes.
    """

    rope_3BT: torch.Tensor
    pixels_PD: torch.Tensor
    grid_N3: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model is called with. Of the four positions the first tells documents apart, the others turn the rotary embedding."""
        positions_4BT = torch.cat((self.position_ids_BT[None], self.rope_3BT))
        images = {"pixel_values": self.pixels_PD, "image_grid_thw": self.grid_N3}
        return {"input_ids": self.input_ids_BT, "position_ids": positions_4BT, **images}


def collate_vision(cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None, vision: Vision) -> VisionBatch:
    """A micro-batch of sample ids (-1: a filler). Reads images. `width`: as for `collate`, of the samples alone: a batch without images
    has one more token, and so have all where the width is fixed.

    Raises DataError for an image that cannot be read any more.
    """
    rows = [cache.segments(sample) if sample >= 0 else None for sample in ids]
    metas = [cache.meta(sample) if sample >= 0 else {} for sample in ids]
    images = [named for meta in metas for named in zip(meta.get("images", ()), meta.get("grid", ()), strict=True)]
    if width is None and not images:
        width = max(FILLER_WIDTH if row is None else sum(len(tokens) for tokens, _ in row) for row in rows)
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
        pixels, grids = [vision.patches(path, grid) for path, grid in images], [grid for _, grid in images]
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


def rope_positions(tokens: npt.NDArray[Any], grids: list[Grid], vision: Vision) -> npt.NDArray[np.int64]:
    """int64[3, n]: positions in time, height and width of a segment's tokens (M-RoPE; Qwen2-VL, Wang et al. 2024, section 2.1).

    Text counts on in all three at once; an image's tokens share one time, and the text behind it goes on after its longer side. Takes the
    segment's images from the front of `grids`.
    """
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

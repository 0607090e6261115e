"""How each family of vision-language models turns an image into tokens and pixels.

The chat template writes one token for an image, its mark. In its place come the image's own tokens,
and as many of them as the model has features for it are replaced by these features. A `Grid` is
what decides their number: it is kept with a sample, and pixels are read for each batch.

B rows, T tokens, N images, n tokens of an image, C channels, S × S pixels of a tile.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import isqrt
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from drumline.config.model import ModelConfig
from drumline.errors import DataError, ModelError
from drumline.models.pictures import load_image_processor, read_image
from drumline.models.tokenizer import load_tokenizer

# Whole numbers that decide how many tokens an image has; each family has its own.
Grid = tuple[int, ...]
Pixels = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Vision(ABC):
    """What data need to know of a vision-language model. It can be pickled to other processes.

    Attributes:
        path: folder or hub id of the image processor and the tokenizer.
        model: the section `model` of the config.
        token_id: the token that a feature of an image replaces.
        mark_id: the token that the chat template writes for an image.
        max_pixels: a larger image is made smaller; None: the processor's own limit.
        row_multiple: rows of a fixed width have a multiple of this many tokens, also with room for
            the smallest image.
    """

    path: str
    model: ModelConfig
    token_id: int
    mark_id: int
    max_pixels: int | None = None
    row_multiple: int = field(default=1, kw_only=True)

    # Whether each image of a row depends on how many there are, so that a row keeps all or none.
    counts_images: ClassVar[bool] = False
    # Why rows of this family cannot be packed; empty if they can.
    unpacked: ClassVar[str] = ""
    # The text that the model's processor puts before and behind the mark of an image.
    text_around: ClassVar[tuple[str, str]] = ("", "")

    @classmethod
    @abstractmethod
    def from_config(
        cls, path: str, model: ModelConfig, config: Any, max_pixels: int | None = None
    ) -> Self:
        """Return the object of a model by transformers' config of it."""

    @cached_property
    def processor(self) -> Any:
        """transformers' image processor, which makes images of `max_pixels` at most."""
        processor = load_image_processor(self.path, self.model)
        if self.max_pixels is not None:
            self.limit_pixels(processor, self.max_pixels)
        return processor

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return load_tokenizer(self.path, self.model)

    def __getstate__(self) -> dict[str, Any]:
        # Each process makes its own.
        own = ("processor", "tokenizer")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    @abstractmethod
    def limit_pixels(self, processor: Any, most: int) -> None:
        """Make a processor scale images down to `most` pixels.

        Raises ModelError if the model has only one size.
        """

    @abstractmethod
    def check_processor(self, config: Any) -> None:
        """Raise ModelError if the processor makes other pixels than the model takes."""

    @abstractmethod
    def measure(self, image: Any, count: int) -> Grid:
        """Return the grid of a picture of Pillow, one of `count` of its row. Raises ValueError."""

    def grid(self, path: str, origin: str, count: int = 1) -> Grid:
        """Return the grid of an image file, one of `count` of its row.

        The image is decoded, so that a damaged one is found before training. Raises DataError that
        names `origin` (a row) and the path.
        """
        image = read_image(path, origin)
        try:
            return self.measure(image, count)
        except ValueError as error:
            raise DataError(f"image {path}: {error}", where=origin) from error

    @abstractmethod
    def tokens(self, grid: Grid) -> int:
        """Return the number of features of an image, each of which replaces a token."""

    def identity(self) -> dict[str, Any]:
        """Return all that decides on the tokens and the pixels of an image. JSON holds it."""
        parts = {
            "family": type(self).__name__,
            "tokens": [self.token_id, self.mark_id],
            "blank": self.blank_size,
            "processor": self.processor.to_dict(),
            **self.token_settings(),
        }
        found: dict[str, Any] = json.loads(json.dumps(parts, default=str))
        return found

    def token_settings(self) -> dict[str, Any]:
        """Return numbers of the model's config that `identity` has for this family alone."""
        return {}

    def sequence(self, grid: Grid) -> list[int]:
        """Return the token ids that stand for an image: in place of its mark."""
        return [self.token_id] * self.tokens(grid)

    def runs(self, grid: Grid) -> list[int]:
        """Return how many of the image's features follow each other, for each such run of them."""
        return [self.tokens(grid)]

    @abstractmethod
    def process(self, image: Any, grid: Grid) -> tuple[Pixels, Grid]:
        """Return the pixels of a picture of Pillow as the model takes them, and its grid.

        `grid`: the one that it had when it was prepared.
        """

    def patches(self, path: str, grid: Grid) -> Pixels:
        """Return the pixels of an image file as the model takes them.

        Raises DataError if its size has changed since it was prepared.
        """
        pixels, grid_now = self.process(read_image(path, "data"), grid)
        if tuple(grid_now) != tuple(grid):
            what = f"image {path}: it has another size than when it was prepared"
            fix = "put it back, or remove the prepared data (data.cache_dir)"
            raise DataError(what, where="data", fix=fix)
        return np.asarray(pixels, np.float32)

    @property
    @abstractmethod
    def blank_grid(self) -> Grid:
        """The grid of the smallest image."""

    @property
    def blank_size(self) -> int:
        """The number of tokens of the smallest image."""
        return self.tokens(self.blank_grid)

    @abstractmethod
    def blank_pixels(self) -> Pixels:
        """Return the pixels of the smallest image, all of one value."""

    @abstractmethod
    def arguments(
        self, pixels: Sequence[Pixels], grids: Sequence[Grid], ids_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for the images of a batch, in the order of its rows."""

    def generation_arguments(self, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a model that generates needs besides `arguments`, for prompts with images."""
        return {}

    def rotary_positions(
        self, tokens: npt.NDArray[Any], grids: list[Grid]
    ) -> npt.NDArray[np.int64] | None:
        """Return int64[3, n]: the positions of n tokens; None if they are 0, 1, 2, …

        The grids of the images of these tokens are removed from the front of `grids`.
        """
        return None


@dataclass(frozen=True)
class QwenVision(Vision):
    """Qwen2-VL to Qwen3.5: an image of any size becomes patches, of which merge² are one token.

    A grid is the number of patches in time, height and width.

    Attributes:
        merge: patches of a token in height and in width.
        width: numbers of a patch: colours × frames × height × width.
    """

    merge: int = 2
    width: int = 0

    @classmethod
    def from_config(
        cls, path: str, model: ModelConfig, config: Any, max_pixels: int | None = None
    ) -> Self:
        sizes = config.vision_config
        token_id = int(config.image_token_id)
        width = sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2
        merge = int(sizes.spatial_merge_size)
        return cls(path, model, token_id, token_id, max_pixels, merge, int(width))

    def limit_pixels(self, processor: Any, most: int) -> None:
        # These edges of transformers are areas.
        largest = min(most, processor.size["longest_edge"])
        smallest = min(most, processor.size["shortest_edge"])
        size_type = type(processor.size)
        processor.size = size_type(longest_edge=largest, shortest_edge=smallest)

    def check_processor(self, config: Any) -> None:
        sizes = config.vision_config
        processor = self.processor
        if (processor.patch_size, processor.merge_size) != (sizes.patch_size, self.merge):
            what = (
                f"its image processor cuts patches of {processor.patch_size}"
                f" and merges {processor.merge_size},"
                f" the model takes {sizes.patch_size} and {self.merge}"
            )
            fix = "use the preprocessor_config.json that belongs to the model"
            raise ModelError(what, where=self.path, fix=fix)

    def measure(self, image: Any, count: int) -> Grid:
        from drumline.vendor.transformers import smart_resize

        size = self.processor.size
        patch = self.processor.patch_size
        height, width = smart_resize(
            image.height,
            image.width,
            factor=patch * self.processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return 1, height // patch, width // patch

    def tokens(self, grid: Grid) -> int:
        frames, height, width = grid
        return frames * height * width // self.merge**2

    def process(self, image: Any, grid: Grid) -> tuple[Pixels, Grid]:
        processed = self.processor([image], return_tensors="np")
        return processed["pixel_values"], tuple(processed["image_grid_thw"][0].tolist())

    @property
    def blank_grid(self) -> Grid:
        # Its patches are merged into one token.
        return 1, self.merge, self.merge

    def blank_pixels(self) -> Pixels:
        return np.zeros((self.merge**2, self.width), np.float32)

    def arguments(
        self, pixels: Sequence[Pixels], grids: Sequence[Grid], ids_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        pixels_PD = torch.from_numpy(np.concatenate(pixels))
        grid_N3 = torch.tensor([list(grid) for grid in grids], dtype=torch.int64)
        return {"pixel_values": pixels_PD, "image_grid_thw": grid_N3}

    def generation_arguments(self, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        # The model finds the positions of tokens by these.
        return {"mm_token_type_ids": (ids_BT == self.token_id).int()}

    def rotary_positions(
        self, tokens: npt.NDArray[Any], grids: list[Grid]
    ) -> npt.NDArray[np.int64] | None:
        """Return the positions in time, height and width of some tokens, int64[3, n].

        This is M-RoPE (Qwen2-VL, Wang et al. 2024, section 2.1). Text counts in all three at once.
        An image's tokens share one time, and the text behind it continues after its longer side.
        """
        positions = np.empty((3, len(tokens)), np.int64)
        next_position = 0
        start = 0
        is_image_token = tokens == self.token_id
        while start < len(tokens):
            if is_image_token[start]:
                _, height, width = grids.pop(0)
                # Of the image's tokens, each of which stands for merge × merge patches.
                height //= self.merge
                width //= self.merge
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
class TileVision(Vision):
    """The base of families that cut an image into tiles of one size, with equally many tokens each.

    Attributes:
        side: pixels of a tile's side.
        size: tokens of a tile.
    """

    side: int = 0
    size: int = 0

    def blank_pixels(self) -> Pixels:
        return np.zeros((1, 3, self.side, self.side), np.float32)

    def arguments(
        self, pixels: Sequence[Pixels], grids: Sequence[Grid], ids_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.from_numpy(np.concatenate(pixels))}

    def require_token(self, text: str) -> int:
        """Return the id of a special token of the tokenizer. Raises ModelError if it has none."""
        token_id = self.tokenizer.get_vocab().get(text)
        if token_id is None:
            what = f"its tokenizer has no token {text}, which stands around images"
            raise ModelError(what, where=self.path, fix="use the tokenizer of the model")
        return int(token_id)

    def check_processor(self, config: Any) -> None:
        """Raise ModelError if the processor makes tiles of another side than the model takes."""
        from PIL import Image

        square = Image.new("RGB", (self.side, self.side))
        pixels, _ = self.process(square, self.blank_grid)
        if pixels.shape[-2:] != (self.side, self.side):
            what = (
                f"its image processor makes {pixels.shape[-1]} × {pixels.shape[-2]} pixels,"
                f" the model takes {self.side} × {self.side}"
            )
            fix = "use the preprocessor_config.json that belongs to the model"
            raise ModelError(what, where=self.path, fix=fix)


@dataclass(frozen=True)
class GemmaVision(TileVision):
    """Gemma 3: each image is scaled to one tile, whose tokens attend to each other both ways.

    A grid is (1,). Crops of long images (pan and scan) are not made.

    Attributes:
        end_id: the token behind an image; its mark stands before it.
    """

    end_id: int = 0

    unpacked: ClassVar[str] = (
        "transformers counts the tokens of its images from the start of each document, in layers"
        " with a window, and so confuses the images of a pack"
    )
    text_around: ClassVar[tuple[str, str]] = ("\n\n", "\n\n")

    @classmethod
    def from_config(
        cls, path: str, model: ModelConfig, config: Any, max_pixels: int | None = None
    ) -> Self:
        side = int(config.vision_config.image_size)
        return cls(
            path,
            model,
            int(config.image_token_id),
            int(config.boi_token_index),
            max_pixels,
            side,
            int(config.mm_tokens_per_image),
            int(config.eoi_token_index),
        )

    def limit_pixels(self, processor: Any, most: int) -> None:
        what = f"this model scales each image to {self.side} × {self.side} pixels"
        raise ModelError(what, where="data.image_max_pixels", fix="take it out")

    def token_settings(self) -> dict[str, Any]:
        return {"end": self.end_id}

    def measure(self, image: Any, count: int) -> Grid:
        return (1,)

    def tokens(self, grid: Grid) -> int:
        return self.size

    def sequence(self, grid: Grid) -> list[int]:
        return [self.mark_id, *super().sequence(grid), self.end_id]

    def process(self, image: Any, grid: Grid) -> tuple[Pixels, Grid]:
        processed = self.processor([image], return_tensors="np", do_pan_and_scan=False)
        return processed["pixel_values"], (1,)

    @property
    def blank_grid(self) -> Grid:
        return (1,)

    def arguments(
        self, pixels: Sequence[Pixels], grids: Sequence[Grid], ids_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        arguments = super().arguments(pixels, grids, ids_BT)
        # The model looks by these for the tokens that attend both ways.
        arguments["token_type_ids"] = (ids_BT == self.token_id).long()
        return arguments


@dataclass(frozen=True)
class InternVision(TileVision):
    """InternVL: an image becomes one tile, or several and a small copy of all of it.

    A grid is (number of tiles,).
    """

    @classmethod
    def from_config(
        cls, path: str, model: ModelConfig, config: Any, max_pixels: int | None = None
    ) -> Self:
        sizes = config.vision_config
        side = int(_first(sizes.image_size))
        patches_of_side = side // int(_first(sizes.patch_size))
        size = int((patches_of_side * config.downsample_ratio) ** 2)
        token_id = int(config.image_token_id)
        return cls(path, model, token_id, token_id, max_pixels, side, size)

    def limit_pixels(self, processor: Any, most: int) -> None:
        processor.max_patches = max(1, min(processor.max_patches, most // self.side**2))
        processor.min_patches = min(processor.min_patches, processor.max_patches)

    def measure(self, image: Any, count: int) -> Grid:
        options = {"crop_to_patches": True}
        tiles = self.processor.get_number_of_image_patches(image.height, image.width, options)
        return (int(tiles),)

    def tokens(self, grid: Grid) -> int:
        return grid[0] * self.size

    def sequence(self, grid: Grid) -> list[int]:
        start = self.require_token("<img>")
        end = self.require_token("</img>")
        return [start, *super().sequence(grid), end]

    def process(self, image: Any, grid: Grid) -> tuple[Pixels, Grid]:
        processed = self.processor([image], return_tensors="np", crop_to_patches=True)
        pixels = processed["pixel_values"]
        return pixels, (len(pixels),)

    @property
    def blank_grid(self) -> Grid:
        return (1,)


@dataclass(frozen=True)
class SmolVision(TileVision):
    """SmolVLM and Idefics 3: an image becomes rows of tiles and a small copy of all of it.

    A grid is (rows, columns); (0, 0) is an image of one tile. Each tile has a token for its place.
    """

    @classmethod
    def from_config(
        cls, path: str, model: ModelConfig, config: Any, max_pixels: int | None = None
    ) -> Self:
        sizes = config.vision_config
        side = int(sizes.image_size)
        size = (side // int(sizes.patch_size)) ** 2 // int(config.scale_factor) ** 2
        token_id = int(config.image_token_id)
        return cls(path, model, token_id, token_id, max_pixels, side, size)

    def limit_pixels(self, processor: Any, most: int) -> None:
        # The longer side is a whole number of tiles.
        tiles = max(1, isqrt(most) // self.side)
        size_type = type(processor.size)
        longest = min(processor.size["longest_edge"], tiles * self.side)
        processor.size = size_type(longest_edge=longest)

    def measure(self, image: Any, count: int) -> Grid:
        _, grid = self.process(image, (0, 0))
        return grid

    def tokens(self, grid: Grid) -> int:
        return sum(self.runs(grid))

    def runs(self, grid: Grid) -> list[int]:
        rows, columns = grid
        return [self.size] * (rows * columns + 1)

    def sequence(self, grid: Grid) -> list[int]:
        rows, columns = grid
        fake = self.require_token("<fake_token_around_image>")
        whole = self.require_token("<global-img>")
        tile = [self.token_id] * self.size
        # The processor ends each row of tiles by a line break, and has one more before the copy.
        sequence: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                place = self.require_token(f"<row_{row}_col_{column}>")
                sequence += [fake, place, *tile]
            breaks = "\n" if row < rows else "\n\n"
            sequence += self.tokenizer(breaks, add_special_tokens=False)["input_ids"]
        return [*sequence, fake, whole, *tile, fake]

    def process(self, image: Any, grid: Grid) -> tuple[Pixels, Grid]:
        processed = self.processor([image], return_tensors="np", return_row_col_info=True)
        rows = int(processed["rows"][0][0])
        columns = int(processed["cols"][0][0])
        return processed["pixel_values"][0], (rows, columns)

    @property
    def blank_grid(self) -> Grid:
        return 0, 0

    def blank_pixels(self) -> Pixels:
        # The model leaves out tiles of zeros.
        return np.ones((1, 3, self.side, self.side), np.float32)

    def arguments(
        self, pixels: Sequence[Pixels], grids: Sequence[Grid], ids_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        tiles = torch.from_numpy(np.concatenate(pixels))
        # A row of tiles for each row of the batch, but only their order counts.
        return {"pixel_values": tiles[None]}


@dataclass(frozen=True)
class OneVision(TileVision):
    """LLaVA-OneVision: the only image of a row is one tile of all of it, and tiles of its parts.

    If a row has several images, each is one tile. A grid is (1 for the only image of a row and 0 for
    others, height, width), in pixels of the file.

    Attributes:
        config: transformers' config of the model.
    """

    config: Any = None

    counts_images: ClassVar[bool] = True

    @classmethod
    def from_config(
        cls, path: str, model: ModelConfig, config: Any, max_pixels: int | None = None
    ) -> Self:
        side = int(config.vision_config.image_size)
        size = (side // int(config.vision_config.patch_size)) ** 2
        token_id = int(config.image_token_id)
        return cls(path, model, token_id, token_id, max_pixels, side, size, config)

    def limit_pixels(self, processor: Any, most: int) -> None:
        what = "this model cuts images as its config says, image_grid_pinpoints"
        raise ModelError(what, where="data.image_max_pixels", fix="take it out")

    def token_settings(self) -> dict[str, Any]:
        sizes = self.config.image_grid_pinpoints
        return {"tiles": [self.side, sizes, self.config.vision_aspect_ratio]}

    def measure(self, image: Any, count: int) -> Grid:
        return int(count == 1), image.height, image.width

    def tiles(self, grid: Grid) -> int:
        """Return the number of tiles of an image."""
        from drumline.vendor.transformers import image_size_to_num_patches

        is_alone, *size = grid
        if not is_alone:
            return 1
        pinpoints = self.config.image_grid_pinpoints
        return int(image_size_to_num_patches(size, pinpoints, self.side))

    def tokens(self, grid: Grid) -> int:
        from transformers import LlavaOnevisionModel

        # The model itself says how many features of the tiles remain.
        features = torch.zeros(self.tiles(grid), self.size, 1)
        model: Any = SimpleNamespace(config=self.config)
        _, counts = LlavaOnevisionModel.pack_image_features(
            model,
            [features],
            torch.tensor([grid[1:]]),
            image_newline=torch.zeros(1),
            vision_aspect_ratio=self.config.vision_aspect_ratio,
        )
        return int(counts[0])

    def process(self, image: Any, grid: Grid) -> tuple[Pixels, Grid]:
        images = [image]
        if not grid[0]:
            # The processor makes one tile of each of several images.
            images = [image, image]
        processed = self.processor([images], return_tensors="np")
        return processed["pixel_values"][0], (grid[0], image.height, image.width)

    @property
    def blank_grid(self) -> Grid:
        return 1, self.side, self.side

    def blank_pixels(self) -> Pixels:
        tiles = self.tiles(self.blank_grid)
        return np.zeros((tiles, 3, self.side, self.side), np.float32)

    def arguments(
        self, pixels: Sequence[Pixels], grids: Sequence[Grid], ids_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        arguments = super().arguments(pixels, grids, ids_BT)
        sizes = [list(grid[1:]) for grid in grids]
        arguments["image_sizes"] = torch.tensor(sizes)
        # The images of each row that has some. Several follow each other, whatever the rows are.
        counts: list[int] = []
        for is_alone, group in groupby(grid[0] for grid in grids):
            images = len(list(group))
            if is_alone:
                counts += [1] * images
            else:
                counts.append(images)
        arguments["batch_num_images"] = torch.tensor(counts)
        return arguments


def _first(sizes: Any) -> Any:
    """Return the first of two sides, or the side of a square."""
    if isinstance(sizes, (list, tuple)):
        return sizes[0]
    return sizes


# model_type → its family. Their images, positions and gradients are tested
# (tests/unit/test_vision.py, test_vision_families.py).
FAMILIES: dict[str, type[Vision]] = {
    "qwen2_vl": QwenVision,
    "qwen2_5_vl": QwenVision,
    "qwen3_vl": QwenVision,
    "qwen3_vl_moe": QwenVision,
    "qwen3_5": QwenVision,
    "qwen3_5_moe": QwenVision,
    "gemma3": GemmaVision,
    "internvl": InternVision,
    "smolvlm": SmolVision,
    "idefics3": SmolVision,
    "llava_onevision": OneVision,
}


def trial_images(config: Any, ids_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return tokens with a small image in each row, and the arguments of a model for the images.

    Args:
        config: transformers' config of a vision-language model.
        ids_BT: int64[B, T]; the tokens of the image are put behind the first one.

    Raises ModelError for a type of model that is not known.
    """
    vision = family_of(config).from_config("", ModelConfig(), config)
    rows = len(ids_BT)
    image_BT = torch.full((rows, vision.blank_size), vision.token_id, device=ids_BT.device)
    with_image_BT = torch.cat((ids_BT[:, :1], image_BT, ids_BT[:, 1:]), 1)
    blank = vision.blank_pixels()
    gradient = np.linspace(-1, 1, rows * blank.size, dtype=np.float32)
    pixels = [each.reshape(blank.shape) for each in np.split(gradient, rows)]
    arguments = vision.arguments(pixels, [vision.blank_grid] * rows, with_image_BT)
    on_device = {name: tensor.to(ids_BT.device) for name, tensor in arguments.items()}
    return with_image_BT, on_device


def family_of(config: Any) -> type[Vision]:
    """Return the family of a vision-language model. Raises ModelError for an unknown type."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        what = f"vision-language models of type {config.model_type} are not known here"
        raise ModelError(what, where="model.id", fix=f"use one of {', '.join(FAMILIES)}")
    return family

"""From image files to pixels, and the vision-language models that are supported.

Such a model turns an image into patches, and each merge × merge of them into one token of the language model, in the place of a
placeholder token. Images go through transformers' image processor with its PIL backend: it needs no torchvision (which the processor of
images, text and video together requires), and the same image gives the same numbers on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.core.config import Config
from drumline.core.model import ModelConfig
from drumline.errors import DataError, ModelError
from drumline.foreign import require_package
from drumline.models.classes import LM, is_vision_language
from drumline.models.files import find_file, from_hub, hub_options
from drumline.models.scores import side_of_model

# The model_types whose images, positions and gradients are tested (tests/unit/test_vision.py).
KNOWN = ("qwen3_vl", "qwen3_vl_moe")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
# Of ImageNet's training images, by channel of RGB in [0, 1]: most published models were trained with these (He et al. 2015 and after).
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224  # the default
Grid = tuple[int, int, int]  # patches in time, height, width


@dataclass(frozen=True)
class Vision:
    """The part of a vision-language model that data needs. `path`: of its image processor; `token_id`: the placeholder's; `merge`: an
    image token stands for merge² patches. Pickles to processes that tokenise."""

    path: str
    model: ModelConfig
    token_id: int
    merge: int
    max_pixels: int | None = None

    @cached_property
    def processor(self) -> Any:
        processor = _processor(self.path, self.model)
        if self.max_pixels is not None:
            # These edges of transformers are areas.
            most, least = (
                min(self.max_pixels, processor.size[key])
                for key in ("longest_edge", "shortest_edge")
            )
            processor.size = type(processor.size)(longest_edge=most, shortest_edge=least)
        return processor

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "processor"}

    @property
    def width(self) -> int:
        """Numbers of a patch: 3 colours × frames × height × width."""
        return int(3 * self.processor.temporal_patch_size * self.processor.patch_size**2)

    def tokens(self, grid: Grid) -> int:
        """Image tokens of a grid of patches."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def grid(self, path: str, origin: str) -> Grid:
        """The grid of patches of an image, which is decoded, so that a damaged one is found before training. Raises DataError that names
        `origin` (a row) and the path."""
        from drumline.vendor.transformers import smart_resize

        image, size, patch = (
            read_image(path, origin),
            self.processor.size,
            self.processor.patch_size,
        )
        try:
            height, width = smart_resize(
                image.height,
                image.width,
                factor=patch * self.processor.merge_size,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise DataError(f"image {path}: {error}", where=origin) from error
        return 1, height // patch, width // patch

    def patches(self, path: str, grid: Grid) -> npt.NDArray[np.float32]:
        """float32[t·h·w, width]: the patches of an image. Raises DataError if its size changed since it was prepared."""
        found = self.processor([read_image(path, "data")], return_tensors="np")
        if tuple(found["image_grid_thw"][0].tolist()) != tuple(grid):
            fix = "put it back, or remove the prepared data (data.cache_dir)"
            raise DataError(
                f"image {path}: it has another size than when it was prepared",
                where="data",
                fix=fix,
            )
        return np.asarray(found["pixel_values"], np.float32)


def vision_of(config: Config, path: str | None, hf_config: Any) -> Vision | None:
    """The Vision of a run's model, which `path` and transformers' config describe; None for one of text or images alone. Raises ModelError
    for a vision-language model of a type that is not KNOWN, and for a folder without an image processor."""
    if config.head not in LM or not is_vision_language(hf_config):
        return None
    if hf_config.model_type not in KNOWN:
        what = f"vision-language models of type {hf_config.model_type} are not known here"
        raise ModelError(what, where="model.id", fix=f"use {' or '.join(KNOWN)}")
    require_pillow(f"model of type {hf_config.model_type}")
    place, sizes = path or config.model.tokenizer, hf_config.vision_config
    assert place is not None, "load_tokenizer has refused this"
    vision = Vision(
        place,
        config.model,
        int(hf_config.image_token_id),
        int(sizes.spatial_merge_size),
        config.data.image_max_pixels,
    )
    processor = vision.processor
    if (processor.patch_size, processor.merge_size) != (sizes.patch_size, vision.merge):
        wanted = f"the model takes {sizes.patch_size} and {vision.merge}"
        what = f"its image processor cuts patches of {processor.patch_size} and merges {processor.merge_size}, {wanted}"
        raise ModelError(
            what, where=place, fix="use the preprocessor_config.json that belongs to the model"
        )
    return vision


def read_image(path: str, origin: str) -> Any:
    """An image from a file, as `in_colour` makes it. Raises DataError that names `origin` and the path."""
    from PIL import Image

    try:
        with Image.open(Path(path)) as image:
            return in_colour(image)
    except (
        Exception
    ) as error:  # decoders of strangers' files raise anything (struct.error, SyntaxError, bombs)
        reason = (
            "no such file"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read: {str(error) or type(error).__name__}"
        )
        fix = (
            "paths are relative to the folder of the data file"
            if isinstance(error, FileNotFoundError)
            else "mend it or take the row out"
        )
        raise DataError(f"image {path}: {reason}", where=origin, fix=fix) from error


def in_colour(image: Any) -> Any:
    """A picture of Pillow upright, in RGB, of 16 bits the upper eight, over white where it is transparent. Raises ValueError for numbers of
    which nobody knows how large white is."""
    from PIL import Image, ImageOps

    wide = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
    if image.mode in ("I", "F") and not wide:
        raise ValueError(
            "its numbers of 32 bits have no fixed range: save it with 8 bits a channel"
        )
    image = ImageOps.exif_transpose(image)
    if wide:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def load_processor(path: str | None, model: ModelConfig, config: Any, side: int | None) -> Any:
    """transformers' image processor of the model; without one in its files, one that scales to a square and normalises by ImageNet's
    colours. `config`: the model's. `side`: pixels of the square; None: the processor's, else the model's, else 224."""
    if path is not None and find_file(path, PROCESSOR_FILES[0], model) is not None:
        processor = _processor(path, model)
        for name in ("size", "crop_size") if side is not None else ():
            if (
                size := getattr(processor, name, None)
            ) is not None:  # height and width, or the shorter edge that is then cropped
                setattr(
                    processor,
                    name,
                    {key: side for key, value in dict(size).items() if value is not None},
                )
        return processor
    from transformers import ViTImageProcessorPil

    side = side or side_of_model(config) or SIDE
    channels = int(getattr(config, "num_channels", 3))
    mean, std = (MEAN, STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    return ViTImageProcessorPil(
        size={"height": side, "width": side}, image_mean=list(mean), image_std=list(std)
    )


def side_of(processor: Any, channels: int) -> int:
    """Pixels of the square that a processor makes, found by trying. Raises ModelError where it makes none."""
    from PIL import Image

    shape = pixels(processor, [Image.new("RGB", (64, 48))], channels).shape
    if shape[2] != shape[3]:
        what = f"its image processor makes {shape[3]} × {shape[2]} pixels of 64 × 48, and images of a batch are squares here"
        raise ModelError(
            what,
            where="model",
            fix="set algorithm.image_size, or size to a height and width in preprocessor_config.json",
        )
    return int(shape[3])


def pixels(processor: Any, images: list[Any], channels: int) -> Any:
    """numpy float32[B, C, H, W] of PIL images."""
    return processor(
        [image.convert("RGB" if channels == 3 else "L") for image in images], return_tensors="np"
    )["pixel_values"]


def require_pillow(where: str = "algorithm.modality image") -> None:
    """Raises EnvironmentFault where it is missing."""
    require_package("PIL", where, "pip install pillow scikit-learn")


def _processor(path: str, model: ModelConfig) -> Any:
    from transformers import AutoImageProcessor

    return from_hub(
        path,
        model,
        lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **hub_options(path, model)),
    )


def image_side(config: Config, model_path: str | None, hf_config: Any) -> int:
    """Pixels of the square images of the model's input."""
    require_pillow()
    processor = load_processor(
        model_path, config.model, hf_config, getattr(config.algorithm, "image_size", None)
    )
    return side_of(processor, int(getattr(hf_config, "num_channels", 3)))

"""From image files to pixels, and the vision-language models that are supported.

Such a model turns an image into patches, and each merge × merge of them into one token of the
language model, which replaces a placeholder token. Images go through transformers' image processor
with its PIL backend: it needs no torchvision (which the processor of images, text and video
together requires), and the same image gives the same numbers on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.config.config import Config
from drumline.config.model import ModelConfig
from drumline.errors import DataError, ModelError
from drumline.foreign import require_package
from drumline.models.classes import LM, is_vision_language
from drumline.models.files import call_loader, find_file, hub_options
from drumline.models.scores import side_of_model

# The model_types whose images, positions and gradients are tested (tests/unit/test_vision.py).
KNOWN = ("qwen3_vl", "qwen3_vl_moe")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
# Mean and deviation of ImageNet's training images, by channel of RGB in [0, 1]: most published
# models were trained with these (He et al. 2015 and after).
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# Pixels of the side of an image if neither processor nor model sets it.
SIDE = 224
# Patches in time, height and width.
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Vision:
    """The part of a vision-language model that data needs.

    It can be pickled to processes that tokenise. `path`: of its image processor. `token_id`: the
    placeholder's. `merge`: an image token stands for merge² patches. `max_pixels`: a larger image is
    made smaller; None: the processor's own limit.
    """

    path: str
    model: ModelConfig
    token_id: int
    merge: int
    max_pixels: int | None = None

    @cached_property
    def processor(self) -> Any:
        """transformers' image processor, which makes images of `max_pixels` at most."""
        processor = _processor(self.path, self.model)
        if self.max_pixels is not None:
            # These edges of transformers are areas.
            largest = min(self.max_pixels, processor.size["longest_edge"])
            smallest = min(self.max_pixels, processor.size["shortest_edge"])
            size_type = type(processor.size)
            processor.size = size_type(longest_edge=largest, shortest_edge=smallest)
        return processor

    def __getstate__(self) -> dict[str, Any]:
        # Each process makes a processor of its own.
        return {key: value for key, value in self.__dict__.items() if key != "processor"}

    @property
    def width(self) -> int:
        """Numbers of a patch: 3 colours × frames × height × width."""
        processor = self.processor
        return int(3 * processor.temporal_patch_size * processor.patch_size**2)

    def tokens(self, grid: Grid) -> int:
        """Return the number of image tokens of a grid of patches."""
        frames, height, width = grid
        return frames * height * width // self.merge**2

    def grid(self, path: str, origin: str) -> Grid:
        """Return the grid of patches of an image.

        The image is decoded, so that a damaged one is found before training. Raises DataError that
        names `origin` (a row) and the path.
        """
        from drumline.vendor.transformers import smart_resize

        image = read_image(path, origin)
        size = self.processor.size
        patch = self.processor.patch_size
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
        """Return the patches of an image, float32[t·h·w, width].

        Raises DataError if its size has changed since it was prepared.
        """
        processed = self.processor([read_image(path, "data")], return_tensors="np")
        grid_now = tuple(processed["image_grid_thw"][0].tolist())
        if grid_now != tuple(grid):
            what = f"image {path}: it has another size than when it was prepared"
            fix = "put it back, or remove the prepared data (data.cache_dir)"
            raise DataError(what, where="data", fix=fix)
        return np.asarray(processed["pixel_values"], np.float32)


def vision_of(config: Config, path: str | None, hf_config: Any) -> Vision | None:
    """Return the Vision of a run's model; None for a model of only text or only images.

    `path`, `hf_config`: its folder or hub id, and transformers' config.
    Raises ModelError for a vision-language model of a type that is not KNOWN, and for a folder
    without an image processor.
    """
    if config.head not in LM or not is_vision_language(hf_config):
        return None
    if hf_config.model_type not in KNOWN:
        what = f"vision-language models of type {hf_config.model_type} are not known here"
        raise ModelError(what, where="model.id", fix=f"use {' or '.join(KNOWN)}")
    require_pillow(f"model of type {hf_config.model_type}")
    source = path or config.model.tokenizer
    assert source is not None, "load_tokenizer has refused this"
    sizes = hf_config.vision_config
    vision = Vision(
        path=source,
        model=config.model,
        token_id=int(hf_config.image_token_id),
        merge=int(sizes.spatial_merge_size),
        max_pixels=config.data.image_max_pixels,
    )
    processor = vision.processor
    if (processor.patch_size, processor.merge_size) != (sizes.patch_size, vision.merge):
        what = (
            f"its image processor cuts patches of {processor.patch_size}"
            f" and merges {processor.merge_size},"
            f" the model takes {sizes.patch_size} and {vision.merge}"
        )
        fix = "use the preprocessor_config.json that belongs to the model"
        raise ModelError(what, where=source, fix=fix)
    return vision


def read_image(path: str, origin: str) -> Any:
    """Return an image from a file, as `in_colour` makes it.

    Raises DataError that names `origin` (a row) and the path.
    """
    from PIL import Image

    try:
        with Image.open(Path(path)) as image:
            return in_colour(image)
    except FileNotFoundError as error:
        fix = "paths are relative to the folder of the data file"
        raise DataError(f"image {path}: no such file", where=origin, fix=fix) from error
    # Decoders of strangers' files raise anything (struct.error, SyntaxError, bombs).
    except Exception as error:
        reason = str(error) or type(error).__name__
        what = f"image {path}: cannot be read: {reason}"
        raise DataError(what, where=origin, fix="fix it or take the row out") from error


def in_colour(image: Any) -> Any:
    """Return a picture of Pillow upright and in RGB.

    Of 16 bits the upper eight are taken, and white is behind transparent parts. Raises ValueError
    for numbers of 32 bits, for which nobody knows how large white is.
    """
    from PIL import Image, ImageOps

    has_16_bits = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
    if image.mode in ("I", "F") and not has_16_bits:
        raise ValueError(
            "its numbers of 32 bits have no fixed range: save it with 8 bits a channel"
        )
    image = ImageOps.exif_transpose(image)
    if has_16_bits:
        upper_bits = np.asarray(image) >> 8
        image = Image.fromarray(upper_bits.astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def load_processor(path: str | None, model: ModelConfig, config: Any, side: int | None) -> Any:
    """Return transformers' image processor of the model.

    Without one in its files, it is one that scales to a square and normalises by ImageNet's
    colours.
    `config`: the model's. `side`: pixels of the square; None: the processor's, else the model's,
    else 224.
    """
    if path is not None and find_file(path, PROCESSOR_FILES[0], model) is not None:
        processor = _processor(path, model)
        if side is not None:
            _set_side(processor, side)
        return processor
    from transformers import ViTImageProcessorPil

    pixels_of_side = side or side_of_model(config) or SIDE
    channels = int(getattr(config, "num_channels", 3))
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    if channels != 3:
        mean = (0.5,) * channels
        std = (0.5,) * channels
    return ViTImageProcessorPil(
        size={"height": pixels_of_side, "width": pixels_of_side},
        image_mean=list(mean),
        image_std=list(std),
    )


def _set_side(processor: Any, side: int) -> None:
    """Make a processor scale and crop to squares of `side` pixels."""
    for name in ("size", "crop_size"):
        size = getattr(processor, name, None)
        if size is not None:
            # Height and width, or the shorter edge that is then cropped.
            edges = [key for key, value in dict(size).items() if value is not None]
            setattr(processor, name, dict.fromkeys(edges, side))


def side_of(processor: Any, channels: int) -> int:
    """Return the pixels of the side of the square that a processor makes.

    It is found by trying an image that is no square. Raises ModelError if the result is none
    either.
    `channels`: of the model's input, 3 or 1.
    """
    from PIL import Image

    sample = Image.new("RGB", (64, 48))
    _, _, height, width = pixels(processor, [sample], channels).shape
    if height != width:
        what = (
            f"its image processor makes {width} × {height} pixels of 64 × 48,"
            " and images of a batch are squares here"
        )
        fix = "set algorithm.image_size, or size to a height and width in preprocessor_config.json"
        raise ModelError(what, where="model", fix=fix)
    return int(width)


def pixels(processor: Any, images: list[Any], channels: int) -> Any:
    """Return the pixels of images of Pillow, numpy float32[B, C, H, W]."""
    mode = "L"
    if channels == 3:
        mode = "RGB"
    converted = [image.convert(mode) for image in images]
    return processor(converted, return_tensors="np")["pixel_values"]


def require_pillow(where: str = "algorithm.modality image") -> None:
    """Raise EnvironmentFault if Pillow is not installed."""
    require_package("PIL", where, "pip install pillow scikit-learn")


def _processor(path: str, model: ModelConfig) -> Any:
    """Return transformers' image processor in a folder or of a hub id."""
    from transformers import AutoImageProcessor

    def read() -> Any:
        options = hub_options(path, model)
        return AutoImageProcessor.from_pretrained(path, backend="pil", **options)

    return call_loader(path, model, read)


def image_side(config: Config, model_path: str | None, hf_config: Any) -> int:
    """Return the pixels of the side of the square images of the model's input."""
    require_pillow()
    image_size = getattr(config.algorithm, "image_size", None)
    processor = load_processor(model_path, config.model, hf_config, image_size)
    return side_of(processor, int(getattr(hf_config, "num_channels", 3)))

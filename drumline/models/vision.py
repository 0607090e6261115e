"""The images of a run's model: how a vision-language model reads them, and a classifier's pixels."""

from __future__ import annotations

from typing import Any

from drumline.config.config import Config
from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.classes import SEEING, is_text_alone, is_vision_language
from drumline.models.files import find_file
from drumline.models.image_tokens import Vision, family_of
from drumline.models.pictures import load_image_processor, require_pillow
from drumline.models.scores import side_of_model
from drumline.plan.rules import NO_PACKING

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


def vision_of(config: Config, path: str | None, hf_config: Any) -> Vision | None:
    """Return the Vision of a run's model; None for a model of only text or only images.

    `path`, `hf_config`: its folder or hub id, and transformers' config. None also for a
    vision-language model whose images are not read here.
    Raises ModelError for a folder without an image processor, and PlanError for packed rows of a family that cannot pack.
    """
    if config.head not in SEEING or not is_vision_language(hf_config):
        return None
    if is_text_alone(hf_config):
        return None
    family = family_of(hf_config)
    require_pillow(f"model of type {hf_config.model_type}")
    source = path or config.model.tokenizer
    assert source is not None, "load_tokenizer has refused this"
    vision = family.from_config(source, config.model, hf_config, config.data.image_max_pixels)
    if config.packs and vision.unpacked:
        raise NO_PACKING.error(vision.unpacked)
    vision.check_processor(hf_config)
    return vision


def load_processor(path: str | None, model: ModelConfig, config: Any, side: int | None) -> Any:
    """Return transformers' image processor of the model.

    Without one in its files, it is one that scales to a square and normalises by ImageNet's
    colours.
    `config`: the model's. `side`: pixels of the square; None: the processor's, else the model's,
    else 224.
    """
    if path is not None and find_file(path, PROCESSOR_FILES[0], model) is not None:
        processor = load_image_processor(path, model)
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


def image_side(config: Config, model_path: str | None, hf_config: Any) -> int:
    """Return the pixels of the side of the square images of the model's input."""
    require_pillow()
    image_size = getattr(config.algorithm, "image_size", None)
    processor = load_processor(model_path, config.model, hf_config, image_size)
    return side_of(processor, int(getattr(hf_config, "num_channels", 3)))

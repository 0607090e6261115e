"""From image files to pixels, by transformers' PIL-backed processors (no torchvision): the model's own, or a plain one."""

from __future__ import annotations

from typing import Any

from drumline.config.model import ModelConfig
from drumline.errors import EnvironmentFault
from drumline.models.classifier import side_of_model
from drumline.models.load import from_hub, hub_options

CONFIG = "preprocessor_config.json"
# Of ImageNet's training images, by channel of RGB in [0, 1]: what most published models were trained with (He et al. 2015 and after).
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224  # where nothing says another


def load_processor(path: str | None, model: ModelConfig, config: Any, side: int | None) -> Any:
    """transformers' image processor of the model, or where it brings none one that scales to a square and normalises by ImageNet's
    colours. `config`: the model's. `side`: pixels of the square; None: what the processor says, or the model, or 224."""
    from transformers import AutoImageProcessor

    if path is not None and _brings_one(path, model):
        processor = from_hub(path, model, lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **hub_options(path, model)))
        return processor if side is None else _resized(processor, side)
    from transformers import ViTImageProcessorPil

    side = side or side_of_model(config) or SIDE
    channels = int(getattr(config, "num_channels", 3))
    mean, std = (MEAN, STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    return ViTImageProcessorPil(size={"height": side, "width": side}, image_mean=list(mean), image_std=list(std))


def side_of(processor: Any, channels: int) -> int:
    """Pixels of the square that it makes, found by trying."""
    from PIL import Image

    shape = pixels(processor, [Image.new("RGB", (64, 48))], channels).shape
    assert shape[2] == shape[3], shape
    return int(shape[3])


def pixels(processor: Any, images: list[Any], channels: int) -> Any:
    """numpy float32[B, C, H, W] of PIL images."""
    return processor([image.convert("RGB" if channels == 3 else "L") for image in images], return_tensors="np")["pixel_values"]


def require_pillow(where: str = "algorithm.modality image") -> None:
    """Raises EnvironmentFault where it is missing."""
    import importlib.util

    if importlib.util.find_spec("PIL") is None:
        raise EnvironmentFault("the package pillow is missing", where=where, fix="pip install pillow scikit-learn")


def _brings_one(path: str, model: ModelConfig) -> bool:
    from drumline.vendor.transformers import cached_file

    options = {key: value for key, value in hub_options(path, model).items() if key != "trust_remote_code"}
    return cached_file(path, CONFIG, _raise_exceptions_for_missing_entries=False, **options) is not None


def _resized(processor: Any, side: int) -> Any:
    """The processor, told another size in its own words (height and width, or the shorter edge that is then cropped)."""
    for name in ("size", "crop_size"):
        size = getattr(processor, name, None)
        if size is not None:
            setattr(processor, name, {key: side for key, value in dict(size).items() if value is not None})
    return processor

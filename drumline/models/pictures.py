"""Reads image files as pictures in RGB, and a model's image processor.

Images go through transformers' image processor with its PIL backend: it needs no torchvision (which
the processor of images, text and video together requires), and the same image gives the same
numbers on every machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drumline.config.model import ModelConfig
from drumline.errors import DataError
from drumline.foreign import require_package
from drumline.models.files import call_loader, hub_options


def read_image(path: str, origin: str) -> Any:
    """Return an image from a file, as `to_upright_rgb` makes it.

    Raises DataError that names `origin` (a row) and the path.
    """
    from PIL import Image

    try:
        with Image.open(Path(path)) as image:
            return to_upright_rgb(image)
    except FileNotFoundError as error:
        fix = "paths are relative to the folder of the data file"
        raise DataError(f"image {path}: no such file", where=origin, fix=fix) from error
    # Decoders of strangers' files raise anything (struct.error, SyntaxError, bombs).
    except Exception as error:
        reason = str(error) or type(error).__name__
        what = f"image {path}: cannot be read: {reason}"
        raise DataError(what, where=origin, fix="fix it or take the row out") from error


def to_upright_rgb(image: Any) -> Any:
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


def require_pillow(where: str = "algorithm.modality image") -> None:
    """Raise EnvironmentFault if Pillow is not installed."""
    require_package("PIL", where, "pip install pillow scikit-learn")


def load_image_processor(path: str, model: ModelConfig) -> Any:
    """Return transformers' image processor in a folder or of a hub id."""
    from transformers import AutoImageProcessor

    def read() -> Any:
        options = hub_options(path, model)
        return AutoImageProcessor.from_pretrained(path, backend="pil", **options)

    return call_loader(path, model, read)

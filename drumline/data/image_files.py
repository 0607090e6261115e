"""The image files of samples: writes images that are no files yet, and lists a sample's paths.

The token cache keeps only paths of images. Rows may hold the bytes of an image instead, and
scikit-learn's digits come as arrays.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.config.data import DigitsSource
from drumline.data.files import Raw
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import disk_errors, translate_exceptions
from drumline.hardware.detect import cache_dir
from drumline.system.files import whole_file

IMAGES = "images"  # the folder, below that of the token caches, of images that rows hold
DIGITS = "digits"  # the folder, below Drumline's cache, of images that come with scikit-learn
# Key of a sample's meta: the state of each video that its frames come from, see `data.image_rows`.
VIDEO_FILES = "video_files"
TEST_DIGITS = 360  # the last images are the test split
BRIGHTEST = 16  # of scikit-learn's grey values


def resolve_image_path(image: Any, origin: str, root: Path) -> str:
    """Return the path of an image, which is written to a file first if the row holds its bytes.

    Such a file is in `root`/images. A path that the row names is returned as it is.

    Args:
        image: a path, a table's `{bytes, path}`, a data URL, or a picture that Pillow has read.
        origin: the row's name in an error.
        root: the folder of the token caches.

    Raises DataError for a value that is no image, and EnvironmentFault if the file cannot be
    written.
    """
    image = _path_or_bytes(image, origin)
    if isinstance(image, bytes):
        return _store_image(image, root)
    if not isinstance(image, str) or not image:
        kind = type(image).__name__
        if image == "":
            kind = "an empty text"
        raise DataError(
            f"an image is given as {kind}, neither as a path nor as its bytes", where=origin
        )
    refuse_url(image, "an image", origin)
    return image


def refuse_url(path: str, what: str, origin: str) -> None:
    """Raise DataError for a URL. `what`: what it should be a path of, such as "an image"."""
    if "://" in path:
        # Without its query, which may have a key.
        address, _, _ = path.partition("?")
        raise DataError(
            f"{what} is a URL, not a path: {address[:60]}",
            where=origin,
            fix="download it and name the file",
        )


def _path_or_bytes(image: Any, origin: str) -> Any:
    """Return the path or the bytes of an image; the same value if it is neither. Raises DataError."""
    if isinstance(image, Mapping):
        for key in ("bytes", "url", "path"):
            if image.get(key) is not None:
                image = image[key]
                break
    if isinstance(image, str) and image.startswith("data:"):
        text = image.partition(";base64,")[2]
        with translate_exceptions("is no data URL of base64", origin, DataError):
            return base64.b64decode(text, validate=True)
    if hasattr(image, "convert") and hasattr(image, "save"):
        from drumline.models.pictures import to_upright_rgb

        buffer = io.BytesIO()
        with translate_exceptions(
            "an image cannot be read", origin, DataError, "fix it or take the row out"
        ):
            to_upright_rgb(image).save(buffer, format="png")
        return buffer.getvalue()
    return image


def _store_image(data: bytes, root: Path) -> str:
    """Write the bytes of an image to a file, unless it is there. Raises EnvironmentFault."""
    # Named by its content: copies of an image are one file, whichever rows hold them.
    path = root / IMAGES / hashlib.sha256(data).hexdigest()
    with disk_errors("cannot be written", str(path), EnvironmentFault, "set data.cache_dir"):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, shared=True) as file:
                file.write(data)
    return str(path)


def image_paths_in_meta(meta: dict[str, Any]) -> list[str]:
    """Return the paths of a sample's images by its meta."""
    # Of a conversation.
    paths = list(meta.get("images", ()))
    # Of an image classifier.
    if "path" in meta:
        paths.append(meta["path"])
    return paths


def read_digits(source: DigitsSource) -> Iterator[Raw]:
    """Yield the rows of a split: real images of 8 × 8 pixels that come with a package.

    They are written once to the cache folder as PNG files. Raises EnvironmentFault if scikit-learn
    or Pillow is missing, or if the folder cannot be written.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where="data source of kind digits", fix="pip install pillow scikit-learn"
        ) from error
    digits = load_digits()
    count = len(digits.target)
    splits = {
        "train": range(count - TEST_DIGITS),
        "test": range(count - TEST_DIGITS, count),
        "all": range(count),
    }
    folder = cache_dir() / DIGITS
    with disk_errors("cannot be written", str(folder), EnvironmentFault, "set XDG_CACHE_HOME"):
        folder.mkdir(parents=True, exist_ok=True)
        for number in splits[source.split]:
            path = folder / f"{number:04}.png"
            if not path.exists():
                grey = (digits.images[number] * (255 / BRIGHTEST)).astype("uint8")
                with whole_file(path, shared=True) as file:
                    Image.fromarray(grey).save(file, format="png")
            row = {"image": str(path), "label": int(digits.target[number])}
            yield f"digits/{source.split}:{number}", row

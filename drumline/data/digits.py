"""scikit-learn's handwritten digits as rows of the form (image, label): real images that come with a package."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.data import DigitsSource
from drumline.core.files import whole_file
from drumline.data.files import Raw
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import cache_dir

TEST = 360  # the last ones


def read_digits(source: DigitsSource) -> Iterator[Raw]:
    """Rows of a split. The images are written as PNG files of 8 × 8 pixels, once, to the cache folder.

    Raises EnvironmentFault where scikit-learn or Pillow is missing, or the folder cannot be written.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentFault(f"{error}", where="data source of kind digits", fix="pip install pillow scikit-learn") from error
    digits = load_digits()
    count = len(digits.target)
    numbers = {"train": range(count - TEST), "test": range(count - TEST, count), "all": range(count)}[source.split]
    folder = cache_dir() / "digits"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            path = folder / f"{number:04}.png"
            if not path.exists():
                grey = (digits.images[number] * (255 / 16)).astype("uint8")
                with whole_file(path, shared=True) as file:
                    Image.fromarray(grey).save(file, format="png")
            yield f"digits/{source.split}:{number}", {"image": str(path), "label": int(digits.target[number])}
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(folder), fix="set XDG_CACHE_HOME") from error

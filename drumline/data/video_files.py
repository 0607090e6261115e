"""The frames of a video: a list of images, a folder of images, or a file that is decoded.

A model gets the frames as images, one after another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drumline.data.image_files import refuse_url, resolve_image_path
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import expand_home, translate_exceptions
from drumline.system.files import json_digest

# Endings of files in a folder that are its frames.
FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def find_frames(video: Any, folder: Path, most: int, origin: str, root: Path) -> list[str]:
    """Return absolute paths of the frames of a video, `most` at equal distances.

    Args:
        video: a list of images, or the path of a folder of images or of a video file.
        folder: the folder that paths are relative to.
        most: the most frames that are taken.
        origin: the row's name in an error.
        root: the folder below which frames are written that are no files yet.

    Raises DataError for a video without frames, or that is no video, and EnvironmentFault if the
    package that decodes files is missing.
    """
    if isinstance(video, list | tuple):
        frames = list(video)
    elif isinstance(video, str) and video:
        refuse_url(video, "a video", origin)
        path = (folder / expand_home(video)).absolute()
        if path.is_file():
            return _decode(path, most, origin, root)
        frames = _list_frames(path, origin)
    else:
        what = f"a video is given as {type(video).__name__}, neither as a path nor as its frames"
        raise DataError(what, where=origin)
    if not frames:
        raise DataError("a video has no frames", where=origin, fix="take the row out")
    paths = []
    for index in choose_frames(len(frames), most):
        path_of_frame = expand_home(resolve_image_path(frames[index], origin, root))
        paths.append(str((folder / path_of_frame).absolute()))
    return paths


def video_state(path: Path) -> str:
    """Return what changes if a video does: the size and the time of a file, the names in a folder.

    The frames of a file are written as images when a row is prepared, and for a folder its frames
    are chosen then. Images in a folder are read for each batch, so their content does not count.
    A path that is neither has an empty state.
    """
    if path.is_file():
        stat = path.stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"
    if path.is_dir():
        return json_digest(_frame_names(path))
    return ""


def choose_frames(count: int, most: int) -> list[int]:
    """Return the indices of `most` of `count` frames at equal distances, the first and last too."""
    wanted = min(count, most)
    if wanted == 1:
        return [0]
    places = np.linspace(0, count - 1, wanted)
    return [int(place) for place in places.round()]


def _list_frames(path: Path, origin: str) -> list[str]:
    """Return the images in a folder, in the order of the numbers in their names."""
    if not path.is_dir():
        fix = "paths are relative to the folder of the data file"
        raise DataError(f"video {path}: no such file or folder", where=origin, fix=fix)
    return [str(path / name) for name in _frame_names(path)]


def _frame_names(folder: Path) -> list[str]:
    """Return the names of the images in a folder, in the order of the numbers in them."""
    names = [each.name for each in folder.iterdir() if each.suffix.lower() in FRAMES]
    names.sort(key=_natural_sort_key)
    return names


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as people do: frame9 comes before frame10."""
    key = []
    for piece in re.split(r"(\d+)", name):
        is_number = piece.isdecimal()
        number = int(piece) if is_number else 0
        key.append((is_number, number, piece))
    return key


def _decode(path: Path, most: int, origin: str, root: Path) -> list[str]:
    """Return the paths of frames of a video file, which are written as images."""
    try:
        import av
    except ImportError as error:
        what = f"video {path}: its frames are decoded by the package av, which is missing"
        fix = "pip install av, or give the frames as images in a list or a folder"
        raise EnvironmentFault(what, where=origin, fix=fix) from error
    pictures = []
    with translate_exceptions(f"video {path}: cannot be read", origin, DataError):
        # Files may say a wrong number of frames, so they are counted.
        with av.open(str(path)) as container:
            count = sum(1 for _ in container.decode(video=0))
        chosen = set(choose_frames(count, most)) if count else set()
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in chosen:
                    pictures.append(frame.to_image())
    if not pictures:
        raise DataError(f"video {path}: it has no frames", where=origin, fix="take the row out")
    return _store(pictures, origin, root)


def _store(pictures: Sequence[Any], origin: str, root: Path) -> list[str]:
    """Write pictures of Pillow to files, and return their absolute paths."""
    return [str(Path(resolve_image_path(each, origin, root)).absolute()) for each in pictures]

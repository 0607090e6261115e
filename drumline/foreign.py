"""Reads all files that users or other tools wrote: regular files of bounded size.

A mistake in one is an error of one line. A device, a pipe or a folder is refused at once. JSON has
at most `MOST_DEPTH` levels and no lone surrogates, which UTF-8 cannot encode. With `numbers`, it
has no whole numbers of more than 64 bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import stat
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from drumline.errors import DrumlineError, EnvironmentFault, UserError

MIB = 2**20
# Bytes of a file that is read at once. The largest tokenizers have 40 MB.
MOST_BYTES = 64 * MIB
MOST_DEPTH = 100
# Whole numbers must be smaller: torch, NumPy and safetensors use 64 bits.
MOST_WHOLE = 2**63
# Bytes of a path and of a name in it, by the limits of Linux.
MOST_PATH = 4095
MOST_NAME = 255
PICKLE = "a pickle with more than tensors in it, which could run code"
ErrorType = type[UserError]
# Folders of code that is not the user's: Drumline, Python, and installed packages.
_NOT_USERS = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
_PACKAGES = {"site-packages", "dist-packages"}
# Errors whose message alone is vague, such as KeyError's, which is only a key.
_VAGUE_ERRORS = (
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
# A JSON text without these needs no further check.
_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]|\d{19}")


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dictionaries and lists with `change` applied to all other values."""
    if isinstance(value, dict):
        return {key: map_leaves(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_leaves(inner, change) for inner in value]
    return change(value)


def path_mistake(path: str) -> str | None:
    """Return why a path or model id is impossible; None if it is possible."""
    if "\0" in path:
        return "a path cannot hold a NUL character"
    try:
        size = len(os.fsencode(path))
        largest_name = max(len(os.fsencode(name)) for name in path.split("/"))
    except UnicodeEncodeError:
        return "a path cannot hold a lone surrogate"
    if size > MOST_PATH or largest_name > MOST_NAME:
        return f"a path or id of {len(path)} characters is too long: names have up to {MOST_NAME} bytes, paths {MOST_PATH}"
    return None


def expand_home(path: str) -> Path:
    """Return a path with the home folder in place of `~` or `~user`, if there is such a user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises for such a user


def import_quietly(package: str) -> Any:
    """Import a package without warnings about the syntax of its code.

    Python shows such warnings when it compiles a module, at the first import.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module(package)


class _PlainFile(FileIO):
    """A regular file. A failing read raises `error_type`, whichever library reads."""

    def __init__(self, handle: int, name: str, error_type: ErrorType, fix: str | None) -> None:
        super().__init__(handle)
        self._failure = partial(disk_errors, "cannot be read", name, error_type, fix)

    def readinto(self, buffer: Any, /) -> int | None:
        with self._failure():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._failure():
            return super().readall()


def open_plain(path: Path, error_type: ErrorType, fix: str | None = None) -> BufferedReader:
    """Open a regular file for reading bytes. Links are followed.

    Raises `error_type`, now or in a later read.
    """
    mistake = path_mistake(str(path))
    if mistake:
        raise error_type(mistake, where=str(path), fix="shorten it")
    try:
        # Non-blocking: opening a named pipe must not wait.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error_type("no such file", where=str(path), fix=fix) from None
    except OSError as error:
        raise error_type(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"
        raise error_type(f"cannot be read: it is {kind}, not a file", where=str(path), fix=fix)
    return BufferedReader(_PlainFile(handle, str(path), error_type, fix), MIB // 8)


def read_bytes(
    path: Path, error_type: ErrorType, fix: str | None = None, most: int = MOST_BYTES
) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises `error_type`."""
    with open_plain(path, error_type, fix) as file:
        # Python allocates as much as `read` is given, so it is not given `most` for a small file.
        # The file may be larger than it says, and one byte more than `most` shows that it is too
        # large.
        expected = max(os.fstat(file.fileno()).st_size, MIB)
        content = file.read(min(most, expected) + 1)
    if len(content) > most:
        raise error_type(f"larger than {most // MIB} MiB", where=str(path), fix=fix)
    return content


def read_text(
    path: Path, error_type: ErrorType, fix: str | None = None, most: int = MOST_BYTES
) -> str:
    """Return the text of a regular file in UTF-8.

    Raises `error_type`, with the line if there is one.
    """
    content = read_bytes(path, error_type, fix, most)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise error_type(
            "not UTF-8 text", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from None


def read_object(
    path: Path,
    error_type: ErrorType,
    fix: str | None = None,
    *,
    numbers: bool = True,
    once: bool = False,
) -> dict[str, Any]:
    """Return the object of a JSON file. Raises `error_type`, with the line if there is one.

    `numbers`, `once`: as of `parse_json`.
    """
    text = read_text(path, error_type, fix)
    value = parse_json(text, str(path), error_type, lines=True, numbers=numbers, once=once)
    if not isinstance(value, dict):
        raise error_type(
            "holds no keys and values", where=str(path), fix=fix or "it is one JSON object"
        )
    return value


def parse_json(
    text: str,
    where: str,
    error_type: ErrorType,
    *,
    lines: bool = False,
    numbers: bool = False,
    once: bool = False,
    fix: str | None = None,
) -> Any:
    """Return the value of a JSON text. Raises `error_type`.

    `lines`: `where` is a file, and the error names the line.
    `numbers`: whole numbers must fit into 64 bits.
    `once`: a repeated key is an error, because readers disagree on which of its values to keep.
    """

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated = next(key for key, count in counts.items() if count > 1)
            raise error_type(
                f"names the key {repeated!r} twice", where=where, fix="keep one of them"
            )
        return value

    try:
        value = json.loads(text, object_pairs_hook=make_object if once else None)
    except json.JSONDecodeError as error:
        place = where
        if lines:
            place = f"{where}:{error.lineno}"
            fix = fix or "fix that line"
        # Some of json's messages end in "at" already.
        reason = error.msg.removesuffix(" at")
        what = f"not JSON: {reason} at column {error.colno}"
        raise error_type(what, where=place, fix=fix) from None
    except RecursionError:
        raise error_type("not JSON: nested too deep", where=where, fix=fix) from None
    except DrumlineError:
        raise
    except ValueError:  # Python refuses whole numbers of more than 4,300 digits
        raise error_type(
            "not JSON: it holds a number of thousands of digits", where=where
        ) from None
    may_be_deep = text.count("[") + text.count("{") > MOST_DEPTH
    if may_be_deep or _SUSPECT.search(text):
        _check(value, where, error_type, numbers)
    return value


def _check(value: Any, where: str, error_type: ErrorType, numbers: bool) -> None:
    """Raise `error_type` for too deep values, lone surrogates and, with `numbers`, too large ones."""
    unchecked = [(value, 1)]
    while unchecked:
        part, depth = unchecked.pop()
        if depth > MOST_DEPTH:
            raise error_type("not JSON: nested too deep", where=where)
        if isinstance(part, dict):
            for key, inner in part.items():
                unchecked += [(key, depth + 1), (inner, depth + 1)]
        elif isinstance(part, list):
            unchecked += [(inner, depth + 1) for inner in part]
        elif isinstance(part, str):
            mistake = text_mistake(part)
            if mistake:
                raise error_type(mistake, where=where)
        elif numbers and isinstance(part, int) and abs(part) >= MOST_WHOLE:
            raise error_type("holds a whole number of more than 64 bits", where=where)


def text_mistake(text: str) -> str | None:
    """Return why a string is not valid text; None if it is."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "holds a lone surrogate, which is no text"
    return None


@contextmanager
def translate_exceptions(
    what: str, where: str, error_type: ErrorType, fix: str | None = None
) -> Iterator[None]:
    """Turn any exception of a library about foreign content into an `error_type` of one line.

    The line begins with `what`.
    """
    try:
        yield
    except (DrumlineError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # Bad values can raise anything, and libraries in Rust panic with a BaseException.
    except BaseException as error:
        raise error_type(f"{what}: {first_line(error)}", where=where, fix=fix) from error


def require_package(module: str, where: str, fix: str | None = None) -> None:
    """Raise EnvironmentFault if a module cannot be imported. Nothing is imported."""
    package = {"PIL": "pillow"}.get(module, module.replace("_", "-"))
    if importlib.util.find_spec(module) is None:
        raise EnvironmentFault(
            f"the package {package} is missing", where=where, fix=fix or f"pip install {package}"
        )


@contextmanager
def translate_number_errors(where: str, error_type: ErrorType) -> Iterator[None]:
    """Turn a foreign number that is too large for a conversion into an `error_type` of one line."""
    try:
        yield
    except OverflowError as error:
        what = f"holds a number that is too large: {first_line(error)}"
        raise error_type(
            what, where=where, fix="write a smaller number, or take the row out"
        ) from error


@contextmanager
def disk_errors(
    what: str, where: str, error_type: type[DrumlineError], fix: str | None = None
) -> Iterator[None]:
    """Turn an OSError of a read or write into an `error_type` of one line that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{what}: {error.strerror or error}", where=where, fix=fix) from error


def content_of(value: Any) -> Any:
    """Return what stands for a value that JSON does not have, when values are compared.

    It is a hash of the pixels of a picture, whose `str` is an address in memory, and all numbers of
    an array, whose `str` has some of them. Of other values it is their `str`.
    """
    is_picture = hasattr(value, "convert") and hasattr(value, "tobytes")
    if is_picture:
        header = f"{value.mode} {value.size} ".encode()
        return hashlib.sha256(header + value.tobytes()).hexdigest()
    if callable(getattr(value, "tolist", None)):
        as_list = value.tolist()
        if type(as_list) is not type(value):
            return as_list
    return str(value)


def first_line(error: BaseException) -> str:
    """Return the first line of a message, and the second if the first ends in a colon.

    The error's class is added if the message is vague. The message for a pickle that torch refuses
    is ours, since torch's advice would run the code in it.
    """
    if "weights_only" in str(error):
        return PICKLE
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    most = 2 if lines and lines[0].endswith(":") else 1
    message = " ".join(lines[:most])
    if message and not isinstance(error, _VAGUE_ERRORS):
        return message
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def class_and_line(error: BaseException) -> str:
    """Return the class of an error, and the last line of the user's own code that ran, if any did.

    For example `ValueError in mine.py:12`.
    """
    name = type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if _is_users(path):
            return f"{name} in {path.name}:{frame.lineno}"
    return name


def _is_users(path: Path) -> bool:
    """Return whether a file is the user's own code."""
    if path.suffix != ".py" or not _PACKAGES.isdisjoint(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _NOT_USERS)


def finite_number(value: Any) -> float | None:
    """Return a number or a number's text as a float; None if it is neither, or not finite, or a bool."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    return number

"""Reads all files that users or other tools wrote: regular files of bounded size. A mistake in one is an error of one line.

A device, a pipe or a folder is refused without waiting for it. JSON has at most `MOST_DEPTH` levels, no lone surrogates, which UTF-8 cannot
encode, and with `numbers` no whole numbers of more than 64 bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import stat
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from drumline.errors import DrumlineError, EnvironmentFault, UserError

MIB = 2**20
MOST_BYTES = 64 * MIB  # limit for a file that is read at once; the largest tokenizers have 40 MB
MOST_DEPTH = 100
MOST_WHOLE = 2**63  # limit for whole numbers: torch, numpy and safetensors use 64 bits
MOST_PATH, MOST_NAME = 4095, 255  # bytes; limits of Linux
PICKLE = "a pickle with more than tensors in it, which could run code"
ErrorType = type[UserError]
# Whose code is not the user's: Python's, installed packages', Drumline's.
_NOT_USERS = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
_PACKAGES = {"site-packages", "dist-packages"}
# A JSON text without these needs no further check.
_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]|\d{19}")


def path_mistake(path: str) -> str | None:
    """The reason why a path or model id is impossible; None if it is possible."""
    if "\0" in path:
        return "a path cannot hold a NUL character"
    try:
        sizes = [len(os.fsencode(part)) for part in (path, *path.split("/"))]
    except UnicodeEncodeError:
        return "a path cannot hold a lone surrogate"
    if sizes[0] > MOST_PATH or max(sizes[1:]) > MOST_NAME:
        return f"a path or id of {len(path)} characters is too long: names have up to {MOST_NAME} bytes, paths {MOST_PATH}"
    return None


def expanded(path: str) -> Path:
    """A path, with the home folder in the place of `~` or `~user`; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises for such a user


def import_quietly(package: str) -> Any:
    """A package, without the warnings about the syntax of its code: Python shows them where it compiles a module, at its first import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module(package)


class _PlainFile(FileIO):
    """A regular file. A read that fails raises `error_type`, whoever reads."""

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
    """Open a regular file for reading bytes; links are followed. Raises `error_type`, also while it is read."""
    if mistake := path_mistake(str(path)):
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
    """The content of a regular file of at most `most` bytes. Raises `error_type`."""
    with open_plain(path, error_type, fix) as file:
        # Not `most` itself: Python allocates as much as `read` is given.
        content = file.read(min(most, max(os.fstat(file.fileno()).st_size, MIB)) + 1)
    if len(content) > most:
        raise error_type(f"larger than {most // MIB} MiB", where=str(path), fix=fix)
    return content


def read_text(
    path: Path, error_type: ErrorType, fix: str | None = None, most: int = MOST_BYTES
) -> str:
    """The text of a regular file in UTF-8. Raises `error_type`, with the line where there is one."""
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
    """The object of a JSON file; `numbers`, `once`: as of `parse_json`. Raises `error_type`, with the line where there is one."""
    value = parse_json(
        read_text(path, error_type, fix),
        str(path),
        error_type,
        lines=True,
        numbers=numbers,
        once=once,
    )
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
    """The value of a JSON text. `lines`: `where` is a file, and the error names the line. `numbers`: whole numbers must fit 64
    bits. `once`: a repeated key is an error, since readers disagree on which of its values to keep. Raises `error_type`."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise error_type(f"names the key {twice!r} twice", where=where, fix="keep one of them")
        return found

    try:
        value = json.loads(text, object_pairs_hook=made if once else None)
    except json.JSONDecodeError as error:
        at = f"{where}:{error.lineno}" if lines else where
        fix = fix or ("mend that line" if lines else None)
        raise error_type(
            f"not JSON: {error.msg} at column {error.colno}", where=at, fix=fix
        ) from None
    except RecursionError:
        raise error_type("not JSON: nested too deep", where=where, fix=fix) from None
    except DrumlineError:
        raise
    except ValueError:  # Python refuses whole numbers of more than 4,300 digits
        raise error_type(
            "not JSON: it holds a number of thousands of digits", where=where
        ) from None
    if text.count("[") + text.count("{") > MOST_DEPTH or _SUSPECT.search(text):
        _check(value, where, error_type, numbers)
    return value


def _check(value: Any, where: str, error_type: ErrorType, numbers: bool) -> None:
    """Raises `error_type` for depth, lone surrogates and, with `numbers`, whole numbers of more than 64 bits."""
    left = [(value, 1)]
    while left:
        inside, depth = left.pop()
        if depth > MOST_DEPTH:
            raise error_type("not JSON: nested too deep", where=where)
        if isinstance(inside, dict):
            left += [(part, depth + 1) for pair in inside.items() for part in pair]
        elif isinstance(inside, list):
            left += [(part, depth + 1) for part in inside]
        elif isinstance(inside, str):
            if mistake := text_mistake(inside):
                raise error_type(mistake, where=where)
        elif numbers and isinstance(inside, int) and abs(inside) >= MOST_WHOLE:
            raise error_type("holds a whole number of more than 64 bits", where=where)


def text_mistake(text: str) -> str | None:
    """The reason why a string is not valid text; None if it is."""
    return (
        "holds a lone surrogate, which is no text"
        if any("\ud800" <= char <= "\udfff" for char in text)
        else None
    )


@contextmanager
def judged(what: str, where: str, error_type: ErrorType, fix: str | None = None) -> Iterator[None]:
    """For calls of a library with foreign content: whatever it raises becomes an `error_type` of one line that begins with `what`."""
    try:
        yield
    except (DrumlineError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except (
        BaseException
    ) as error:  # bad values can raise anything; Rust libraries panic with a BaseException
        raise error_type(f"{what}: {first_line(error)}", where=where, fix=fix) from error


def require_package(module: str, where: str, fix: str | None = None) -> None:
    """Raises EnvironmentFault where a module cannot be imported; nothing is."""
    package = {"PIL": "pillow"}.get(module, module.replace("_", "-"))
    if importlib.util.find_spec(module) is None:
        raise EnvironmentFault(
            f"the package {package} is missing", where=where, fix=fix or f"pip install {package}"
        )


@contextmanager
def number_errors(where: str, error_type: ErrorType) -> Iterator[None]:
    """For conversions of foreign numbers: one that is too large becomes an `error_type` of one line."""
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
    """For reads and writes: an OSError becomes an `error_type` of one line that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{what}: {error.strerror or error}", where=where, fix=fix) from error


def content_of(value: Any) -> Any:
    """What stands for a value that JSON does not have: the pixels of a picture, whose `str` is an address in memory, and the numbers of an
    array, whose `str` has some of them."""
    if hasattr(value, "convert") and hasattr(value, "tobytes"):
        return hashlib.sha256(f"{value.mode} {value.size} ".encode() + value.tobytes()).hexdigest()
    found = value.tolist() if callable(getattr(value, "tolist", None)) else value
    return str(value) if type(found) is type(value) else found


def first_line(error: BaseException) -> str:
    """The first line of a message, and the second if the first ends in a colon; with the error's class if the message is vague.

    Of a pickle that torch does not load it is ours: torch's advice would run the code in it."""
    if "weights_only" in str(error):
        return PICKLE
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    message = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    vague = (
        isinstance(
            error,
            TypeError
            | AttributeError
            | LookupError
            | ArithmeticError
            | MemoryError
            | RecursionError,
        )
        or not message
    )
    return f"{type(error).__name__}: {message}".removesuffix(": ") if vague else message


def class_and_line(error: BaseException) -> str:
    """`ValueError in mine.py:12`: the class of an error, and the line of the user's own code that was run last, if any was."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if (
            path.suffix == ".py"
            and not _PACKAGES & {*path.parts}
            and not any(path.is_relative_to(each) for each in _NOT_USERS)
        ):
            return f"{type(error).__name__} in {path.name}:{frame.lineno}"
    return type(error).__name__

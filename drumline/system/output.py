"""Output that may be lost: its reader may end, its terminal close, its disk be full.

No run, file or exit code depends on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, TextIO, cast

# The environment variable with the verbosity of this process and of those that it starts.
VERBOSITY = "DRUMLINE_VERBOSITY"


class Verbosity(StrEnum):
    """How much a run prints in the terminal."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


def verbosity() -> Verbosity:
    """Return how much this process prints."""
    try:
        return Verbosity(os.environ.get(VERBOSITY, ""))
    except ValueError:
        return Verbosity.NORMAL


@contextmanager
def use_verbosity(level: Verbosity) -> Iterator[None]:
    """Print this much within the block, also in processes that it starts."""
    before = os.environ.get(VERBOSITY)
    os.environ[VERBOSITY] = level
    try:
        yield
    finally:
        if before is None:
            del os.environ[VERBOSITY]
        else:
            os.environ[VERBOSITY] = before


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 host, 2 hosts."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def say_note(text: str) -> None:
    """Print a note to standard error, unless this process is quiet."""
    if verbosity() is not Verbosity.QUIET:
        say(f"note: {text}")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print to standard error, or to `stream`. It does not matter whether that can be written."""
    with suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


class _Losing:
    """A stream that drops what it cannot write.

    The first time, it prints why, unless the reader has gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        is_first = self.error is None
        self.error = error
        if is_first and not isinstance(error, BrokenPipeError):
            say(f"note: what is printed is lost: {error.strerror}")


@contextmanager
def lossy() -> Iterator[None]:
    """Let nothing that is printed inside the block raise OSError, whoever prints it.

    rich would end the process (its Console.on_broken_pipe).
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and cast(TextIO, _Losing(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def has_lost_reader() -> bool:
    """Return whether the reader of standard output has gone, inside of `lossy`.

    Work that only prints may end then.
    """
    return isinstance(getattr(sys.stdout, "error", None), BrokenPipeError)


def flush_or_drop_output() -> None:
    """Flush the streams at the end of a command, and drop what can no longer be printed.

    The exit code stays as it is.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

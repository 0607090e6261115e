"""How a rank ends when something is raised: told once, noted for the launcher, then the exit code that errors.py gives it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drumline.core.files import write_whole
from drumline.core.redact import redact, redacted_streams
from drumline.dist.start import leave_process
from drumline.errors import DrumlineError, Preempted
from drumline.train.exhausted import OutOfMemory

_noted = False


def note(error: BaseException) -> None:
    """Print an exception to the rank's log and write it to the file that the elastic agent reads; the first one of a process only.

    What comes after the first is a consequence of it. A DrumlineError is its line and its exit code; anything else comes with its
    traceback, and so does an OutOfMemory: in the log, besides its line.
    """
    global _noted
    if _noted:
        return
    _noted = True
    more: dict[str, object] = {}
    if isinstance(error, OutOfMemory):
        more = {"exhausted": error.exhausted.model_dump()}
        _say("".join(traceback.format_exception(error.__cause__)))
    if isinstance(error, DrumlineError):
        message, text, code = error.line(), "", error.rank_code or error.exit_code
        _say(f"{'stopped' if isinstance(error, Preempted) else 'error'}: {message}")
    else:
        message, text, code = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), 1
        _say(text)
    if named := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _write(Path(named), {"message": redact(message), "traceback": redact(text), "time": time.time(), "exit_code": code, **more})


def _write(path: Path, noted: dict[str, object]) -> None:
    # The agent reads `message.message` and the call stack; the launcher reads our own part.
    stack = {"py_callstack": noted["traceback"] or noted["message"], "timestamp": str(int(time.time()))}
    try:  # the agent gives up on a file that is half written
        write_whole(path, json.dumps({"message": {"message": noted["message"], "extraInfo": stack, "drumline": noted}}))
    except OSError as full:
        _say(f"could not note the failure in {path}: {full}")


def _say(text: str) -> None:
    # The log may lie on a full disk. The exit code, by which the launcher decides how to go on, must not depend on that.
    with suppress(OSError):
        print(text, file=sys.stderr)


@contextmanager
def recording() -> Iterator[None]:
    """Around a rank's whole work: whatever is raised is noted and becomes the process's exit code."""
    try:
        with redacted_streams():
            yield
    except Exception as error:  # noqa: BLE001 - the outermost frame of a rank: told in full, and the code says that it failed
        note(error)
        leave_process((error.rank_code or error.exit_code) if isinstance(error, DrumlineError) else 1)

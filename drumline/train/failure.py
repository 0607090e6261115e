"""How a rank ends when something is raised: noted for the launcher, then the exit code that errors.py gives it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drumline.errors import DrumlineError


def note(error: BaseException) -> None:
    """Write an exception to the file that the elastic agent reads, the first one only: what comes after it is a consequence.

    A DrumlineError is its line and its exit code; anything else comes with its traceback.
    """
    named = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not named or Path(named).exists():
        return
    ours = isinstance(error, DrumlineError)
    message = error.line() if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
    text = "" if ours else "".join(traceback.format_exception(error))
    noted = {"message": message, "traceback": text, "time": time.time(), "exit_code": error.exit_code if isinstance(error, DrumlineError) else 1}
    # The agent reads `message.message` and the call stack; the launcher reads our own part.
    stack = {"py_callstack": text or message, "timestamp": str(int(noted["time"]))}
    whole = Path(named + ".tmp")
    try:
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": stack, "drumline": noted}}))
        whole.rename(named)  # the agent gives up on a file that is half written
    except OSError as full:
        whole.unlink(missing_ok=True)
        # The exception itself must not be lost to a full disk: it goes to the log, whose end the launcher shows as well.
        print(f"could not note the failure in {named}: {full}", file=sys.stderr)


@contextmanager
def recording() -> Iterator[None]:
    """Around a rank's whole work: leaves with the exit code of a DrumlineError, and with the traceback of anything else."""
    try:
        yield
    except DrumlineError as error:
        note(error)
        print(f"error: {error.line()}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        note(error)
        raise

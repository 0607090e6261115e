"""The end of a script that does not catch what a session raises: one line, and its exit code."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drumline.dist.start import leave_process
from drumline.errors import DataError, DrumlineError, UserError
from drumline.launch.environment import first_rank_reports
from drumline.train.failure import note

# The user's own hook.
_user_hook: Any = sys.__excepthook__


def take_hook() -> None:
    """Let `print_error` print what nobody has caught.

    It leaves what is not Drumline's to the hook that is there.
    """
    global _user_hook
    if sys.excepthook is not print_error:
        _user_hook = sys.excepthook
        sys.excepthook = print_error


def print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End a script that did not catch an error of ours: print its line, and exit with its code."""
    global _user_hook
    if not isinstance(error, DrumlineError):
        # The user's hook may call this one, which was there before it.
        hook = _user_hook
        _user_hook = sys.__excepthook__
        try:
            return hook(kind, error, trace)
        finally:
            _user_hook = hook
    with reported_once(error):
        report(error)
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if not is_interactive:
            leave_process(error.rank_code or error.exit_code)


def report(error: BaseException) -> None:
    """Print an error, and note it for the launcher; once."""
    with reported_once(error):
        note(error)


def reported_once(error: BaseException) -> AbstractContextManager[None]:
    """Let rank 0 alone report a mistake in the script, which is the same on all ranks.

    An error in the data may be one rank's.
    """
    if isinstance(error, UserError) and not isinstance(error, DataError):
        return first_rank_reports()
    return nullcontext()

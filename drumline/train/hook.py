"""How a script ends that has not caught what a session raised."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drumline.dist.start import leave_process
from drumline.errors import DataError, DrumlineError, UserError
from drumline.launchers.environment import first_rank_reports
from drumline.train.failure import note

_before: Any = sys.__excepthook__  # the user's own hook


def take_hook() -> None:
    """From now on `print_error` prints what nobody has caught, and leaves what is not Drumline's to the hook that is there."""
    global _before
    if sys.excepthook is not print_error:
        _before, sys.excepthook = sys.excepthook, print_error


def print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What a script ends with that did not catch an error of ours: its line and its exit code."""
    global _before
    if not isinstance(error, DrumlineError):
        # The user's hook may call this one, which was there before it.
        hook, _before = (
            _before,
            sys.__excepthook__,
        )
        try:
            return hook(kind, error, trace)
        finally:
            _before = hook
    with reported_once(error):
        report(error)
        if not (hasattr(sys, "ps1") or sys.flags.interactive):
            leave_process(error.rank_code or error.exit_code)


def report(error: BaseException) -> None:
    """Print an error, and note it for the launcher; once."""
    with reported_once(error):
        note(error)


def reported_once(error: BaseException) -> AbstractContextManager[None]:
    """Around an error: a mistake in the script is the same on all ranks, and rank 0 reports it; one in the data may be one rank's."""
    return (
        first_rank_reports()
        if isinstance(error, UserError) and not isinstance(error, DataError)
        else nullcontext()
    )

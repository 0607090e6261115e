"""What Python does with an error of a session that the user's script does not catch.

It prints the error's one line in place of a traceback, and exits with the error's code.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drumline.dist.start import leave_process
from drumline.errors import DataError, DrumlineError, UserError
from drumline.launch.environment import first_rank_reports
from drumline.train.failure import record_failure

# The `sys.excepthook` that was there before `install_hook`.
_user_hook: Any = sys.__excepthook__


def install_hook() -> None:
    """Make `print_error` the `sys.excepthook`. It leaves errors of others to the hook before it."""
    global _user_hook
    if sys.excepthook is not print_error:
        _user_hook = sys.excepthook
        sys.excepthook = print_error


def print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End a script that did not catch an error of ours: print its line, and exit with its code."""
    global _user_hook
    if not isinstance(error, DrumlineError):
        # A user's hook that was installed after `print_error` may call `print_error`, as the hook
        # before it. The next call then must not call the user's hook again.
        hook = _user_hook
        _user_hook = sys.__excepthook__
        try:
            return hook(kind, error, trace)
        finally:
            _user_hook = hook
    with limit_to_first_rank(error):
        report(error)
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if not is_interactive:
            leave_process(error.rank_code or error.exit_code)


def report(error: BaseException) -> None:
    """Print an error, and write it to a file for the launcher."""
    with limit_to_first_rank(error):
        record_failure(error)


def limit_to_first_rank(error: BaseException) -> AbstractContextManager[None]:
    """Return a context in which only rank 0 reports a mistake that is the same on all ranks.

    That is a UserError, but not a DataError, which may be one rank's.
    """
    if isinstance(error, UserError) and not isinstance(error, DataError):
        return first_rank_reports()
    return nullcontext()

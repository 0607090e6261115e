"""All errors that Drumline raises on purpose, with their exit codes; 0 is a finished run."""

from __future__ import annotations

import re
from unicodedata import category

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Any word that would fill the screen.
_ENDLESS_WORD = re.compile(r"\S{500,}")
# A number or word that nobody reads to its end: longer than any hash, and no part of a path.
_LONG_WORD = re.compile(r"(?<![\w+/])[\w+]{80,}(?![\w+/])")


def shorten(text: str, most: int = 79) -> str:
    """Return a text of at most `most` characters as it is, else its first 20 and last 8 with their count."""
    if len(text) <= most:
        return text
    return f"{text[:20]}…{text[-8:]} ({len(text):,} characters)"


def printable(text: str, keep: str = "\n\t\u200c\u200d") -> str:
    """Return a stranger's text as a terminal may show it.

    Colours are removed. What commands a terminal, turns a text around or has no glyph is escaped. Line
    breaks, tabs and the joiners of Persian and emojis, `keep`, are text, and so are spaces of all widths.
    """

    def shown(letter: str) -> str:
        if letter.isprintable() or letter in keep or category(letter) == "Zs":
            return letter
        return letter.encode("unicode_escape").decode()

    return "".join(map(shown, _COLOURS.sub("", text)))


class DrumlineError(Exception):
    """An error that is reported in one line.

    `what`: what happened. `where`: file:line, key, folder or rank. `fix`: how to fix it.
    """

    exit_code = 1
    # The exit code of a rank, if it differs.
    rank_code: int | None = None

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self.line())

    def line(self) -> str:
        """Return the message for the user, on one line.

        Unprintable characters are escaped, and very long words are cut.
        """
        message = self.what
        if self.where:
            message = f"{self.where}: {message}"
        if self.fix:
            message = f"{message} — {self.fix}"
        message = " ".join(message.split())
        message = _LONG_WORD.sub(lambda word: shorten(word[0]), message)
        message = printable(message, keep="")
        return _ENDLESS_WORD.sub(lambda word: f"{word[0][:200]}…{word[0][-200:]}", message)


class UserError(DrumlineError):
    """The input is invalid: exit code 2, one line, no traceback. Nothing was started or lost."""

    exit_code = 2


class ConfigError(UserError):
    """The YAML or an override cannot be read as a Config."""


class DataError(UserError):
    """A data source, row, column or template is not usable."""


class ModelError(UserError):
    """A model or tokenizer cannot be found, or does not fit the data."""


class PlanError(UserError):
    """The requested numbers (batch, devices, lengths) contradict each other."""


class CheckpointError(UserError):
    """A folder is not a committed checkpoint, is damaged, or does not fit this run."""


class EnvironmentFault(UserError):
    """The machine lacks something: a port, disk space, a folder, an optional package."""


class WorkerFailed(DrumlineError):
    """A rank raised or died and no restart is left."""


class NotSaved(DrumlineError):
    """The last weights could not be saved.

    The launcher does not restart for it: a restart would train again.
    """

    # sysexits' EX_IOERR. The launcher sees it even if the disk has no room for a message.
    rank_code = 74


class TrainingStopped(DrumlineError):
    """A policy of the config stopped the run.

    The reason is NaN, inf, rewards that keep failing, or a sampler whose weights are not the policy's.
    """

    exit_code = 3


class Preempted(DrumlineError):
    """The run was stopped by SIGTERM, SIGUSR1 or Ctrl-C; its state is saved, and `--resume` continues.

    Before the first step there is nothing to save, and the code is the same.
    """

    # sysexits' EX_TEMPFAIL, "try again later": a batch system may requeue on it.
    exit_code = 75

"""Everything Drumline raises on purpose, with its exit code; 0 is a finished run."""

from __future__ import annotations

import re
from unicodedata import category

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# A number or word that nobody reads whole: longer than any hash, and no part of a path.
_LONG_WORD = re.compile(r"(?<![\w+/])[\w+]{80,}(?![\w+/])")


def shortened(text: str, most: int = 79) -> str:
    """Return a text of at most `most` characters as it is, else its first 20 and last 8 with their count."""
    if len(text) <= most:
        return text
    return f"{text[:20]}…{text[-8:]} ({len(text):,} characters)"


def printable(text: str, keep: str = "\n\t\u200c\u200d") -> str:
    """A stranger's text for a terminal: colours go; what commands it, turns a text around or has no glyph is escaped. Line breaks, tabs
    and the joiners of Persian and emojis, `keep`, are text, and so are spaces of all widths."""

    def shown(letter: str) -> str:
        plain = letter.isprintable() or letter in keep or category(letter) == "Zs"
        return letter if plain else letter.encode("unicode_escape").decode()

    return "".join(map(shown, _COLOURS.sub("", text)))


class DrumlineError(Exception):
    """An error that is reported in one line. `what` happened; `where` (file:line, key, folder, rank); `fix`: how to fix it."""

    exit_code = 1
    rank_code: int | None = None  # the exit code of a rank, if it differs

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.line())

    def line(self) -> str:
        """The message for the user, on one line: unprintable characters are escaped, and very long words are cut."""
        place = f"{self.where}: " if self.where else ""
        mend = f" — {self.fix}" if self.fix else ""
        message = " ".join(f"{place}{self.what}{mend}".split())
        message = _LONG_WORD.sub(lambda word: shortened(word[0]), message)
        return re.sub(
            r"\S{500,}",
            lambda word: f"{word[0][:200]}…{word[0][-200:]}",
            printable(message, keep=""),
        )


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
    """The last weights could not be saved. The launcher does not restart for it: a restart would train again."""

    rank_code = (
        74  # sysexits' EX_IOERR: the launcher sees it even if the disk has no room for a message
    )


class TrainingStopped(DrumlineError):
    """A policy of the config stopped the run, for NaN, inf or rewards that keep failing; or rollouts are sampled by other weights."""

    exit_code = 3


class Preempted(DrumlineError):
    """The run was stopped by SIGTERM, SIGUSR1 or Ctrl-C; its state is saved, and `--resume` continues."""

    exit_code = 75  # sysexits' EX_TEMPFAIL, "try again later": a batch system may requeue on it

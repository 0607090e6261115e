"""Everything Drumline raises on purpose.

    DrumlineError                     one line: what, where, how to mend it
    ├── UserError          exit  2    the input is wrong; nothing was started or lost
    │   ├── ConfigError               the YAML or an override
    │   ├── DataError                 a source, a row, a column, a template
    │   ├── ModelError                a model or tokenizer that cannot be had or does not fit
    │   ├── PlanError                 numbers that do not go together (batch, devices, lengths)
    │   ├── CheckpointError           a folder that is no committed checkpoint, or does not fit the run
    │   └── EnvironmentFault          ports, disks, folders, missing extras
    ├── WorkerFailed       exit  1    a rank raised or died and the restart budget is spent
    ├── NotSaved           exit  1    trained to the end, or asked to stop, and no disk took the weights: another start would train again
    ├── TrainingStopped    exit  3    a policy stopped the run (NaN or inf, out of patience)
    └── Preempted          exit 75    asked to stop (SIGTERM, SIGUSR1, Ctrl-C): saved, `--resume` goes on

Exit 0 is a finished run. 75 is sysexits' EX_TEMPFAIL: "try again later", which a batch system may requeue on.
"""

from __future__ import annotations

import re


class DrumlineError(Exception):
    """A failure with a name. `what` happened, `where` (file:line, key, folder, rank), `fix`: how to mend it."""

    exit_code = 1
    rank_code: int | None = None  # what a rank exits with, where that is another

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.line())

    def line(self) -> str:
        """The message as the user sees it, on one line: what no terminal shows is escaped, and a word of thousands of letters is cut."""
        place = f"{self.where}: " if self.where else ""
        mend = f" — {self.fix}" if self.fix else ""
        message = " ".join(f"{place}{self.what}{mend}".split())
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        return re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}…{word[0][-200:]}", shown)


class UserError(DrumlineError):
    """The input is wrong: exit code 2, one line, no traceback."""

    exit_code = 2


class ConfigError(UserError):
    """The YAML or an override cannot be read as a Config."""


class DataError(UserError):
    """A data source, row, column or template is not usable."""


class ModelError(UserError):
    """A model or tokenizer cannot be found, or does not fit the data."""


class PlanError(UserError):
    """The numbers asked for do not go together."""


class CheckpointError(UserError):
    """A folder is not a committed checkpoint, is damaged, or does not fit this run."""


class EnvironmentFault(UserError):
    """The machine does not offer what was asked: a port, disk space, a folder, an optional package."""


class WorkerFailed(DrumlineError):
    """A rank raised or died and no restart is left."""


class NotSaved(DrumlineError):
    """The last weights could not be stored. Nothing is started again for it."""

    rank_code = 74  # sysexits' EX_IOERR: the launcher knows it also where the disk has no room for the message


class TrainingStopped(DrumlineError):
    """A policy of the config stopped the run."""

    exit_code = 3


class Preempted(DrumlineError):
    """The run was asked to stop; its state is saved."""

    exit_code = 75

"""The checkpoint or run that a run resumes from, as a `Resume` and as the value of `--resume`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from drumline.config.urls import FETCHED, is_url

# The value of --resume that stands for the newest checkpoint of the run itself.
NEWEST = "newest"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Resume:
    """What a run resumes from. A run that starts afresh has None in its place."""

    # A checkpoint's folder or URL, or the folder of a run, for its newest checkpoint. None: the
    # newest checkpoint of the run itself, on disk or in memory, or step 0 if it has none yet.
    place: str | None = None

    @classmethod
    def newest_of_run(cls) -> Resume:
        """Return the Resume for the newest checkpoint of the run itself, or step 0 without one."""
        return cls()

    @classmethod
    def parse(cls, option: str | None) -> Resume | None:
        """Return what a value of `--resume` stands for; None without one."""
        if not option:
            return None
        if option == NEWEST:
            return cls.newest_of_run()
        return cls(option)

    @classmethod
    def from_argument(cls, argument: bool | str | Path | None) -> Resume | None:
        """Return what the argument `resume` of a Python function means: a place, True or False."""
        if argument is True:
            return cls.newest_of_run()
        if not argument:
            return None
        return cls.parse(os.fspath(argument))

    def __str__(self) -> str:
        """Return the value of `--resume`."""
        if self.place is None:
            return NEWEST
        return self.place

    @property
    def is_newest_of_run(self) -> bool:
        """Whether it is the newest checkpoint of the run itself, on disk or in memory."""
        return self.place is None

    @property
    def is_run_folder(self) -> bool:
        """Whether it names the folder of a run. It looks at the disk of this host."""
        return self.place is not None and is_run_folder(self.place)

    def includes(self, checkpoint: str) -> bool:
        """Return whether `place` means a checkpoint: by its folder, its run's folder, or its URL.

        Of a URL, a copy in a folder of this host may have been read.
        """
        if self.place is None or checkpoint == NEWEST:
            return False
        if is_url(self.place):
            folder = self.place.rstrip("/")
            is_at_url = checkpoint == self.place or checkpoint.startswith(f"{folder}/")
            return is_at_url or Path(checkpoint).parent.name == FETCHED
        return Path(checkpoint).is_relative_to(self.place)


def resume_option(resume: Resume | None) -> str | None:
    """Return the value of `--resume` for a run that resumes; None for one that starts afresh."""
    if resume is None:
        return None
    return str(resume)


def is_run_folder(place: str) -> bool:
    """Return whether a place is the folder of a run, whose newest checkpoint is meant."""
    return not is_url(place) and (Path(place) / CHECKPOINTS).is_dir()

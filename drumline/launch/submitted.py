"""Keep notes of runs whose folder is on another machine, so that their launcher finds them again.

The note names the launcher, and `drumline ps`, `logs`, `follow` and `stop` ask that launcher about
the run. This module does not import torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drumline.config.launcher import Launcher, LauncherSpec, SubmittedRun
from drumline.errors import UserError
from drumline.foreign import first_line, read_object
from drumline.system.files import write_whole

NOTE = "submitted.json"
FIX = "ask the program that has the run"


def note_run(folder: Path, launch: LauncherSpec, run: SubmittedRun) -> None:
    """Note a run in a folder, and print its place and how to follow it.

    A note that cannot be written is no error, since the run is submitted by now: the message says
    so.

    Args:
        folder: Folder of the note, which is made if it does not exist.
        launch: The launcher that has submitted the run.
        run: The run.
    """
    note = {"launch": launch.model_dump(mode="json"), "run": run.values()}
    shown = f": drumline follow {folder} shows it, drumline stop {folder} stops it"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / NOTE, json.dumps(note), private=True)
    except OSError as error:
        shown = f"; it cannot be noted in {folder}: {error.strerror}"
    print(f"submitted {run.where}{shown}", file=sys.stderr)


def notes(folder: Path) -> list[Path]:
    """Return the notes in a folder and in the folders directly below it."""
    found = [folder / NOTE, *sorted(folder.glob(f"*/{NOTE}"))]
    return [path for path in found if path.is_file()]


def submitted_run(folder: Path) -> SubmittedRun | None:
    """Return the run that is noted in a folder; None if there is no note.

    Raises:
        UserError: The note is damaged.
        ConfigError: Its launcher is not installed.
    """
    path = folder / NOTE
    if not path.is_file():
        return None
    return read_note(path)


def read_note(path: Path) -> SubmittedRun:
    """Return the run of a note.

    Raises:
        UserError: The note is damaged.
        ConfigError: Its launcher is not installed.
    """
    note = read_object(path, UserError, FIX)
    try:
        launch = _launcher(note["launch"], path)
        return launch.submitted_run(note["run"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"is no note of a run: {first_line(error)}"
        raise UserError(what, where=str(path), fix=FIX) from error


def _launcher(section: Any, path: Path) -> LauncherSpec:
    """Return the launcher of a section `launch`.

    Raises:
        UserError: The section names code by its file. It is not run, because the folder may be a
            stranger's.
    """
    kind = str(section["kind"])
    if ":" in kind:
        what = f"names code, {kind}, which may be a stranger's"
        fix = "offer the launcher as an entry point of a package, and submit the run again"
        raise UserError(what, where=str(path), fix=fix)
    launch: LauncherSpec = TypeAdapter(Launcher).validate_python(section)
    return launch

"""Parsers and types of arguments and options that several commands share.

A parser checks what the user wrote, and returns it as it was written: `~` is expanded later, by
whatever opens the path.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from drumline.config.registry import nearest
from drumline.config.urls import is_url
from drumline.errors import UserError
from drumline.foreign import expand_home, path_mistake
from drumline.system.output import Verbosity


def parse_path(given: str | Path) -> Path:
    """Parse a path, which need not exist. typer also calls this for the default of an option.

    Raises UserError for an empty text, and for one that no path can be.
    """
    if not str(given):
        raise UserError(
            "an empty path given",
            where="drumline",
            fix="name a file or folder; is a variable of the shell empty?",
        )
    mistake = path_mistake(str(given))
    if mistake:
        raise UserError(mistake, where=str(given), fix="shorten it")
    return Path(given)


def parse_path_or_id(given: str) -> str:
    """Parse a path, a URL, an id of a hub or a short form such as `tasks:NAME`.

    Raises UserError for an empty text, and for one that is too long for any of them.
    """
    parse_path(given)
    return given


def chosen_verbosity(verbose: bool, quiet: bool) -> Verbosity:
    """Return how much to print, by --verbose and --quiet. Raises UserError for both at once."""
    if verbose and quiet:
        raise UserError("it contradicts --verbose", where="--quiet", fix="leave one of the two out")
    if quiet:
        return Verbosity.QUIET
    if verbose:
        return Verbosity.VERBOSE
    return Verbosity.NORMAL


def is_there(path: Path) -> bool:
    """Return whether a path exists, also as a link that leads nowhere.

    Raises PermissionError if a folder on the way may not be entered.
    """
    try:
        os.lstat(path)
    except PermissionError:
        # It is an OSError, too, but it does not say that the path is missing.
        raise
    except OSError:  # no such file, no folder on the way, a loop of links
        return False
    return True


def existing_path(given: str | Path) -> Path:
    """Parse a path that must exist, and return it as it was given.

    Raises UserError if it does not exist, with a similar path if there is one.
    """
    path = parse_path(given)
    full_path = expand_home(str(path))
    if is_there(full_path):
        return path
    try:
        siblings = [entry.name for entry in full_path.absolute().parent.iterdir()]
    except OSError:
        siblings = []
    guess = nearest(full_path.name, siblings)
    fix = f"did you mean {path.parent / guess}?" if guess else "check the path"
    raise UserError("there is no such file or folder", where=str(given), fix=fix)


def existing_or_url(given: str) -> str:
    """Parse a path that must exist, or a URL. Raises UserError for a path that does not exist."""
    if not is_url(given):
        existing_path(given)
    return given


def parse_model(given: str) -> str:
    """Parse the folder of a model, which must exist, or the id of a model.

    A text is taken for an id if it has at most one slash, or a colon that ends the name of a hub,
    and does not begin like a path. Raises UserError for a folder that does not exist.
    """
    parse_path(given)
    begins_as_path = given.startswith((".", "~", "/"))
    is_nested = given.count("/") > 1 and ":" not in given
    if begins_as_path or is_nested:
        existing_path(given)
    return given


def _keys(incomplete: str) -> list[str]:
    """Return the config keys that begin with a word, for completion in the shell."""
    from drumline.config.complete import keys

    return keys(incomplete)


path_option = partial(typer.Option, parser=parse_path)
# The override that --trust-remote-code stands for.
TRUSTED = "model.trust_remote_code=true"
ConfigFile = Annotated[
    Path,
    typer.Argument(
        parser=parse_path,
        metavar="CONFIG.yaml",
        help="The config of the run; `drumline schema` describes its keys.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Keys that override the YAML: optimizer.lr=1e-4",
        autocompletion=_keys,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that comes with the model. No file can allow this."
    ),
]
Run = Annotated[Path, typer.Argument(parser=existing_path, metavar="RUN", help="A run folder.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print all details: start-up, checkpoints, memory."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and the last line.")]
Runs = Annotated[
    list[Path], typer.Argument(parser=existing_path, metavar="RUN...", help="Run folders.")
]

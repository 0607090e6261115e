"""Find the commands of installed packages: entry points of the group `drumline.commands`.

A package is imported when one of its commands is run, completed in the shell or listed by
`drumline --help`. If that fails, its own commands report it, and all others still work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint
from typing import Any

import typer
import typer.main

from drumline.cli import usage
from drumline.config.registry import DISTRIBUTIONS, entry_points, package_of, run_user_code
from drumline.errors import ConfigError

# The entry points are those of the group `drumline.commands`.
ENTRY_POINT_GROUP = "commands"
# The last heading of `drumline --help`, for commands that name no heading.
OTHER = "Other packages"


@dataclass(frozen=True)
class PluginCommand:
    """A command of another package, which an entry point of the group `drumline.commands` names.

    Args:
        function: A function as typer takes it: its parameters are the arguments and options of the
            command, its docstring is the help. `drumline --help` imports its module, so heavy
            imports belong inside of the function.
        heading: The heading of `drumline --help` that lists the command: Train, Plan, Data, Look,
        Runs,
            Share, Diagnose, or another one.
    """

    function: Callable[..., None]
    heading: str = OTHER


def plugin_names() -> list[str]:
    """Return the names of the commands that installed packages offer."""
    return list(entry_points(ENTRY_POINT_GROUP))


def distributed_names() -> list[str]:
    """Return the names of the commands of Drumline's own distributions, installed or not."""
    return list(DISTRIBUTIONS[ENTRY_POINT_GROUP])


def distribution_of(name: str) -> str | None:
    """Return the name of Drumline's own distribution that has a command; None if none has it."""
    return DISTRIBUTIONS[ENTRY_POINT_GROUP].get(name)


def refuse_own_name(name: str) -> None:
    """Raise ConfigError if an installed package offers a command with a name of Drumline itself."""
    point = entry_points(ENTRY_POINT_GROUP).get(name)
    if point is not None:
        what = f"{package_of(point)} offers a command of this name, which is drumline's own"
        raise ConfigError(what, where=f"drumline {name}", fix="uninstall it")


def plugin_command(name: str) -> Any:
    """Return the command of an installed package as an object of typer; None if no package offers it.

    If the package cannot be imported, the result is a command that raises the ConfigError.
    """
    point = entry_points(ENTRY_POINT_GROUP).get(name)
    if point is None:
        return None
    return _load_command(name, point)


@cache
def _load_command(name: str, point: EntryPoint) -> Any:
    """Return the command that an entry point names, or one that raises the error of its import."""
    package = package_of(point)
    where = f"drumline {name}"
    try:
        command = run_user_code(point.load, f"this command of {package}", where)
        make = partial(_as_typer, name, package, command)
        return run_user_code(make, f"the arguments of this command of {package}", where, "reading")
    except ConfigError as error:
        return _failing_command(name, package, error)


def _as_typer(name: str, package: str, command: Any) -> Any:
    """Return a PluginCommand as a command of typer. Raises ConfigError if it is no PluginCommand."""
    if not isinstance(command, PluginCommand):
        what = f"{package} gives a value of type {type(command).__name__} as this command"
        fix = f"make it a {__name__}.PluginCommand"
        raise ConfigError(what, where=f"drumline {name}", fix=fix)
    app = typer.Typer(add_completion=False)
    decorate = app.command(name=name, cls=usage.Command, rich_help_panel=command.heading)
    decorate(command.function)
    return typer.main.get_command(app)


def _failing_command(name: str, package: str, error: ConfigError) -> Any:
    """Return a command that accepts any arguments and raises the error."""
    app = typer.Typer(add_completion=False)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(
        name=name,
        help=f"{package} is not usable: `drumline {name}` prints why.",
        context_settings=anything,
        add_help_option=False,
        rich_help_panel=OTHER,
    )
    def fail() -> None:
        raise error

    return typer.main.get_command(app)

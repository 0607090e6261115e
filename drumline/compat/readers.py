"""Recognise the tool whose config a file is, and find the function that reads it.

Configs of accelerate and DeepSpeed are read by this package. Configs of other tools are read by
installed packages: a `ConfigReader` each, which an entry point of the group
`drumline.config_readers` names. Packages are asked only about a file that has keys which are not
Drumline's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.compat.sheet import OldKey, Sheet
from drumline.compat.signs import TITLES, has_only_own_keys, launcher_by_signs, tool_by_signs
from drumline.config.data import is_surely_own
from drumline.config.registry import DISTRIBUTIONS, entry_points, package_of, run_user_code
from drumline.errors import ConfigError

GROUP = "config_readers"
Read = Callable[[Sheet, list[OldKey]], None]


@dataclass(frozen=True)
class ConfigReader:
    """How configs of one tool are recognised and read.

    Args:
        recognises: returns True for the keys and values of a config of the tool.
        read: puts the keys of a config on the sheet. Raises ConfigError with the old file's line.
    """

    recognises: Callable[[Mapping[Any, Any]], bool]
    read: Read


def recognise(values: Mapping[Any, Any]) -> str | None:
    """Return the tool whose config this is; None for Drumline's own, and for any other.

    A config with `data.train` in Drumline's form is always its own.
    """
    if is_surely_own(values) or has_only_own_keys(values):
        return None
    installed = entry_points(GROUP)
    for tool in installed:
        if _installed_reader(tool).recognises(values):
            return tool
    tool_not_installed = tool_by_signs(values)
    if tool_not_installed is not None and tool_not_installed not in installed:
        return tool_not_installed
    return launcher_by_signs(values)


def find_reader(tool: str, name: str) -> Read:
    """Return the function that puts the keys of a tool's config on a sheet.

    `name` is that of the file in errors. Raises ConfigError if no installed package has the
    function.
    """
    if tool == "accelerate":
        from drumline.compat.accelerate import accelerate_file

        return accelerate_file
    if tool == "deepspeed":
        from drumline.compat.deepspeed import deepspeed_file

        return deepspeed_file
    if tool in entry_points(GROUP):
        return _installed_reader(tool).read
    distribution = DISTRIBUTIONS[GROUP][tool]
    raise ConfigError(f"is {TITLES[tool]}", where=name, fix=f"pip install {distribution}")


def _installed_reader(tool: str) -> ConfigReader:
    """Return the reader that an installed package offers. Raises ConfigError if it is none."""
    point = entry_points(GROUP)[tool]
    package = package_of(point)
    reader = run_user_code(point.load, f"the reader {tool!r} of {package}", package)
    if not isinstance(reader, ConfigReader):
        what = f"its reader {tool!r} is a {type(reader).__name__}"
        raise ConfigError(what, where=package, fix=f"make it a {__name__}.ConfigReader")
    return reader

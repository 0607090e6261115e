"""Recognise which tool a config file belongs to, and find the function that reads it.

Configs of accelerate and DeepSpeed are read by this package. Configs of any other tool are read by
the `ConfigReader` of an installed package, which an entry point of the group
`drumline.config_readers` names. A file with Drumline's own keys alone is not shown to any package.
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

# The entry points are those of the group `drumline.config_readers`.
ENTRY_POINT_GROUP = "config_readers"
# A function that puts the keys of a tool's config on a sheet.
Read = Callable[[Sheet, list[OldKey]], None]


@dataclass(frozen=True)
class ConfigReader:
    """How the configs of one tool are recognised and read.

    Args:
        recognises: returns True if the keys and values are a config of the tool.
        read: puts the keys of a config on the sheet. Raises ConfigError with the old file's line.
    """

    recognises: Callable[[Mapping[Any, Any]], bool]
    read: Read


def recognise(values: Mapping[Any, Any]) -> str | None:
    """Return the name of the tool whose config this is; None for Drumline's own, or if none is known.

    A config with `data.train` in Drumline's form is always Drumline's own.
    """
    if is_surely_own(values) or has_only_own_keys(values):
        return None
    installed = entry_points(ENTRY_POINT_GROUP)
    for tool in installed:
        if _installed_reader(tool).recognises(values):
            return tool
    # If the reader of this tool is installed, it did not recognise the file above.
    likely_tool = tool_by_signs(values)
    if likely_tool is not None and likely_tool not in installed:
        return likely_tool
    return launcher_by_signs(values)


def find_reader(tool: str, name: str) -> Read:
    """Return the function that puts the keys of a tool's config on a sheet.

    Args:
        tool: The name that `recognise` returned.
        name: The name of the file, for errors.

    Raises ConfigError if the package with the function is not installed.
    """
    if tool == "accelerate":
        from drumline.compat.accelerate import read_accelerate_file

        return read_accelerate_file
    if tool == "deepspeed":
        from drumline.compat.deepspeed import read_deepspeed_file

        return read_deepspeed_file
    if tool in entry_points(ENTRY_POINT_GROUP):
        return _installed_reader(tool).read
    distribution = DISTRIBUTIONS[ENTRY_POINT_GROUP][tool]
    raise ConfigError(f"is {TITLES[tool]}", where=name, fix=f"pip install {distribution}")


def _installed_reader(tool: str) -> ConfigReader:
    """Return the reader of an installed package. Raises ConfigError if it is no ConfigReader."""
    point = entry_points(ENTRY_POINT_GROUP)[tool]
    package = package_of(point)
    reader = run_user_code(point.load, f"the reader {tool!r} of {package}", package)
    if not isinstance(reader, ConfigReader):
        what = f"its reader {tool!r} is a {type(reader).__name__}"
        raise ConfigError(what, where=package, fix=f"make it a {__name__}.ConfigReader")
    return reader

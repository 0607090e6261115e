"""Whether this repository's distributions are installed: without one, its keys and commands would be missing."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

PLUGINS = Path(__file__).parent.parent.parent / "plugins"
FIX = "run `make setup-dev`, then this again"


def missing_distribution(folder: Path = PLUGINS) -> str | None:
    """Return a line about the first distribution in a folder that is not installed; None if all are."""
    for file in sorted(folder.glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        name = project["name"]
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} (plugins/{file.parent.name}) is not installed — {FIX}"
        offered = {(point.group, point.name, point.value) for point in installed.entry_points}
        for group, points in project.get("entry-points", {}).items():
            for point, value in points.items():
                if (group, point, value) not in offered:
                    what = f"{name} is installed without {point!r} of {group}"
                    return f"{what} — {FIX}"
    return None

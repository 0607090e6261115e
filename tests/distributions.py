"""What tests check of each distribution of plugins/: its version, its kinds, its imports."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import drumline
from drumline.config.launcher import LauncherSpec
from drumline.config.registry import (
    DISTRIBUTIONS,
    _extension,
    _spec_of_package,
    entry_points,
    find,
    installed_entry_points,
)


def forget_installed() -> None:
    """Let what is installed be looked for anew."""
    for cached in (installed_entry_points, _extension, _spec_of_package):
        cached.cache_clear()


def project_of(folder: Path) -> dict[str, Any]:
    """Return the table `project` of a distribution's pyproject.toml."""
    text = (folder / "pyproject.toml").read_text()
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def check_version(folder: Path) -> None:
    """Check that a distribution has the version of Drumline, and requires it."""
    project = project_of(folder)
    assert project["version"] == drumline.__version__
    assert f"drumline=={drumline.__version__}" in project["dependencies"]


def check_kinds(folder: Path) -> None:
    """Check that Drumline names the distribution of each of its launchers, and finds the launcher."""
    project = project_of(folder)
    kinds = project["entry-points"]["drumline.launchers"]
    named = DISTRIBUTIONS["launchers"]
    own = {kind for kind in named if named[kind] == project["name"]}
    assert own == set(kinds)
    for kind, place in kinds.items():
        assert entry_points("launchers")[kind].value == place
        spec = find(LauncherSpec, kind)
        assert spec is not None
        assert place == f"{spec.__module__}:{spec.__name__}"


def check_seams(folder: Path, seams: set[str]) -> None:
    """Check that a distribution imports these modules of Drumline, and no other ones."""
    found = set()
    for path, module in imported_modules(folder, seams):
        if module.split(".")[0] == "drumline":
            assert module in seams, f"{path} imports {module}"
            found.add(module)
    assert found == seams, "the list may lose what nobody imports any more"


def imported_modules(folder: Path, seams: set[str]) -> Iterator[tuple[Path, str]]:
    """Yield the modules that each file of a distribution imports.

    A private name is yielded with its module, which makes it no seam.
    """
    for path in sorted((folder / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    is_private = alias.name.startswith("_") and alias.name != "__version__"
                    if is_private or name in seams:
                        yield path, name
                    else:
                        yield path, node.module


def check_no_circles(folder: Path) -> None:
    """Check that no module of a distribution needs itself, also for its types and in functions."""
    source = folder / "src"
    names = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        names[path] = ".".join(parts)
    own = set(names.values())
    graph: dict[str, set[str]] = {name: set() for name in own}
    for path, module in imported_modules(folder, own):
        graph[names[path]].add(module)
    # Raises CycleError, with the modules of the circle.
    assert list(TopologicalSorter(graph).static_order())

"""What the distribution says of itself, and which modules of Drumline it leans on."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import drumline
from drumline.compat.readers import ConfigReader
from drumline.config.old_names import DISTRIBUTED
from drumline.config.registry import DISTRIBUTIONS, entry_points

FOLDER = Path(__file__).parents[1]
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
# The seams: what a reader of a stranger's may import, too.
SEAMS = {
    "drumline.errors",
    "drumline.foreign",
    "drumline.system.redact",
    "drumline.system.yaml_lines",
    # The sheet and the rules of the tables, and what files of all tools have in common.
    "drumline.compat.accelerate",
    "drumline.compat.deepspeed",
    "drumline.compat.readers",
    "drumline.compat.rules",
    "drumline.compat.sheet",
    "drumline.compat.signs",
    # The sections that old keys become.
    "drumline.config.algorithm",
    "drumline.config.config",
    "drumline.config.data",
    "drumline.config.load",
    "drumline.config.mistakes",
    "drumline.config.model",
    "drumline.config.registry",
    "drumline.config.resume",
    "drumline.config.section",
    # The command.
    "drumline.cli.arguments",
    "drumline.cli.plugins",
    "drumline.report.bars",
}


def imported_modules() -> Iterator[tuple[Path, str]]:
    """Yield the modules that each file of the distribution imports.

    A private name is yielded with its module, which makes it no seam.
    """
    for path in sorted((FOLDER / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    if alias.name.startswith("_") or name in SEAMS:
                        yield path, name
                    else:
                        yield path, node.module


def test_only_seams_of_drumline_are_imported() -> None:
    found = set()
    for path, module in imported_modules():
        if module.split(".")[0] == "drumline":
            assert module in SEAMS, f"{path} imports {module}"
            found.add(module)
    assert found == SEAMS, "the list may lose what nobody imports any more"


def test_the_version_is_drumline_s() -> None:
    assert PROJECT["version"] == drumline.__version__
    assert PROJECT["dependencies"] == [f"drumline=={drumline.__version__}"]


@pytest.mark.parametrize("group", ["config_readers", "commands"])
def test_drumline_names_the_distribution_of_what_it_offers(group: str) -> None:
    offered = PROJECT["entry-points"][f"drumline.{group}"]
    named = DISTRIBUTIONS[group]
    assert {name for name in named if named[name] == PROJECT["name"]} == set(offered)
    for name, place in offered.items():
        assert entry_points(group)[name].value == place


@pytest.mark.parametrize("tool", PROJECT["entry-points"]["drumline.config_readers"])
def test_each_reader_is_one(tool: str) -> None:
    assert isinstance(entry_points("config_readers")[tool].load(), ConfigReader)


@pytest.mark.parametrize(
    "old", [old for old, new in DISTRIBUTED.items() if new.startswith("drumline_convert.")]
)
def test_modules_are_found_by_their_names_before(old: str) -> None:
    assert importlib.import_module(f"drumline.{old}").__name__ == DISTRIBUTED[old]

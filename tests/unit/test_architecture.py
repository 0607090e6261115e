"""What ARCHITECTURE.md names is there: modules, and names in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "drumline"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
# What a dot stands in, too.
FILES = (".py", ".yaml", ".json")


def rooms() -> set[str]:
    """Return the names of the package's folders and modules."""
    found = set()
    for path in PACKAGE.iterdir():
        is_hidden = path.name.startswith("_")
        if not is_hidden and path.suffix in ("", ".py"):
            found.add(path.stem)

    return found


ROOMS = rooms()
DOTTED = set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)[(`]", TEXT))
NAMED = sorted(name for name in DOTTED if name.split(".")[0] in ROOMS and not name.endswith(FILES))


def names_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)

    return found


@pytest.mark.parametrize("name", NAMED)
def test_it_is_there(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        file = PACKAGE.joinpath(*parts[:length])
        if file.is_dir():
            file = file / "__init__.py"
        else:
            file = file.with_suffix(".py")
        if file.is_file():
            missing = set(parts[length:]) - names_in(file)
            assert not missing, f"{file} has no {missing}"
            return

    pytest.fail(f"there is no {name}")


def test_every_room_is_named() -> None:
    assert len(NAMED) > 30
    for room in ROOMS:
        assert f"`{room}" in TEXT

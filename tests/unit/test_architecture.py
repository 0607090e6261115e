"""What ARCHITECTURE.md names is there: modules, and names in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    path.stem
    for path in (ROOT / "drumline").iterdir()
    if path.name[0] != "_" and path.suffix in ("", ".py")
}
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
# What a dot stands in, too.
FILES = (".py", ".yaml", ".json")
DOTTED = re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)[(`]", TEXT)
NAMED = sorted(
    {name for name in DOTTED if name.split(".")[0] in ROOMS and not name.endswith(FILES)}
)


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    return defined | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("name", NAMED)
def test_it_is_there(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT / "drumline" / "/".join(parts[:length])
        if place.is_dir() or place.with_suffix(".py").is_file():
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            assert not (missing := set(parts[length:]) - names_in(file)), f"{file} has no {missing}"
            return
    pytest.fail(f"there is no {name}")


def test_every_room_is_named() -> None:
    assert len(NAMED) > 30 and not {room for room in ROOMS if f"`{room}" not in TEXT}

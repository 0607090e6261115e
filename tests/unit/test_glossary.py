"""The words that CONTRIBUTING bans are in no name of the package, no page, no --help and no description of a key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import schema
from tests.commands import DRUMLINE, command_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOUSE = [ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
TABLE = ROOT / "CONTRIBUTING.md"
PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def banned(where: str) -> list[tuple[str, str]]:
    """(word, what to write instead) of the rows of the table that say `where`."""
    section = TABLE.read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return [
        (word, instead)
        for words, instead, places in rows
        if where in places.split(", ")
        for word in re.findall(r"`([^`]+)`", words)
    ]


@cache
def names() -> dict[str, str]:
    """Each name that the package defines or sets → one place where it does."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "drumline").rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for part in path.relative_to(ROOT / "drumline").with_suffix("").parts:
            found.setdefault(part, place)
        for node in ast.walk(ast.parse(path.read_text())):
            for name in defined(node):
                found.setdefault(name, f"{place}:{getattr(node, 'lineno', 0)}")
    return found


def defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname


def descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (
                [inner] if key == "description" and isinstance(inner, str) else descriptions(inner)
            )
    elif isinstance(value, list):
        for inner in value:
            yield from descriptions(inner)


@cache
def texts() -> dict[str, str]:
    """Place → prose that users read. Pages without their code."""
    pages = {
        page.name: re.sub(
            r"```.*?```|`[^`\n]*`|^    .*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        for page in [*PAGES, *HOUSE]
    }
    for name in DRUMLINE.list_commands(None):
        command = command_of(name)
        pages[f"{name} --help"] = " ".join(
            [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        )
    return pages | {"drumline schema": "\n".join(descriptions(schema()))}


@pytest.mark.slow
def test_the_table_is_read() -> None:
    assert banned("names") and banned("parts") and banned("prose")
    assert len(names()) > 3000 and len(texts()["drumline schema"]) > 5000


@pytest.mark.parametrize("where", ["names", "parts"])
def test_no_name_is_banned(where: str) -> None:
    """A row bans a name as a whole, whatever its case and underscores before it, or also as a part of longer names."""
    words = dict(banned(where))
    wrong = []
    for name, place in names().items():
        parts = [part.lower() for part in PARTS.findall(name)]
        for word in parts if where == "parts" else ["_".join(parts)]:
            if word in words:
                wrong.append(f"{place}: {name} — write {words[word]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("word", "instead"), banned("prose"))
def test_no_text_has_the_word(word: str, instead: str) -> None:
    places = [
        place for place, text in texts().items() if re.search(rf"\b{word}\b", text, re.IGNORECASE)
    ]
    assert not places, f"{word!r} — write {instead}"


@pytest.mark.parametrize("page", [*PAGES, *HOUSE, TABLE], ids=lambda page: page.name)
def test_lines_of_prose_fit(page: Path) -> None:
    """At most 120 characters, but for tables, code and links that cannot be broken."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        code ^= line.startswith("```")
        if (
            code
            or line.lstrip().startswith("|")
            or line.startswith(("    ", "```"))
            or " " not in line.strip()
        ):
            continue
        assert len(line) <= 120, f"{page.name}:{number} has {len(line)}"

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
PACKAGE = ROOT / "drumline"
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOUSE = [ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
TABLE = ROOT / "CONTRIBUTING.md"
PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
CODE = re.compile(r"```.*?```|`[^`\n]*`|^    [^\n]*$", re.DOTALL | re.MULTILINE)


def banned_words(place: str) -> list[tuple[str, str]]:
    """Return the words that the table bans from `place`, each with what to write instead."""
    _, _, section = TABLE.read_text().partition("\n## Words\n")
    section, _, _ = section.partition("\n## ")

    found = []
    for line in section.splitlines():
        if line.startswith("| `"):
            words, instead, places = map(str.strip, line.strip("|").split("|"))
            if place in places.split(", "):
                for word in re.findall(r"`([^`]+)`", words):
                    found.append((word, instead))

    return found


@cache
def names() -> dict[str, str]:
    """Return each name that the package defines or sets, with one place that does it."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(ROOT)
        for part in path.relative_to(PACKAGE).with_suffix("").parts:
            found.setdefault(part, str(place))

        for node in ast.walk(ast.parse(path.read_text())):
            name = name_of(node)
            if name:
                line = getattr(node, "lineno", 0)
                found.setdefault(name, f"{place}:{line}")

    return found


def name_of(node: ast.AST) -> str | None:
    """Return the name that a node defines or sets, if it does."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.alias(asname=name):
            return name
    return None


def descriptions(value: Any) -> Iterator[str]:
    """Yield each text under a key `description`, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "description" and isinstance(inner, str):
                yield inner
            else:
                yield from descriptions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from descriptions(inner)


@cache
def texts() -> dict[str, str]:
    """Return the prose that users read, by its place. Pages are without their code."""
    found = {}
    for page in [*PAGES, *HOUSE]:
        found[page.name] = CODE.sub("", page.read_text())

    for name in DRUMLINE.list_commands(None):
        command = command_of(name)
        helps = [command.help]
        for parameter in command.params:
            helps.append(getattr(parameter, "help", None))
        found[f"{name} --help"] = " ".join(filter(None, helps))

    found["drumline schema"] = "\n".join(descriptions(schema()))
    return found


@pytest.mark.slow
def test_the_table_is_read() -> None:
    for place in ("names", "parts", "prose"):
        assert banned_words(place)

    assert len(names()) > 3000
    assert len(texts()["drumline schema"]) > 5000


@pytest.mark.parametrize("where", ["names", "parts"])
def test_no_name_is_banned(where: str) -> None:
    """A row bans a name as a whole, whatever its case and underscores before it, or also as a part of longer names."""
    words = dict(banned_words(where))
    wrong = []
    for name, place in names().items():
        parts = [part.lower() for part in PARTS.findall(name)]
        if where == "names":
            parts = ["_".join(parts)]

        for word in parts:
            if word in words:
                wrong.append(f"{place}: {name} — write {words[word]}")

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("word", "instead"), banned_words("prose"))
def test_no_text_has_the_word(word: str, instead: str) -> None:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    places = [place for place, text in texts().items() if pattern.search(text)]
    assert not places, f"{word!r} — write {instead}"


def can_be_broken(line: str) -> bool:
    """Return whether a line is prose of several words, and no row of a table."""
    is_code = line.startswith(("    ", "```"))
    is_row = line.lstrip().startswith("|")
    return " " in line.strip() and not is_code and not is_row


@pytest.mark.parametrize("page", [*PAGES, *HOUSE, TABLE], ids=lambda page: page.name)
def test_lines_of_prose_fit(page: Path) -> None:
    """At most 120 characters, but for tables, code and links that cannot be broken."""
    is_in_code = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            is_in_code = not is_in_code

        if not is_in_code and can_be_broken(line):
            assert len(line) <= 120, f"{page.name}:{number} has {len(line)}"

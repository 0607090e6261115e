"""Tests that show a claim run in `make test`, and the twenty mistakes name tests that are there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.rows import COVERING
from tests.harness import ROOT
from tests.mutations import MUTATIONS, PARITY, Mutation


class Shown(NamedTuple):
    """A test that shows a claim, and its other decorators."""

    claim: str
    node: str
    decorators: list[str]


def decorated(folder: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield each test function of the files below a folder, with its file."""
    for file in sorted(folder.rglob("test_*.py")):
        for part in ast.parse(file.read_text()).body:
            if isinstance(part, ast.FunctionDef):
                yield str(file.relative_to(ROOT)), part


def shown() -> list[Shown]:
    """Return all tests that are marked with a claim."""
    found = []
    for folder in (ROOT / "tests", ROOT / "plugins"):
        for file, function in decorated(folder):
            texts = list(map(ast.unparse, function.decorator_list))
            for each in function.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.claim":
                    claim = ast.literal_eval(each.args[0])
                    found.append(Shown(claim, f"{file}::{function.name}", texts))
    return found


CLAIMS = shown()


def decorators(node: str) -> list[str]:
    """Of the test function that `node` names; AssertionError where it is not there."""
    file, _, name = node.partition("[")[0].partition("::")
    tree = ast.parse((ROOT / file).read_text())
    found = []
    for part in tree.body:
        if isinstance(part, ast.FunctionDef) and part.name == name:
            found.append(part)
    assert len(found) == 1, node
    return list(map(ast.unparse, found[0].decorator_list))


def test_there_are_claims() -> None:
    assert len({each.claim for each in CLAIMS}) >= 80


@pytest.mark.parametrize("shown", CLAIMS, ids=lambda each: each.node)
def test_what_shows_a_claim_runs(shown: Shown) -> None:
    assert not {"pytest.mark.full", "pytest.mark.skip"} & set(shown.decorators)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mistake_can_be_made_and_its_tests_are_there(mutation: Mutation) -> None:
    assert mutation.path_in(ROOT).read_text().count(mutation.line) == 1
    for node in mutation.tests:
        if "::" in node:
            assert "pytest.mark.full" not in decorators(node)
        else:
            assert (ROOT / node).is_file()
        if node.startswith(PARITY):
            assert tuple(node.removeprefix(PARITY)[1:-1].rsplit("-", 1)) in COVERING


def test_there_are_twenty_mistakes() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) >= 20

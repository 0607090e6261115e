"""The list of claims in CONTRIBUTING.md, and the twenty mistakes, name tests that are there and that `make test` runs."""

from __future__ import annotations

import ast
import re

import pytest

from tests.distributed.rows import COVERING
from tests.harness import ROOT
from tests.mutations import MUTATIONS, PARITY, Mutation

NODES = re.findall(r"`(tests/[\w/]+\.py::\w+)`", (ROOT / "CONTRIBUTING.md").read_text())


def decorators(node: str) -> list[str]:
    """Of the test function that `node` names; AssertionError where it is not there."""
    file, _, name = node.partition("[")[0].partition("::")
    tree = ast.parse((ROOT / file).read_text())
    found = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == name]
    assert len(found) == 1, node
    return [ast.unparse(part) for part in found[0].decorator_list]


def test_there_are_claims() -> None:
    assert len(NODES) >= 50


@pytest.mark.parametrize("node", NODES)
def test_what_shows_a_claim_is_there_and_runs(node: str) -> None:
    assert not {"pytest.mark.full", "pytest.mark.skip"} & set(decorators(node))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mistake_can_be_made_and_its_tests_are_there(mutation: Mutation) -> None:
    assert (ROOT / "drumline" / mutation.file).read_text().count(mutation.line) == 1
    for node in mutation.tests:
        if "::" in node:
            assert "pytest.mark.full" not in decorators(node)
        else:
            assert (ROOT / node).is_file()
        if node.startswith(PARITY):
            assert tuple(node.removeprefix(PARITY)[1:-1].rsplit("-", 1)) in COVERING


def test_there_are_twenty_mistakes() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) >= 20

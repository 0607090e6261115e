"""How dense the code is, by folder, over its syntax trees: line breaks cannot improve these figures.

`style_left.json` has the folders that are denser than the limits; they may only become plainer.
"""

from __future__ import annotations

import ast
import json
import statistics
from pathlib import Path

import pytest

from tests.harness import ROOT

NOT_SIMPLE = (
    *(
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.If,
        ast.For,
        ast.AsyncFor,
        ast.While,
    ),
    *(ast.With, ast.AsyncWith, ast.Try, ast.Match, ast.Expr, ast.Import, ast.ImportFrom),
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Conditional expressions, comprehensions and walrus operators per 100 statements; syntax nodes of a
# simple statement, median and 90th percentile; syntax nodes a line.
NAMES = ("conditional", "comprehensions", "walrus", "median", "p90", "per_line")
LIMITS = {"drumline": (2.5, 4.0, 0.3, 11, 25, 6.0), "tests": (2.5, 4.0, 0.3, 13, 28, 6.5)}
LEFT = json.loads((Path(__file__).parent / "style_left.json").read_text())
FOLDERS = [
    str(folder.relative_to(ROOT))
    for pattern in ("drumline/*", "tests/*", "plugins/*/src", "plugins/*/tests")
    for folder in sorted(ROOT.glob(pattern))
    if any(folder.rglob("*.py")) and folder.name != "fixtures"
]


def measure(folder: str) -> dict[str, float]:
    """Return the figures of all files below a folder of the project."""
    lines = 0
    nodes: list[ast.AST] = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text()
        lines += text.count("\n")
        nodes += ast.walk(ast.parse(text))
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    simple = [node for node in statements if not isinstance(node, NOT_SIMPLE)]
    sizes = sorted(len(list(ast.walk(node))) for node in simple)
    counts = [
        sum(isinstance(node, kind) for node in nodes)
        for kind in (ast.IfExp, COMPREHENSIONS, ast.NamedExpr)
    ]
    shares = [round(100 * count / len(statements), 1) for count in counts]
    middle = statistics.median(sizes)
    high = sizes[int(0.9 * (len(sizes) - 1))]
    return dict(zip(NAMES, (*shares, middle, high, round(len(nodes) / lines, 1)), strict=True))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_no_denser_than_allowed(folder: str) -> None:
    part = "tests" if "tests" in folder.split("/") else "drumline"
    limits = dict(zip(NAMES, LIMITS[part], strict=True))
    found = measure(folder)
    denser = {name: found[name] for name in NAMES if found[name] > limits[name]}
    allowed = LEFT.get(folder, {})
    assert denser.keys() <= allowed.keys(), f"denser than {limits}"
    assert all(denser[name] <= allowed[name] for name in denser), "denser than before"
    assert denser.keys() == allowed.keys(), "style_left.json may lose what is no longer too dense"

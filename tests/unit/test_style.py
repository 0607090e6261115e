"""How dense the code is, by folder, over its syntax trees: line breaks cannot improve these figures."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from typing import NamedTuple

import pytest

from tests.harness import ROOT

NOT_SIMPLE = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.Match,
    ast.Expr,
    ast.Import,
    ast.ImportFrom,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Figures(NamedTuple):
    """The figures of a folder. The first three are counted per 100 statements."""

    conditional: float
    comprehensions: float
    walrus: float
    # Syntax nodes of a simple statement: the median and the 90th percentile.
    median: float
    p90: float
    # Syntax nodes a line.
    per_line: float


LIMITS = {
    "drumline": Figures(2.5, 4.0, 0.3, 11, 25, 6.0),
    "tests": Figures(2.5, 4.0, 0.3, 13, 28, 6.5),
}


def list_folders() -> list[str]:
    """Return the folders of the project that have Python files."""
    folders = []
    for pattern in ("drumline/*", "tests/*", "plugins/*/src", "plugins/*/tests"):
        for folder in sorted(ROOT.glob(pattern)):
            has_code = any(folder.rglob("*.py"))
            if has_code and folder.name != "fixtures":
                folders.append(str(folder.relative_to(ROOT)))

    return folders


def measure(folder: str) -> Figures:
    """Return the figures of all files below a folder of the project."""
    lines = 0
    counts: Counter[type] = Counter()
    statements = 0
    sizes = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text()
        lines += text.count("\n")

        for node in ast.walk(ast.parse(text)):
            counts[type(node)] += 1
            if isinstance(node, ast.stmt):
                statements += 1
                if not isinstance(node, NOT_SIMPLE):
                    below = list(ast.walk(node))
                    sizes.append(len(below))

    def per_hundred(*kinds: type) -> float:
        count = sum(counts[kind] for kind in kinds)
        return round(100 * count / statements, 1)

    sizes.sort()
    last = len(sizes) - 1
    return Figures(
        conditional=per_hundred(ast.IfExp),
        comprehensions=per_hundred(*COMPREHENSIONS),
        walrus=per_hundred(ast.NamedExpr),
        median=statistics.median(sizes),
        p90=sizes[int(0.9 * last)],
        per_line=round(counts.total() / lines, 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("folder", list_folders())
def test_a_folder_is_no_denser_than_allowed(folder: str) -> None:
    is_of_tests = "tests" in folder.split("/")
    limits = LIMITS["tests" if is_of_tests else "drumline"]

    denser = {}
    for name, figure, limit in zip(Figures._fields, measure(folder), limits, strict=True):
        if figure > limit:
            denser[name] = figure

    assert not denser, f"denser than {limits}"


# A function named by one of these says nothing at its call: `at_end(plan)`, `Rows.of(parameter)`.
PREPOSITIONS = (
    *("of", "on", "by", "in", "at", "beside", "under", "over", "for", "per", "behind", "within"),
    *("between", "through", "into", "across", "near", "until"),
)

# Names that others give, and names of a field or a plug-in's seam.
KNOWN_NAMES = {
    "on_event": "handles an event, as the others in the progress display",
    "on_finalized_text": "transformers calls it",
    "on_gradient": "torch calls it",
    "on_policy": "the field's term",
    "in_memory_every": "a key of the YAML",
    "in_time": "a key of `plan --json`",
    "in_pieces": "plug-ins import it",
    "_in_use_error": "the error of a folder in use",
}


def list_functions() -> list[tuple[str, str]]:
    """Return the file and the name of each function of the product."""
    functions = []
    for pattern in ("drumline/**/*.py", "plugins/*/src/**/*.py"):
        for file in sorted(ROOT.glob(pattern)):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef):
                    functions.append((str(file.relative_to(ROOT)), node.name))
    return functions


def test_no_function_is_named_by_a_preposition() -> None:
    bad = []
    for file, name in list_functions():
        first_word = name.strip("_").split("_")[0]
        handles_event = name.startswith("_on_") and file == "drumline/report/progress.py"
        if first_word in PREPOSITIONS and name not in KNOWN_NAMES and not handles_event:
            bad.append(f"{file}: {name}")

    assert not bad

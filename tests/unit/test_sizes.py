"""Files of at most 400 lines, functions of at most 60: what grows past that usually holds two things."""

from __future__ import annotations

import ast
import subprocess

import pytest

from tests.harness import ROOT

FILES = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.skipif(not FILES, reason="this checkout is no git repository, whose files these are")
def test_files_and_functions_are_short() -> None:
    long = []
    for name in FILES:
        text = (ROOT / name).read_text()
        if text.count("\n") > 400:
            long.append(name)
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [f"{name}: {node.name}" for node in functions if (node.end_lineno or 0) - node.lineno >= 60]
    assert len(FILES) > 300 and not long

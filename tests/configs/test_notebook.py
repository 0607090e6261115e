"""examples/first_run.ipynb runs from top to bottom on a tiny model."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ENV, ROOT
from tests.tiny import tiny_model_dir

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


@pytest.mark.claim("the notebook runs from top to bottom")
@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("nbclient") and find_spec("ipykernel")),
    reason="needs `pip install nbclient ipykernel`",
)
def test_runs_from_top_to_bottom(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOK, as_version=4)
    env = {
        **ENV,
        "NOTEBOOK_MODEL": str(tiny_model_dir(tmp_path / "model")),
        "TMPDIR": str(tmp_path),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    NotebookClient(book, timeout=200, kernel_name="python3").execute(cwd=str(tmp_path), env=env)
    told = []
    for cell in book.cells:
        if re.search(r"ranked|train\(config\)|resume", cell.source):
            told.append(text_of(cell))
    plan, first, last = told
    assert plan.count("tokens/s") == 3
    assert len(first.splitlines()) == 4
    assert float(last.splitlines()[-1]) < float(first.split()[1])


def text_of(cell: Any) -> str:
    """What a cell has printed."""
    text = ""
    for out in cell.get("outputs", []):
        text += out.get("text") or out.get("data", {}).get("text/plain", "")
    return text


def test_is_kept_without_outputs_and_says_all_in_both_languages() -> None:
    import json

    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for cell in cells:
        assert not cell.get("outputs")
        assert not cell.get("execution_count")
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            assert re.search("[\u4e00-\u9fff]", text), text
            assert re.search("[A-Za-z]{4}", text), text

"""Every benchmark runs: its help as a file, its `--smoke` size to a results file that says what it was measured on."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import commit
from tests.harness import ENV, ROOT

# A file without a main is what others import.
FILES = sorted(
    path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)
# Without --smoke: all its parts are tiny where there is no GPU.
ELSEWHERE = {
    "compiled_bytes": "tests/unit/test_compiled_bytes.py",
    "gpu": "tests/unit/test_gpu_parts.py",
}


def run(path: Path, cwd: Path, *arguments: object, seconds: float = 60) -> str:
    """A benchmark as a user runs it, from any folder; what it printed."""
    command = [sys.executable, str(path), *map(str, arguments)]
    ended = subprocess.run(
        command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=seconds
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def test_all_are_found() -> None:
    assert len(FILES) >= 10 and set(ELSEWHERE) <= {path.stem for path in FILES}
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if index % 5 == 0 else pytest.mark.full)
        for index, path in enumerate(FILES)
    ],
)
def test_help_says_what_it_measures(path: Path, tmp_path: Path) -> None:
    said = run(path, tmp_path, "--help")
    what = ast.get_docstring(ast.parse(path.read_text()))
    assert what and what.splitlines()[0] in said and "--out" in said
    assert "--smoke" in said or path.stem in ELSEWHERE


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem) for path in FILES if path.stem not in ELSEWHERE]
)
def test_smoke(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run(path, tmp_path, "--smoke", "--out", out, seconds=500)
    figures = json.loads(out.read_text())
    assert figures["command"].endswith(f"python benchmarks/{path.name} --smoke --out {out}")
    assert (
        figures["commit"] == commit()
        and figures["hardware"]["cores"]
        and figures["versions"]["torch"]
    )
    assert set(figures) > {"command", "commit", "hardware", "versions"}


def test_each_committed_result_names_its_commit() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        assert '"commit": "unknown"' not in path.read_text(), path.name


def test_the_commit_is_that_of_the_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *identity, "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout.strip()

    assert commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    git("tag", "-a", "v1", "-m", "v1")
    here = commit(tmp_path)
    assert len(here) == 12 and git("rev-parse", "HEAD").startswith(here)
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{here}-dirty"
    if os.getuid() == 0:
        # A tree that another user owns is read, too.
        os.chown(tmp_path, 65534, 65534)
        assert commit(tmp_path) == f"{here}-dirty"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") == "unknown"

"""Every command of README and docs is one: programs, files, targets, extras, options and keys are there. `tests/configs/test_docs_run.py`
runs them."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from drumline.config.load import load_values
from tests.commands import PAGES, PROGRAMS, commands, parsed
from tests.harness import ROOT

ROWS = {"data": {"train": [{"kind": "file", "path": "rows.jsonl"}]}}
# Of Drumline, and of its distributions in plugins/.
PROJECTS = [
    tomllib.loads(file.read_text())["project"]
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"))
]
EXTRAS = {project["name"]: set(project.get("optional-dependencies", {})) for project in PROJECTS}


def test_a_wrong_one_is_noticed() -> None:
    for line in (
        "drumline train mine.yaml --dry",
        "drumline trian mine.yaml",
        "srun drumline stop",
        "cat x | drumline doctor - --yes",
    ):
        with pytest.raises((KeyError, typer.BadParameter.__base__)):  # type: ignore[arg-type]  # typer exports only subclasses of this
            parsed(line)
    assert [name for name, _ in parsed("dmesg -T | drumline doctor -")] == ["doctor"]


def test_there_are_commands() -> None:
    found = [line for page in PAGES.values() for line in commands(page)]
    assert len(found) > 80 and {line.split()[0] for line in found} <= set(PROGRAMS)


def require_extras(requirements: list[str]) -> None:
    """Assert that the extras exist which a line of pip names."""
    for requirement in requirements:
        name, _, named = requirement.rstrip("]").partition("[")
        if named:
            # `.[tasks]` is Drumline itself, in its folder.
            extras = EXTRAS.get(name, EXTRAS["drumline"])
            assert set(named.split(",")) <= extras, requirement


@pytest.mark.claim("every command of README and docs is one")
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_each_command_is_one(page: Path) -> None:
    for line in commands(page):
        for _, parameters in parsed(line):
            overrides = [each for each in parameters.get("overrides") or () if each != "…"]
            if overrides:
                load_values(ROWS, overrides)
        words = shlex.split(line)
        for name in words:
            if (
                re.fullmatch(r"(benchmarks|scripts|tests|examples)/[\w/.-]+", name)
                and "results" not in name
            ):
                assert (ROOT / name).exists(), f"{page.name}: {line}"
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        if words[:2] == ["pip", "install"]:
            require_extras(words[2:])
        if words[0] == "python" and words[1] == "-m" and words[2].startswith("tests."):
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists(), line

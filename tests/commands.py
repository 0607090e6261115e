"""The commands of README and docs: found, and parsed as the shell and `drumline` would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

from drumline.cli import app
from drumline.cli import arguments as cli_arguments
from drumline.cli.program import _arguments_for_typer
from tests.harness import ROOT

# Each page in Chinese has the same commands as its English twin (tests/unit/test_languages.py).
PAGES: dict[str, Path] = {}
GUIDES: dict[str, Path] = {}
for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
    if page.stem.endswith(".zh"):
        continue
    name = page.stem
    if page.parent == ROOT / "docs" / "guides":
        GUIDES[name] = page
    elif (ROOT / "docs" / "guides" / page.name).exists():
        # An explanation and a guide of the same subject.
        name = f"{page.parent.name}/{name}"
    PAGES[name] = page
PROGRAMS = (
    "accelerate",
    "cat",
    "curl",
    "deepspeed",
    "dmesg",
    "docker",
    "drumline",
    "echo",
    "export",
    "head",
    "hf",
    "ls",
    "make",
    "mpirun",
    "pip",
    "python",
    "rm",
    "sed",
    "source",
    "srun",
    "tail",
    "torchrun",
    "uvicorn",
    "yes",
)
DRUMLINE: Any = typer.main.get_command(app)


def command_of(name: str) -> Any:
    """Return a command of Drumline or of an installed package. Raises KeyError for one that is
    none."""
    command = DRUMLINE.get_command(None, name)
    if command is None:
        raise KeyError(name)
    return command


def commands(page: Path) -> list[str]:
    """Return the commands of a page: the lines of its bash blocks, what follows "$ " in its console
    blocks, and the lines of its indented code that begin with a program. Comments are left out
    and the parts of a long line are joined."""
    text = page.read_text().replace("\\\n", " ")
    bash = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    console = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", without_blocks, re.MULTILINE)

    lines = "\n".join(bash).splitlines()
    lines += re.findall(r"^\$ (.*)$", "\n".join(console), re.MULTILINE)
    lines += [line for line in indented if line.split()[0] in PROGRAMS]

    without_comments = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    return [line for line in without_comments if line and not line.startswith("#")]


def words_of_commands(line: str) -> list[list[str]]:
    """Return the words of each command between the pipes of a line."""
    found: list[list[str]] = [[]]
    for word in shlex.split(line):
        if word == "|":
            found.append([])
        else:
            found[-1].append(word)
    return found


def parsed(line: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, parameters) of each command of drumline in a line, which may be behind another
    program, or between pipes. Raises click's errors, and KeyError for a command that is none."""
    found = []
    for words in words_of_commands(line):
        if "drumline" not in words:
            continue
        arguments = _arguments_for_typer(words[words.index("drumline") + 1 :])
        if arguments and arguments[0].startswith("-"):
            assert any(arguments[0] in option.opts for option in DRUMLINE.params), line
            found.append((arguments[0], dict[str, Any]()))
        elif words[0] != "docker" or "train" in words:
            # Runs of the pages are not here.
            with mock.patch.object(cli_arguments, "is_there", lambda path: True):
                context = command_of(arguments[0]).make_context(arguments[0], arguments[1:])
            found.append((arguments[0], context.params))
    return found

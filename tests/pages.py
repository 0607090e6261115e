"""The fenced blocks of a page, and a shell that runs its lines with this checkout's `drumline`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.harness import ENV

# Each of these takes one task from nothing to a result. The other pages of docs/guides are run by test_docs_run.py.
TASKS = (
    "first_run",
    "own_data",
    "lora",
    "full_fine_tuning",
    "several_hosts",
    "dpo",
    "online_dpo",
    "distill",
    "distill_on_policy",
    "grpo",
    "grpo_tools",
    "environment_packages",
    "rollout_servers",
    "mixtures",
    "vision_language",
    "embedding_model",
    "encoder_decoder",
    "long_sequences",
    "recipes",
    "own_loop",
    "plan_before_you_buy",
    "when_something_fails",
    "from_trl",
    "from_llama_factory",
    "from_axolotl",
    "serve",
)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run here: (.+?) -->\s*$")
EXITS = re.compile(r"<!-- exits with (\d+) -->\s*$")
ROWS_FILE = re.compile(r"`([\w./-]+\.jsonl)`[:：]\s*$")
FIRST_LINE = re.compile(r"# ([\w./-]+\.\w+)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block. `file` is the file it is written to, if any; `reason` says why it is not run, if it is not."""

    language: str
    text: str
    file: str | None
    reason: str | None
    exit_code: int

    def lines(self) -> list[str]:
        """Return the commands of a bash block: comments left out, continued lines joined."""
        joined = self.text.replace("\\\n", " ")
        without_comments = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines()]
        return [line for line in without_comments if line]


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order.

    A yaml, python or json block whose first line is a comment `# NAME.ext` is that file, and so is a block below a line that ends in
    `` `NAME.jsonl`: ``. The comments `<!-- not run here: … -->` and `<!-- exits with N -->` stand in the line above a block.
    """
    found = []
    for fence in FENCE.finditer(text):
        above = text[: fence.start()]
        not_run = NOT_RUN.search(above)
        exits = EXITS.search(above)
        rows_file = ROWS_FILE.search(above)
        first_line = FIRST_LINE.match(fence[2])
        file = None
        if fence[1] in ("json", "jsonl") and rows_file:
            file = rows_file[1]
        elif fence[1] in ("yaml", "python", "json", "toml") and first_line:
            file = first_line[1]
        found.append(
            Block(
                language=fence[1],
                text=fence[2],
                file=file,
                reason=not_run[1] if not_run else None,
                exit_code=int(exits[1]) if exits else 0,
            )
        )
    return found


def write_programs(folder: Path) -> None:
    """Write `drumline` and `python` of this checkout to `folder`/bin."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, arguments in (("drumline", "-m drumline "), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)


def run_line(
    folder: Path, line: str, timeout_seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run one line of a page in `folder`, which is also its home. `write_programs` has to come first."""
    env = {
        **ENV,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }
    return subprocess.run(
        # The shell has to stay: completion is installed for the shell above the command.
        ["bash", "-c", f"{line}; exit $?"],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )

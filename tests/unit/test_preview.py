"""`drumline preview` shows rows as they are prepared: what is in the loss, what was cut and left
out, and nothing that a terminal obeys."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoImageProcessor

from drumline import cli
from drumline.config.load import load
from drumline.data.cache import TokenCache
from drumline.data.prepare import prepare
from drumline.data.preview import Piece, Reader, escape, find_cut
from drumline.train.preview import Options, View, histogram, shape_of
from tests.harness import LETTERS, vision_rows, write_config, write_rows
from tests.tiny import tiny_vision_dir

HOSTILE = (
    "法国 👨‍👩‍👧 🇫🇷 \x1b[2J\x07 [bold]x[/bold] ⟦not learned⟧ \u202e \ud83d "
    "<script>alert(1)</script>"
)


Row = dict[str, Any]
Show = Callable[..., str]


def chat(question: str, answer: str, **more: Any) -> Row:
    asked = {"role": "user", "content": question}
    return {"messages": [asked, {"role": "assistant", "content": answer, **more}]}


ROWS = [
    chat("two plus three?", "five"),
    chat("two plus three?", "five"),
    chat("empty?", ""),
    chat("The capital? " * 12, "Rome. " * 40),
    chat("not learned?", "no", weight=0),
    chat(HOSTILE.replace("\ud83d", ""), "巴黎 is the capital 🇫🇷.\n\nYes."),
]
WITHOUT_CONTENT = {"messages": [{"role": "user"}]}


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    path = write_config(tmp_path, model, data={"eval": [], "max_length": 200})
    write_rows(tmp_path / "train.jsonl", ROWS)
    return path


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """The preview in this process: what it prints, where it ends with this code."""

    def preview(*arguments: Any, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["preview", *map(str, arguments)])

        assert (ended.value.code or 0) == code

        return capsys.readouterr().out

    return preview


def words(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def learned(text: str) -> str:
    """What stands between the marks of a plain preview."""
    inside = "".join(re.findall("⟦(.*?)⟧", text, re.DOTALL))
    return re.sub("[⏎\n]", "", re.sub("⟨(.*?)⟩", r"<|\1|>", inside))


@pytest.mark.claim("what a preview marks is what is learned")
def test_what_is_marked_is_what_is_learned(
    config: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    text = show(config, "--samples", "9").partition("special token")[2]
    values = load(config, []).config
    folder = config.parent
    cache = TokenCache.open(prepare(values, str(values.model.id), folder).train_cache)
    tokenizer = Reader(values, str(values.model.id), folder, None).chunk_encoder.tokenizer
    wanted = []
    for sample in range(len(cache)):
        for tokens, learn in cache.segments(sample):
            wanted.append(tokenizer.decode(tokens[1:][learn[1:] > 0]))

    assert learned(text) == "".join(wanted).replace("\n", "")
    assert len(wanted) == 5
    assert text.count("━━ pack") == len(cache)
    assert text.count("── row") == 5


def test_counts_name_the_rows(config: Path, show: Show) -> None:
    text = show(config, "data.max_length=150")

    assert "6 rows\n" in text
    assert "1 repeated: train.jsonl:2 (as train.jsonl:1)" in text
    assert "1 with an empty answer: train.jsonl:3" in text
    assert "1 cut at 150 tokens: train.jsonl:4 (" in text
    assert "1 left out, nothing to learn: train.jsonl:5\n" in text
    assert "over 150 █" in text
    assert max(map(len, text.splitlines())) <= 80

    # No answer is left.
    assert "longer than 40 tokens: train.jsonl:" in show(config, "data.max_length=40")

    dropped = show(config, "data.max_length=150", "data.truncation=drop")

    assert "longer than 150 tokens: train.jsonl:4 (" in dropped


def test_a_row_shows_what_was_cut(
    config: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "999")
    text = show(config, "--row", "4", "data.truncation=left").partition("row 4")[2]

    assert "of them cut off" in text
    assert text.index("⟪⟨im_start⟩user") < text.index("⟫") < text.index("⟦")
    assert "two" not in text
    assert show(config, "--row", "7", code=2) == ""


HARMLESS = (
    "法国",
    "🇫🇷",
    "👨‍👩‍👧",
    "[bold]x[/bold]",
    "<script>",
    "\\x1b[2J\\x07",
    "\\u202e",
    "\\u27e6not learned\\u27e7",
)


def assert_harmless(text: str) -> None:
    for part in HARMLESS:
        assert part in text

    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)


def test_nothing_that_a_terminal_obeys_gets_through(
    config: Path, show: Show, tmp_path: Path
) -> None:
    assert_harmless(show(config, "--row", "6"))

    page = tmp_path / "rows.html"
    show(config, "--html", page)
    written = page.read_text()
    body = written.partition("<body>")[2]
    assert_harmless(html.unescape(re.sub("<[^>]*>", "", body)))

    assert "<script" not in written
    assert "http" not in written
    assert escape("\ud83d\u2028a\tb") == "\\ud83d\\u2028a\\tb"


OWN = """import torch
def rows():
    return [{'x': torch.zeros(3, 8), 'y': 1}] * 2
"""
KINDS = (
    "model={kind: python, path: 'own.py:build'}",
    "algorithm={kind: python, path: 'own.py:loss'}",
    "data.eval=[]",
    "data.train=[{kind: python, path: 'own.py:rows'}]",
)


def test_other_forms(tmp_path: Path, model: Path, show: Show) -> None:
    pairs = show(write_config(tmp_path, model, algorithm={"kind": "dpo"}))

    assert pairs.count("chosen\n") == 3
    assert pairs.count("rejected\n") == 3

    generator = {"kind": "hf", "max_new_tokens": 8}
    grpo = {"kind": "grpo", "rewards": [LETTERS], "generator": generator}
    text = show(write_config(tmp_path, model, algorithm=grpo), "--row", "1")

    assert "rewards (tests.harness:letters) get the completion and" in text
    assert "letter = '" in text
    assert "prompt = '<|im_start|>user\\n" in text

    (tmp_path / "own.py").write_text(OWN)
    own = write_config(tmp_path, model)

    assert "{x: float32[3, 8], y: 1}" in show(own, *KINDS)


@pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)
def test_images(tmp_path: Path, show: Show) -> None:
    seeing = write_config(tmp_path, tiny_vision_dir(tmp_path / "vision"))
    write_rows(tmp_path / "train.jsonl", vision_rows(tmp_path, 3))
    assert "0-0.png: 4 tokens]⟩" in words(show(seeing, "--row", "1"))


def test_rows_that_cannot_be_used_come_after_the_rest(
    config: Path, show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[Row] = [
        WITHOUT_CONTENT,
        {"conversations": [{"from": "ghost", "value": "x"}]},
        {"prompt": None, "completion": "x"},
    ]
    folder = config.parent
    write_rows(folder / "train.jsonl", [ROWS[0], *bad, ROWS[1]])
    (folder / "broken.jsonl").write_text('{"text": "x"}\n{oops\n')
    write_rows(folder / "two.jsonl", [chat("the last question", "the last answer")])
    files = ("train.jsonl", "broken.jsonl", "two.jsonl")
    sources = ", ".join(f"{{kind: file, path: {file}}}" for file in files)
    several = f"data.train=[{sources}]"
    text = words(show(config, several, "--samples", "9", code=2))
    unusable = "train.jsonl:2, train.jsonl:3, train.jsonl:4, broken.jsonl:2"

    assert f"4 that cannot be used: {unusable}" in text
    assert "the last answer" in text

    assert "train.jsonl:5" in show(config, several, "--row", "5")
    assert "train.jsonl:3" in show(config, "--row", "3", code=2)
    # Which row that is nobody knows.
    assert "broken.jsonl:2" in show(config, several, "--row", "8", code=2)

    with pytest.raises(SystemExit):
        cli.main(["preview", str(config), "--html", str(config)])

    assert "is no page" in capsys.readouterr().err
    assert "model:" in config.read_text()


def test_one_reason_of_many_rows_comes_once(config: Path, show: Show) -> None:
    write_rows(config.parent / "train.jsonl", [ROWS[0], *[WITHOUT_CONTENT] * 3])
    text = words(show(config, "--samples", "9", code=2))

    assert text.count("has no text under 'content'") == 1
    assert "3 × row 2: messages[0] has no text" in text


@pytest.fixture
def view() -> View:
    console = Console(color_system="truecolor", force_terminal=True, no_color=False)
    return View(console, Options())


def test_colours_say_what_is_in_the_loss(view: View) -> None:
    """What is not in the loss has one style, and what is has a background."""
    pieces = [
        Piece("a", "context"),
        Piece("b", "context"),
        Piece("c", "learned"),
        Piece("d", "learned"),
    ]
    styles = [str(span.style) for span in view.text(pieces).spans]

    assert styles == ["black on green", "black on bright_green"]


def test_parts(view: View) -> None:
    full = np.arange(10)

    assert find_cut(full, full, left=False) == (10, 10)
    assert find_cut(full, full[:4], left=False) == (4, 10)
    assert find_cut(full, full[6:], left=True) == (0, 6)
    assert find_cut(full, np.array([0, 1, 9]), left=False) == (2, 9)

    one, two, over = histogram([1, 1, 2, 50], 10)

    assert one.split() == ["1", "to", "1", "█" * 40, "2"]
    assert two.split() == ["2", "to", "2", "█" * 20, "1"]
    assert over.split() == ["over", "10", "█" * 20, "1"]
    assert len(histogram([50], 10)) == 1
    assert len(histogram(list(range(1, 100)), 100)) == 8

    assert shape_of(([1, "a"], object())) == "([1, 'a'], object)"
    assert not view.lacks_colors

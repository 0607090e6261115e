"""`drumline preview` shows rows as they are prepared: what is in the loss, what was cut and left out, and nothing that a terminal obeys."""

from __future__ import annotations

import html
import re
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
from tests.tiny import tiny_model_dir, tiny_vision_dir

HOSTILE = "法国 👨‍👩‍👧 🇫🇷 \x1b[2J\x07 [bold]x[/bold] ⟦not learned⟧ \u202e \ud83d <script>alert(1)</script>"


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, **more},
        ]
    }


ROWS = [
    chat("two plus three?", "five"), chat("two plus three?", "five"), chat("empty?", ""), chat("The capital? " * 12, "Rome. " * 40),
    chat("not learned?", "no", weight=0), chat(HOSTILE.replace("\ud83d", ""), "巴黎 is the capital 🇫🇷.\n\nYes."),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    path = write_config(tmp_path, model, data={"eval": [], "max_length": 200})
    write_rows(tmp_path / "train.jsonl", ROWS)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["preview", *map(str, arguments)])
    assert (ended.value.code or 0) == code
    return capsys.readouterr().out


def learned(text: str) -> str:
    """What stands between the marks of a plain preview."""
    inside = "".join(re.findall("⟦(.*?)⟧", text, re.DOTALL))
    return re.sub("[⏎\n]", "", re.sub("⟨(.*?)⟩", r"<|\1|>", inside))


@pytest.mark.claim("what a preview marks is what is learned")
def test_what_is_marked_is_what_is_learned(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    text = shown(capsys, config, "--samples", "9").partition("special token")[2]
    loaded = load(config, [])
    cache = TokenCache.open(
        prepare(loaded.config, str(loaded.config.model.id), config.parent).train_cache
    )
    tokenizer = Reader(
        loaded.config, str(loaded.config.model.id), config.parent, None
    ).chunk_encoder.tokenizer
    wanted = [
        tokenizer.decode(tokens[1:][learn[1:] > 0])
        for i in range(len(cache))
        for tokens, learn in cache.segments(i)
    ]
    assert learned(text) == "".join(wanted).replace("\n", "") and len(wanted) == 5
    assert text.count("━━ pack") == len(cache) and text.count("── row") == 5


def test_counts_name_the_rows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, config, "data.max_length=150")
    assert (
        "6 rows\n" in text
        and "1 repeated: train.jsonl:2 (as train.jsonl:1)" in text
        and "1 with an empty answer: train.jsonl:3" in text
    )
    assert (
        "1 cut at 150 tokens: train.jsonl:4 (" in text
        and "1 left out, nothing to learn: train.jsonl:5\n" in text
    )
    assert "over 150 █" in text and all(len(line) <= 80 for line in text.splitlines())
    assert "longer than 40 tokens: train.jsonl:" in shown(capsys, config, "data.max_length=40"), (
        "no answer is left"
    )
    assert "longer than 150 tokens: train.jsonl:4 (" in shown(
        capsys, config, "data.max_length=150", "data.truncation=drop"
    )


def test_a_row_shows_what_was_cut(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "999")
    text = shown(capsys, config, "--row", "4", "data.truncation=left").partition("row 4")[2]
    assert "of them cut off" in text and text.index("⟪⟨im_start⟩user") < text.index(
        "⟫"
    ) < text.index("⟦")
    assert "two" not in text
    assert shown(capsys, config, "--row", "7", code=2) == ""


def test_nothing_that_a_terminal_obeys_gets_through(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "rows.html"
    text = shown(capsys, config, "--row", "6")
    shown(capsys, config, "--html", page)
    written = page.read_text()
    for each in (text, html.unescape(re.sub("<[^>]*>", "", written.partition("<body>")[2]))):
        assert all(
            part in each
            for part in (
                "法国",
                "🇫🇷",
                "👨‍👩‍👧",
                "[bold]x[/bold]",
                "<script>",
                "\\x1b[2J\\x07",
                "\\u202e",
            )
        )
        assert "\\u27e6not learned\\u27e7" in each and not re.search(
            "[\x00-\x08\x0b-\x1f\u202e]", each
        )
    assert "<script" not in written and "http" not in written
    assert escape("\ud83d\u2028a\tb") == "\\ud83d\\u2028a\\tb"


def test_other_forms(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = shown(capsys, write_config(tmp_path, model, algorithm={"kind": "dpo"}))
    assert pairs.count("chosen\n") == pairs.count("rejected\n") == 3
    rewards = write_config(
        tmp_path,
        model,
        algorithm={
            "kind": "grpo",
            "rewards": [LETTERS],
            "generator": {"kind": "hf", "max_new_tokens": 8},
        },
    )
    text = shown(capsys, rewards, "--row", "1")
    assert (
        "rewards (tests.harness:letters) get the completion and" in text
        and "letter = '" in text
        and "prompt = '<|im_start|>user\\n" in text
    )
    own = write_config(tmp_path, model)
    (tmp_path / "own.py").write_text(
        "import torch\ndef rows():\n    return [{'x': torch.zeros(3, 8), 'y': 1}] * 2\n"
    )
    kinds = [
        "model={kind: python, path: 'own.py:build'}",
        "algorithm={kind: python, path: 'own.py:loss'}",
        "data.eval=[]",
    ]
    assert "{x: float32[3, 8], y: 1}" in shown(
        capsys, own, *kinds, "data.train=[{kind: python, path: 'own.py:rows'}]"
    )


@pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)
def test_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeing = write_config(tmp_path, tiny_vision_dir(tmp_path / "vision"))
    write_rows(tmp_path / "train.jsonl", vision_rows(tmp_path, 3))
    assert "0-0.png: 4 tokens]⟩" in " ".join(shown(capsys, seeing, "--row", "1").split())


def test_rows_that_cannot_be_used_come_after_the_rest(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[dict[str, Any]] = [
        {"messages": [{"role": "user"}]}, {"conversations": [{"from": "ghost", "value": "x"}]}, {"prompt": None, "completion": "x"},
    ]  # fmt: skip
    write_rows(config.parent / "train.jsonl", [ROWS[0], *bad, ROWS[1]])
    (config.parent / "broken.jsonl").write_text('{"text": "x"}\n{oops\n')
    write_rows(config.parent / "two.jsonl", [chat("the last question", "the last answer")])
    several = "data.train=[{kind: file, path: train.jsonl}, {kind: file, path: broken.jsonl}, {kind: file, path: two.jsonl}]"
    text = " ".join(shown(capsys, config, several, "--samples", "9", code=2).split())
    assert (
        "4 that cannot be used: train.jsonl:2, train.jsonl:3, train.jsonl:4, broken.jsonl:2" in text
        and "the last answer" in text
    )
    assert "train.jsonl:5" in shown(
        capsys, config, several, "--row", "5"
    ) and "train.jsonl:3" in shown(capsys, config, "--row", "3", code=2)
    assert "broken.jsonl:2" in shown(capsys, config, several, "--row", "8", code=2), (
        "which row that is nobody knows"
    )
    with pytest.raises(SystemExit):
        cli.main(["preview", str(config), "--html", str(config)])
    assert "is no page" in capsys.readouterr().err and "model:" in config.read_text()


def test_one_reason_of_many_rows_comes_once(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(
        config.parent / "train.jsonl",
        [ROWS[0], *({"messages": [{"role": "user"}]} for _ in range(3))],
    )
    text = " ".join(shown(capsys, config, "--samples", "9", code=2).split())
    assert (
        text.count("has no text under 'content'") == 1
        and "3 × row 2: messages[0] has no text" in text
    )


def test_colours_say_what_is_in_the_loss() -> None:
    """What is not in the loss has one style, and what is has a background."""
    view = View(Console(color_system="truecolor", force_terminal=True, no_color=False), Options())
    words = view.text(
        [Piece("a", "context"), Piece("b", "context"), Piece("c", "learned"), Piece("d", "learned")]
    )
    styles = [str(span.style) for span in words.spans]
    assert styles == ["black on green", "black on bright_green"]


def test_parts() -> None:
    full = np.arange(10)
    assert find_cut(full, full, left=False) == (10, 10) and find_cut(
        full, full[:4], left=False
    ) == (
        4,
        10,
    )
    assert find_cut(full, full[6:], left=True) == (0, 6) and find_cut(
        full, np.array([0, 1, 9]), left=False
    ) == (2, 9)
    assert [line.split() for line in histogram([1, 1, 2, 50], 10)] == [
        ["1", "to", "1", "█" * 40, "2"], ["2", "to", "2", "█" * 20, "1"], ["over", "10", "█" * 20, "1"]
    ]  # fmt: skip
    assert len(histogram([50], 10)) == 1 and len(histogram(list(range(1, 100)), 100)) == 8
    assert shape_of(([1, "a"], object())) == "([1, 'a'], object)"
    assert not View(
        Console(color_system="truecolor", force_terminal=True, no_color=False), Options()
    ).plain

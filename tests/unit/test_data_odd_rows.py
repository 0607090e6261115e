"""Rows that other tools and libraries write in their own way: texts that are JSON, functions, questions said twice, arrays, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from drumline.core.data import PAIR_FORMS, PythonSource
from drumline.data.cache import TokenCache
from drumline.data.sources import Row, read_rows
from drumline.data.workers import digest
from tests.tiny import tiny_tokenizer
from tests.unit.test_data_formats import ASK, NO, SAY, SYSTEM, TOOL, read
from tests.unit.test_data_prepare import config, prepare, write_rows


@pytest.mark.parametrize(
    "text",
    ['{"from": "Paris", "to": "Rome"}', '[{"role": "CEO", "name": "Ann"}]', '{"role": "assistant", "content": "Hi"}', '[{"role": null}]'],
)
def test_an_answer_that_is_json_stays_a_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, {"prompt": "q", "completion": text}).values == {"prompt": "q", "completion": text}


def test_functions_beside_messages_are_tools(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    assert read(tmp_path, {"messages": [ASK, call], "functions": [TOOL]}).values["tools"] == [TOOL]


@pytest.mark.parametrize("name", ["prompt", "question", "instruction", "input"])
def test_a_question_that_both_sides_hold_is_said_once(tmp_path: Path, name: str) -> None:
    sides: dict[str, Any] = {"chosen": [SYSTEM, ASK, SAY], "rejected": [SYSTEM, ASK, NO]}
    assert read(tmp_path, {name: "hi", **sides}, PAIR_FORMS).values == sides


def test_values_of_numpy_and_pandas_are_plain(tmp_path: Path) -> None:
    (tmp_path / "arrays_of_a_test.py").write_text(
        "import numpy as np, pandas as pd\n"
        "def rows():\n"
        "    talk = np.array([{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])\n"
        "    yield {'messages': talk, 'embedding': np.zeros(3), 'score': np.float32(1), 'other': pd.NA, 0: 'x'}\n"
    )
    (row,) = read_rows(PythonSource(path="arrays_of_a_test.py:rows"), tmp_path)
    assert row.values["messages"] == [ASK, SAY]
    assert {name: row.extra.get(name) for name in ("embedding", "score", "other", "0")} == {
        "embedding": [0.0] * 3,
        "score": 1.0,
        "other": None,
        "0": "x",
    }


def test_a_picture_is_its_pixels() -> None:
    pictures = [Image.new("RGB", (2, 2), color) for color in ("red", "red", "blue")]
    one, same, other = (digest(Row("", {"image": picture})) for picture in pictures)
    assert one == same != other


def test_holdout_where_a_block_of_rows_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.data.stage.BLOCK_ROWS", 8)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path, 50)
    made = prepare(config(tmp_path, holdout=1), str(tmp_path / "tokenizer"), tmp_path)
    assert made.eval is not None and TokenCache.open(made.train).info["held_out"] == 1

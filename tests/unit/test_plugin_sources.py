"""Sources of one's own: a function by path, a spec by path, a spec of an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.config.config import Config
from drumline.config.load import load, schema
from drumline.data.fingerprint import cache_key
from drumline.data.sources import read_rows
from drumline.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

MINE = """
import itertools
from typing import Literal
from drumline.config.data import SourceSpec

def rows(count=2, word="one"):
    for number in range(count):
        yield {"text": f"{word} {number}"}

def wrong():
    yield {"text": "one"}
    yield 3

def endless(word="one"):
    return ({"text": f"{word} {number}", "n": number} for number in itertools.count())

def broken():
    yield {"text": "one"}
    raise OSError("the tape is torn")

class Endless(SourceSpec):
    kind: Literal["endless"] = "endless"
    def rows(self, base_dir):
        return endless()

class Counted(SourceSpec):
    kind: Literal["counted"] = "counted"
    to: int
    def rows(self, base_dir):
        return [{"text": str(number)} for number in range(self.to)]
"""


def config(folder: Path, source: str, more: str = "") -> Config:
    (folder / "mine.py").write_text(MINE)
    path = folder / "a.yaml"
    path.write_text(f"data: {{train: [{source}]{more}}}\nrun: {{steps: 2}}\n")
    return load(path, []).config


def texts(config: Config, folder: Path) -> list[str]:
    return [row.values["text"] for row in read_rows(config.data.train[0], folder)]


def test_rows_of_a_function(tmp_path: Path) -> None:
    made = config(
        tmp_path, "{kind: python, path: 'mine.py:rows', options: {count: 3, word: two}, limit: 2}"
    )
    assert texts(made, tmp_path) == ["two 0", "two 1"]
    first = next(read_rows(made.data.train[0], tmp_path))
    assert first.origin == "mine.py:rows row 1"
    assert Config.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    "source", ["{kind: python, path: 'mine.py:endless'}", "{kind: 'mine.py:Endless'}"]
)
def test_rows_without_end_need_a_limit_or_a_stream(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream is known by its code and settings, any other rows by those that `limit` may take."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def key(source: str, more: str) -> str:
        made = config(tmp_path, source, more)
        return cache_key(made, made.data.train, "train", str(tmp_path / "tokenizer"), tmp_path)

    limited, longer = (source.replace("}", f", limit: {count}}}") for count in (3, 4))
    assert key(limited, "") == key(limited, "") != key(longer, "")
    stream = ", stream: {rows: 8}"
    assert key(source, stream) == key(source, stream) != key(source, ", stream: {rows: 9}")
    one = config(tmp_path, source).data.train[0].code(tmp_path)
    monkeypatch.setattr(f"{__name__}.MINE", MINE.replace("itertools.count()", "itertools.count(1)"))
    (tmp_path / "changed").mkdir()
    assert config(tmp_path / "changed", source).data.train[0].code(tmp_path / "changed") != one


def test_behind_a_condition_more_rows_count_than_the_limit(tmp_path: Path) -> None:
    one, two = (
        config(
            tmp_path, f"{{kind: python, path: 'mine.py:rows', options: {{count: {n}}}, limit: 1}}"
        ).data.train[0]
        for n in (2, 3)
    )
    assert one.content(tmp_path) == two.content(tmp_path)
    one, two = (source.model_copy(update={"where": "text <> 'one 0'"}) for source in (one, two))
    assert one.content(tmp_path) != two.content(tmp_path)


def test_a_spec_by_path(tmp_path: Path) -> None:
    made = config(tmp_path, "{kind: 'mine.py:Counted', to: 3}")
    assert texts(made, tmp_path) == ["0", "1", "2"]
    # As ranks read it.
    assert Config.model_validate(made.model_dump(mode="json")).data.train == made.data.train
    assert made.data.train[0].content(tmp_path) != config(
        tmp_path, "{kind: 'mine.py:Counted', to: 4}"
    ).data.train[0].content(tmp_path)


@pytest.mark.parametrize(
    ("source", "error", "line"),
    [
        (
            "{kind: python, path: 'mine.py:row'}",
            ConfigError,
            "has no function 'row'; did you mean 'rows'",
        ),
        (
            "{kind: python, path: 'mine.py:rows', options: {to: 1}}",
            ConfigError,
            "calling mine.py:rows raised TypeError",
        ),
        ("{kind: python, path: 'mine.py:wrong'}", DataError, "row 2 is int, not columns"),
        ("{kind: python, path: 'mine.py:broken'}", DataError, "the tape is torn"),
        ("{kind: 'mine.py:Counted'}", ConfigError, "'to' is missing"),
        ("{kind: 'mine.py:rows'}", ConfigError, "is no data source"),
        ("{kind: sqlight, path: x}", ConfigError, "no kind 'sqlight' here"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, source: str, error: type[Exception], line: str
) -> None:
    with pytest.raises(error) as raised:
        texts(config(tmp_path, source), tmp_path)
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_the_schema_knows_python() -> None:
    assert "PythonSource" in schema()["$defs"]

"""Rows from every kind of source, and the one line that each bad input gives."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from drumline.config.data import Source, SourceSpec
from drumline.data.sources import Row, read_rows
from drumline.errors import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def rows(base: Path, **source: Any) -> list[Row]:
    return list(read_rows(TypeAdapter(Source).validate_python(source), base))


def jsonl(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def complaint(base: Path, **source: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows(base, **source)
    assert "\n" not in caught.value.line()
    assert caught.value.exit_code == 2
    return caught.value.line()


# ----------------------------------------------------------------------------------------------------------- good input


def test_jsonl_rows_know_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "é"}\n\n{"text": "two"}', encoding="utf-8")
    assert rows(tmp_path, kind="file", path="a.jsonl") == [
        Row("a.jsonl:1", {"text": "é"}),
        Row("a.jsonl:3", {"text": "two"}),
    ]


def test_the_three_forms_and_their_mapping(tmp_path: Path) -> None:
    jsonl(
        tmp_path / "a.jsonl", {"messages": CHAT}, {"prompt": "p", "completion": "c"}, {"text": "t"}
    )
    assert [row.values for row in rows(tmp_path, kind="file", path="a.jsonl")] == [
        {"messages": CHAT},
        {"prompt": "p", "completion": "c"},
        {"text": "t"},
    ]
    jsonl(tmp_path / "b.jsonl", {"q": "p", "a": "c", "text": "not this"})
    mapped = rows(tmp_path, kind="file", path="b.jsonl", columns={"prompt": "q", "completion": "a"})
    assert mapped[0].values == {"prompt": "p", "completion": "c"}


def test_one_message_is_a_list_of_one_where_a_list_may_be(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "yes"}
    jsonl(tmp_path / "a.jsonl", {"q": CHAT[:1], "a": answer})
    (found,) = rows(
        tmp_path, kind="file", path="a.jsonl", columns={"prompt": "q", "completion": "a"}
    )
    assert found.values == {"prompt": CHAT[:1], "completion": [answer]}
    jsonl(tmp_path / "b.jsonl", {"q": CHAT[:1], "a": {"text": "yes"}})
    assert "column 'a' is dict" in complaint(
        tmp_path, kind="file", path="b.jsonl", columns={"prompt": "q", "completion": "a"}
    )


def test_tables(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [["prompt", "completion"], ["one,\ntwo", "x" * 200_000], ["ü", "007"]]
        )
    found = rows(tmp_path, kind="file", path="a.csv")
    assert [row.origin for row in found] == ["a.csv:2", "a.csv:4"]
    assert found[0].values == {"prompt": "one,\ntwo", "completion": "x" * 200_000}
    assert found[1].values["completion"] == "007", "text stays text"
    (tmp_path / "a.tsv").write_text("text\tother\nhello, you\t1\n")
    assert rows(tmp_path, kind="file", path="a.tsv")[0].values == {"text": "hello, you"}


def test_parquet_and_padded_messages(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    chat = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "yes", "name": None},
    ]
    parquet.write_table(pyarrow.table({"messages": [chat, chat]}), tmp_path / "a.parquet")
    found = rows(tmp_path, kind="file", path="a.parquet")
    assert [row.origin for row in found] == ["a.parquet row 1", "a.parquet row 2"]
    assert "name" not in found[0].values["messages"][1], (
        "a key that only other messages have is absent, not null"
    )


def test_json_array_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=1))
    jsonl(tmp_path / "b.json", {"text": "three"})
    assert [row.values["text"] for row in rows(tmp_path, kind="file", path="*.json")] == [
        "one",
        "two",
        "three",
    ]


def test_text_documents_are_parted_by_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf\none\r\ntwo\n\r\n \n\nthree\n")
    assert rows(tmp_path, kind="file", path="a.txt") == [
        Row("a.txt:2", {"text": "one\ntwo"}),
        Row("a.txt:7", {"text": "three"}),
    ]


def test_glob_is_sorted_and_limit_counts_over_files(tmp_path: Path) -> None:
    for name in "cab":
        jsonl(tmp_path / f"{name}.jsonl", {"text": name + "1"}, {"text": name + "2"})
    found = rows(tmp_path, kind="file", path="*.jsonl", limit=3)
    assert [row.values["text"] for row in found] == ["a1", "a2", "b1"]


@pytest.mark.slow
def test_tasks_are_dealt_evenly_and_keep_their_name(tmp_path: Path) -> None:
    source = {
        "kind": "tasks",
        "tasks": {"basic_arithmetic": {"max_digits": 1}, "leg_counting": {}},
        "size": 5,
        "seed": 3,
    }
    found = rows(tmp_path, **source)
    assert [row.extra["task"] for row in found] == ["basic_arithmetic", "leg_counting"] * 2 + [
        "basic_arithmetic"
    ]
    assert found[4].origin == "tasks/basic_arithmetic:3"
    assert found == rows(tmp_path, **source), "a seed gives the same rows again"
    assert found != rows(tmp_path, **{**source, "seed": 4})
    assert all(isinstance(row.values["completion"], str) for row in found)


def test_saved_dataset_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list([{"messages": CHAT}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "two")
    assert rows(tmp_path, kind="saved", path="one") == [Row("one row 1", {"messages": CHAT})]
    assert len(rows(tmp_path, kind="saved", path="two", split="test")) == 1
    assert "holds the splits train, test, but `split` is not set" in complaint(
        tmp_path, kind="saved", path="two"
    )
    assert "no split 'train'" in complaint(tmp_path, kind="saved", path="one", split="train")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.mark.usefixtures("offline")
def test_hub_dataset_whole_and_as_a_stream(tmp_path: Path) -> None:
    """`datasets` takes a folder of data files for a dataset of the hub: the same code without a network."""
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "train.jsonl", *({"text": f"row {n}"} for n in range(5)))
    repository = str(tmp_path / "data")
    whole = rows(tmp_path, kind="hub", id=repository, limit=3)
    assert [row.values["text"] for row in whole] == ["row 0", "row 1", "row 2"]
    assert rows(tmp_path, kind="hub", id=repository, limit=3, streaming=True) == whole
    assert "nosplit" in complaint(tmp_path, kind="hub", id=repository, split="nosplit")
    assert "BuilderConfig 'noname' not found" in complaint(
        tmp_path, kind="hub", id=repository, name="noname"
    )


@pytest.mark.usefixtures("offline")
def test_formats_of_a_stream_are_found_as_well(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    jsonl(tmp_path / "data" / "train.jsonl", *({"conversations": turns, "id": n} for n in range(3)))
    for streaming in (False, True):
        found = rows(tmp_path, kind="hub", id=str(tmp_path / "data"), limit=3, streaming=streaming)
        assert [(row.format, row.values) for row in found] == [("sharegpt", {"messages": CHAT})] * 3


@pytest.mark.usefixtures("offline")
def test_hub_dataset_while_offline(tmp_path: Path) -> None:
    line = complaint(tmp_path, kind="hub", id="nobody/nothing")
    assert line.startswith(
        "hub/nobody/nothing: the hub dataset cannot be reached: this machine is offline"
    )


# ------------------------------------------------------------------------------------------------------------ bad input


def test_missing_file_and_empty_glob(tmp_path: Path) -> None:
    assert f"no such file: {tmp_path}/gone.jsonl" in complaint(
        tmp_path, kind="file", path="gone.jsonl"
    )
    assert "no file matches" in complaint(tmp_path, kind="file", path="*.jsonl")
    assert "the folder holds no file with rows" in complaint(tmp_path, kind="file", path=".")


@pytest.mark.parametrize(
    "keys", [{"kind": "file"}, {"kind": "saved"}, {"kind": "sql", "query": "t"}]
)
def test_a_home_of_nobody(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = "~no-such-user/rows.jsonl"
    assert SourceSpec.long(path, tmp_path) == {"kind": "file", "path": path}
    assert f"{tmp_path}/{path}" in complaint(tmp_path, path=path, **keys)


def test_unknown_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("x")
    assert "unknown kind of file '.docx'" in complaint(tmp_path, kind="file", path="a.docx")


def test_empty_dataset(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv", "a.txt"):
        (tmp_path / name).write_text("\n")
        assert (
            complaint(tmp_path, kind="file", path=name)
            == f"{name}: the dataset is empty: it has no rows"
        )


def test_malformed_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": oops}\n')
    assert complaint(tmp_path, kind="file", path="a.jsonl").startswith(
        "a.jsonl:2: not JSON: Expecting value at column 10"
    )
    (tmp_path / "b.jsonl").write_text("[1]\n{}\n")
    assert "b.jsonl:1: a row must be a JSON object, this is a list" in complaint(
        tmp_path, kind="file", path="b.jsonl"
    )
    (tmp_path / "c.json").write_text('[{"text": "a"},\n {"text": }]')
    assert complaint(tmp_path, kind="file", path="c.json").startswith("c.json:2: not JSON")
    (tmp_path / "d.jsonl").write_text("[" * 200_000 + "\n")
    assert "d.jsonl:1: not JSON" in complaint(tmp_path, kind="file", path="d.jsonl")


def test_bad_utf8_names_line_and_column(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.txt"):
        (tmp_path / name).write_bytes(
            b"text\n" + b"caf\xe9\n" if name != "a.jsonl" else b'{"text": "x"}\n' + b"caf\xe9\n"
        )
        assert complaint(tmp_path, kind="file", path=name).startswith(
            f"{name}:2: not UTF-8: byte 0xe9 at column 4"
        )


def test_lone_surrogate_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}\n')
    assert "holds a lone surrogate" in complaint(tmp_path, kind="file", path="a.jsonl")


def test_missing_column_names_row_and_columns(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"q": "1", "a": "2"}, {"q": "1", "b": "2"})
    line = complaint(
        tmp_path, kind="file", path="a.jsonl", columns={"prompt": "q", "completion": "a"}
    )
    assert "a.jsonl:2: row 2 has no column 'a'; its columns are: q, b" in line
    assert (
        "a.jsonl:1: row 1 has no messages, or prompt and completion, or text; its columns are: q, a"
        in complaint(tmp_path, kind="file", path="a.jsonl")
    )
    assert "different kinds" in complaint(
        tmp_path, kind="file", path="a.jsonl", columns={"prompt": "q", "text": "a"}
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": None}, "row 1: column 'text' is null, not text"),
        ({"text": 7}, "row 1: column 'text' is int, not text"),
        ({"messages": "hi"}, "row 1: column 'messages' is str, not a list of messages"),
        ({"messages": []}, "row 1: column 'messages' is an empty list, not a list of messages"),
        ({"messages": ["hi"]}, "row 1: messages[0] is str, not {role, content}"),
        (
            {"messages": [{"by": "user", "value": "hi"}]},
            "row 1: messages[0] has no text under 'role'; its keys are: by, value",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "row 1: messages[0] has no text under 'content'",
        ),
        (
            {"prompt": "p", "completion": 3},
            "row 1: column 'completion' is int, not text or a list of messages",
        ),
    ],
)
def test_wrong_types(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    jsonl(tmp_path / "a.jsonl", row)
    assert complaint(tmp_path, kind="file", path="a.jsonl").startswith("a.jsonl:1: " + says)


def test_tables_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,b\none,1\ntwo,2,3\n")
    assert complaint(tmp_path, kind="file", path="a.csv").startswith(
        "a.csv:3: 3 fields, but the header has 2"
    )
    (tmp_path / "b.csv").write_text('text\n"open\n')
    assert complaint(tmp_path, kind="file", path="b.csv").startswith("b.csv:2: not a table")
    (tmp_path / "c.csv").write_text("text,text\n1,2\n")
    assert "the header names a column twice" in complaint(tmp_path, kind="file", path="c.csv")
    (tmp_path / "d.parquet").write_text("nothing of the kind")
    assert complaint(tmp_path, kind="file", path="d.parquet").startswith(
        "d.parquet: not a Parquet file"
    )


def test_refused_tasks(tmp_path: Path) -> None:
    assert "tasks/nope: reasoning-gym refuses this task" in complaint(
        tmp_path, kind="tasks", tasks={"nope": {}}
    )
    assert "unexpected keyword argument 'foo'" in complaint(
        tmp_path, kind="tasks", tasks={"leg_counting": {"foo": 1}}
    )
    assert "min_digits must be positive" in complaint(
        tmp_path, kind="tasks", tasks={"basic_arithmetic": {"min_digits": -1}}
    )
    assert "size and seed are keys of the source" in complaint(
        tmp_path, kind="tasks", tasks={"leg_counting": {"seed": 1}}
    )
    assert "tasks/rush_hour:1: this task has no written answer" in complaint(
        tmp_path, kind="tasks", tasks={"rush_hour": {}}, size=1
    )


def test_saved_folder_that_is_none(tmp_path: Path) -> None:
    assert "not a saved dataset" in complaint(tmp_path, kind="saved", path="gone")
    assert "neither a `Dataset` directory" in complaint(tmp_path, kind="saved", path=".")

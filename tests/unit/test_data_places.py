"""Sources written as a path alone; files in every format and compression, in folders, at URLs, and rows of databases."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sqlite3
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pydantic import TypeAdapter

from drumline.config.config import Config
from drumline.config.data import Source, kind_of_file
from drumline.config.load import load, load_text, make_draft, validate_draft
from drumline.data.file_locations import locate
from drumline.data.fingerprint import cache_key
from drumline.data.sources import read_rows
from drumline.errors import ConfigError, DataError, EnvironmentFault, UserError
from tests import buckets

ROWS = [{"prompt": f"p{number}", "completion": f"é{number}"} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)


def source(value: Any, base: Path) -> Any:
    return TypeAdapter(Source).validate_python(value, context={"base_dir": base})


def values(value: Any, base: Path) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(source(value, base), base)]


def complaint(value: Any, base: Path, error: type[UserError] = DataError) -> str:
    with pytest.raises(error) as caught:
        values(value, base)
    assert "\n" not in caught.value.line()
    return caught.value.line()


def zstd(data: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(data, codec="zstd", asbytes=True)


def parquet(path: Path) -> bytes:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path.read_bytes()


def arrow(path: Path, stream: bool) -> bytes:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(
        str(path), table.schema
    ) as writer:
        writer.write(table)
    return path.read_bytes()


# ---------------------------------------------------------------------------------------------------------- short forms


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("data: rows.jsonl", [{"path": "rows.jsonl"}]),
        ("data: [a.jsonl, b.csv.gz]", [{"path": "a.jsonl"}, {"path": "b.csv.gz"}]),
        ("data: {train: 's3://bucket/rows/*.parquet'}", [{"path": "s3://bucket/rows/*.parquet"}]),
        (
            "data: {train: [a.jsonl, {path: b.jsonl, limit: 3}]}",
            [{"path": "a.jsonl"}, {"path": "b.jsonl", "limit": 3}],
        ),
        ("data: {train: owner/name}", [{"id": "owner/name"}]),
        ("data: {train: owner/name.jsonl}", [{"path": "owner/name.jsonl"}]),
        ("data: {train: 'modelscope:owner/name'}", [{"id": "modelscope:owner/name"}]),
        ("data: {train: hub:squad}", [{"id": "squad"}]),
        ("data: {train: {id: owner/name, split: test}}", [{"id": "owner/name", "split": "test"}]),
        (
            "data: {train: 'tasks:leg_counting, rush_hour'}",
            [{"tasks": {"leg_counting": {}, "rush_hour": {}}}],
        ),
        ("data: {train: {query: t, path: rows.db}}", [{"query": "t", "path": "rows.db"}]),
        ("data: {train: digits, eval: rows.txt}", [{}, {"path": "rows.txt"}]),
    ],
)
def test_a_source_may_be_a_text(text: str, wanted: list[dict[str, Any]]) -> None:
    """From a file, by an override, and with an override into what it stands for."""
    for config in (load_text(text, []), load_text("run: {seed: 1}", [text.replace(": ", "=", 1)])):
        found = [*config.data.train, *config.data.eval]
        assert [each.model_dump(exclude_defaults=True) for each in found] == wanted
    assert load_text(text, ["data.train.0.domain=x"]).data.train[0].domain == "x"
    assert (
        load_text(text, []).data.train[0].kind
        == load_text(text, ["data.max_length=7"]).data.train[0].kind
    )


def test_a_text_is_what_lies_there(tmp_path: Path) -> None:
    """A folder named like a hub id, a saved dataset, and a folder that a YAML elsewhere names."""
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("data: [owner/name, saved, owner/other]")
    assert [each.kind for each in load(tmp_path / "mine.yaml", []).config.data.train] == [
        "file",
        "saved",
        "hub",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: 3", "data: 3 given, keys and values are wanted"),
        ("data: {train: []}", "at least 1 is wanted"),
        ("data: {train: ['']}", "it is empty: name a file, a folder or a URL"),
        ("data: {train: [3]}", "data.train.0: 3 given"),
        ("data: {train: {path: 3}}", "data.train.0.path: 3 given, text is wanted"),
        ("data: {train: [{limit: 3}]}", "which `kind` this is was left out"),
        ("data: {train: 's3://me@bucket/x.jsonl'}", "it holds a user, a password or options"),
        ("data: {train: 'https://host/x.jsonl?key=abc'}", "it holds a user, a password or options"),
        (
            "data: {train: {kind: sql, query: t}}",
            "name the database: `path` of an SQLite file, or `url_env`",
        ),
        (
            "data: {train: {query: t, path: 'postgresql://host/name'}}",
            "a database's URL may hold a password",
        ),
    ],
)
def test_a_wrong_source_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text, [])
    assert (
        says in caught.value.line()
        and "abc" not in caught.value.line()
        and "\n" not in caught.value.line()
    )


# ----------------------------------------------------------------------------------------------------------------- files


@pytest.mark.claim(
    "rows in the formats of other tools are read as they are, from a path alone, in every kind of file"
)
@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstd),
    ],
)
def test_every_format_in_every_compression(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_excel(tmp_path / "x", index=False, engine="openpyxl")
    files = {
        "a.jsonl": LINES,
        "a.json": json.dumps(ROWS).encode(),
        "a.csv": CSV.encode(),
        "a.tsv": CSV.replace(",", "\t").encode(),
        "a.parquet": parquet(tmp_path / "p"),
        "file.arrow": arrow(tmp_path / "f", False),
        "stream.arrow": arrow(tmp_path / "s", True),
        "a.xlsx": (tmp_path / "x").read_bytes(),
    }
    for name, content in files.items():
        (tmp_path / f"{name}{ending}").write_bytes(pack(content))
        assert kind_of_file(f"{name}{ending}") == Path(name).suffix
        assert values(f"{name}{ending}", tmp_path) == ROWS, name


def test_packed_in_two_parts(tmp_path: Path) -> None:
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)):
        (tmp_path / name).write_bytes(pack(LINES[:30]) + pack(LINES[30:]))
        assert values(name, tmp_path) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(LINES * 100)[:-20],
            "a.jsonl.gz: breaks off: Compressed file ended",
        ),
        ("a.jsonl.zst", zstd(LINES)[:-3], "a.jsonl.zst: breaks off: "),
        ("a.jsonl.bz2", LINES, "a.jsonl.bz2: breaks off: Invalid data stream"),
        ("a.jsonl.xz", LINES, "a.jsonl.xz: breaks off: "),
        ("a.parquet.gz", gzip.compress(LINES), "a.parquet.gz: not a Parquet file"),
        ("a.arrow", LINES, "a.arrow: not an Arrow file"),
        ("a.xlsx", LINES, "a.xlsx: not an Excel file"),
        ("a.gz", LINES, "a.gz: unknown kind of file ''"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert complaint(name, tmp_path).startswith(says)


def test_sheets(tmp_path: Path) -> None:
    import pandas

    with pandas.ExcelWriter(tmp_path / "a.xlsx") as book:
        pandas.DataFrame(ROWS).to_excel(book, sheet_name="one", index=False)
        pandas.DataFrame([{"prompt": 7, "completion": 2.5}, {}]).to_excel(
            book, sheet_name="two", index=False
        )
    assert "has 2 sheets — set `sheet` of the source to 'one' or 'two'" in complaint(
        "a.xlsx", tmp_path
    )
    assert "has no sheet 'three'" in complaint({"path": "a.xlsx", "sheet": "three"}, tmp_path)
    assert values({"path": "a.xlsx", "sheet": "two"}, tmp_path) == [
        {"prompt": "7", "completion": "2.5"}
    ]


def test_a_folder_is_its_files_of_one_split(tmp_path: Path) -> None:
    for name in (
        "data/train-00000-of-00002",
        "data/train-00001-of-00002",
        "data/test-00000-of-00001",
    ):
        parquet(tmp_path / "rows" / f"{name}.parquet")
    (tmp_path / "rows/README.txt").write_text("about")
    (tmp_path / "rows/dataset_infos.json").write_text("{}")
    assert values("rows", tmp_path) == ROWS * 2
    assert values({"path": "rows", "split": "test"}, tmp_path) == ROWS
    assert (
        "no files of the split 'validation' — set `split` of the source to test or train"
        in complaint({"path": "rows", "split": "validation"}, tmp_path)
    )
    (tmp_path / "rows/more.jsonl").write_bytes(LINES)
    assert (
        "files of several kinds: .jsonl, .parquet — name those that are meant: rows/*.jsonl"
        in complaint("rows", tmp_path)
    )


def test_urls(tmp_path: Path) -> None:
    import fsspec

    there = fsspec.filesystem("memory")
    there.pipe(
        {
            "/feed/train.jsonl.gz": gzip.compress(LINES),
            "/feed/test.jsonl": LINES,
            "/feed/a.parquet": parquet(tmp_path / "p"),
        }
    )
    assert values("memory://feed/train.jsonl.gz", tmp_path) == ROWS
    assert values("memory://feed/*.parquet", tmp_path) == ROWS
    assert "files of several kinds" in complaint("memory://feed", tmp_path)
    there.rm("/feed/a.parquet")
    assert values("memory://feed", tmp_path) == ROWS
    (file,) = locate(source("memory://feed", tmp_path), tmp_path)
    before = file.content_hash()
    there.pipe("/feed/train.jsonl.gz", gzip.compress(LINES * 2))
    assert file.content_hash() != before, "a changed file is another one"
    assert "there is no such file" in complaint("memory://feed/gone.jsonl", tmp_path)
    assert "no file matches" in complaint("memory://feed/*.csv", tmp_path)
    assert "pip install gcsfs" in complaint("gs://bucket/a.jsonl", tmp_path, EnvironmentFault)
    assert "Protocol not known: nonsense" in complaint("nonsense://bucket/a.jsonl", tmp_path)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server(tmp_path: Path, ranges: bool) -> None:
    """One that sends parts of files, which a Parquet file is read by, and one that does not."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "a.jsonl").write_bytes(LINES)
    parquet(tmp_path / "a.parquet")
    handler = partial(Ranged if ranges else Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
            assert values(f"{address}/{name}", tmp_path) == ROWS
        (file,) = locate(source(f"{address}/a.jsonl", tmp_path), tmp_path)
        before = file.content_hash()
        (tmp_path / "a.jsonl").write_bytes(LINES * 2)
        assert file.content_hash() != before
        assert "there is no such file" in complaint(f"{address}/gone.jsonl", tmp_path)
        server.shutdown()
    assert "there is no such file, or it cannot be reached: " in complaint(
        f"{address}/a.jsonl", tmp_path
    )


@pytest.mark.full
def test_a_bucket(tmp_path: Path) -> None:
    """A store that speaks S3: files, a glob and a folder; no key is in a message."""
    import fsspec

    with buckets.server("rows"):
        there = fsspec.filesystem("s3")
        names = {
            "/rows/set/train-0.jsonl.gz": gzip.compress(LINES),
            "/rows/set/test-0.jsonl": LINES,
            "/rows/a.parquet": parquet(tmp_path / "p"),
        }
        for name, content in names.items():
            there.pipe_file(name, content)
        for place in (
            "s3://rows/set",
            "s3://rows/set/train-0.jsonl.gz",
            "s3://rows/*.parquet",
            {"path": "s3://rows/set", "split": "test"},
        ):
            assert values(place, tmp_path) == ROWS
        line = complaint("s3://rows/gone.jsonl", tmp_path)
    assert "there is no such file" in line and buckets.SECRET not in line


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Ranged(Quiet):
    """Sends parts of files."""

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return super().send_head()
        content, parts = path.read_bytes(), self.headers.get("Range")
        self.send_response(206 if parts else 200)
        if parts:
            start, stop = (int(each) for each in parts.removeprefix("bytes=").split("-"))
            self.send_header(
                "Content-Range", f"bytes {start}-{min(stop, len(content) - 1)}/{len(content)}"
            )
            content = content[start : stop + 1]
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        return io.BytesIO(content)


# ------------------------------------------------------------------------------------------------------------------- SQL


@pytest.fixture
def database(tmp_path: Path) -> Path:
    connection = sqlite3.connect(tmp_path / "rows.db")
    connection.execute("create table t (prompt text, completion text)")
    connection.executemany("insert into t values (?, ?)", [tuple(row.values()) for row in ROWS])
    connection.commit()
    connection.close()
    return tmp_path


@pytest.mark.slow
def test_rows_of_a_query(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "SELECT prompt, completion FROM t WHERE prompt > 'p0' ORDER BY prompt DESC"
    assert values({"query": query, "path": "rows.db"}, database) == ROWS[:0:-1]
    monkeypatch.setenv("ROWS_URL", f"sqlite:///{database}/rows.db")
    assert values({"query": "t", "url_env": "ROWS_URL"}, database) == ROWS
    config, key = (
        validate_draft(make_draft("data: {train: {query: t, path: rows.db}}", "c", database), []),
        [],
    )
    for number in range(2):
        key.append(cache_key(_without_text(config), config.data.train, "train", "", database))
        if not number:
            connection = sqlite3.connect(database / "rows.db")
            connection.execute("insert into t values ('p', 'c')")
            connection.commit()
            connection.close()
    assert key[0] != key[1], "another result is another cache"


def _without_text(config: Config) -> Config:
    return load_text("data: digits", ["algorithm={kind: classify, modality: image}"]).model_copy(
        update={"data": config.data}
    )


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"query": "SELECT absent FROM t", "path": "rows.db"},
            "sql/rows.db: the query fails: Execution failed on sql 'SELECT absent FROM t': no such column: absent",
        ),
        ({"query": "DROP TABLE t", "path": "rows.db"}, "sql/rows.db: the query fails: "),
        ({"query": "t", "path": "gone.db"}, "no such file"),
        ({"query": "t", "path": "a.jsonl"}, "not an SQLite file"),
        ({"query": "SELECT * FROM t WHERE 1 = 0", "path": "rows.db"}, "the dataset is empty"),
        (
            {"query": "t", "url_env": "NOWHERE"},
            "url_env NOWHERE: this environment variable is not set",
        ),
        ({"query": "t", "url_env": "BAD_URL"}, "the database cannot be reached: "),
        ({"query": "t", "url_env": "NO_DRIVER"}, "the database's driver is missing"),
    ],
)
def test_a_database_that_cannot_be_read(
    database: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], says: str
) -> None:
    (database / "a.jsonl").write_bytes(LINES)
    monkeypatch.setenv("BAD_URL", "nonsense with sEcret")
    monkeypatch.setenv("NO_DRIVER", "oracle+cx_oracle://me:sEcret@localhost/x")
    line = complaint({"kind": "sql", **keys}, database, UserError)
    assert says in line and "sEcret" not in line
    assert values({"query": "t", "path": "rows.db"}, database) == ROWS, "nothing is lost"


def test_what_is_there_and_no_file_is_not_called_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    assert "it is a device, pipe or socket, not a file" in complaint("rows.jsonl", tmp_path)
    assert "no such file: " in complaint("gone.jsonl", tmp_path)

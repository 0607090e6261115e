"""Rows of files, each with its line, and of sources without files: tasks of reasoning-gym, scikit-learn's digits. Readers stream, so a file
may be larger than memory (except a `.json` array). Each yields `(origin, values)`, where `origin` is `path:line`, or `path row N` (from 1)
in a format without lines. A `.txt` file has documents separated by blank lines."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

from drumline.core.data import (
    PAIR_FORMS,
    PROMPT_FORMS,
    DataConfig,
    DigitsSource,
    FileSource,
    Forms,
    TasksSource,
)
from drumline.core.files import whole_file
from drumline.data.places import DataFile
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB, disk_errors, expanded, import_quietly, judged, parse_json
from drumline.hardware.detect import cache_dir

MOST_LINE = 256 * MIB  # bytes of one row
MOST_ARRAY = 16 * MOST_LINE  # of a file that is one JSON array: it is read whole
# Folders of images that rows hold, and that come with a package.
IMAGES, DIGITS = (
    "images",
    "digits",
)
TEST_DIGITS = 360  # the last ones
_ROWS_TRIED = 16  # other rows, whose answers are tried first
_EDITS_TRIED = 64
Raw = tuple[str, dict[str, Any]]


class TableRow(dict[str, Any]):
    """A row of a typed table, which pads nested values with null keys that only other rows have."""


def read_file(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """The rows of one file. Raises DataError with the line that cannot be parsed."""
    reader = _READERS.get(file.kind)
    if reader is None:
        known = " ".join(sorted(_READERS))
        raise DataError(
            f"unknown kind of file {file.kind!r}", where=file.name, fix=f"Drumline reads {known}"
        )
    with disk_errors("cannot be read", file.name, DataError):
        yield from reader(file, source)


def _lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """Line number (from 1) and text with its newline. Decodes line by line, so that an error of UTF-8 has a line."""
    name = file.name
    with file.open() as stream:
        for number, raw in enumerate(iter(lambda: stream.readline(MOST_LINE + 1), b""), 1):
            if len(raw) > MOST_LINE:
                raise DataError(
                    f"a line of more than {MOST_LINE // MIB} MiB",
                    where=f"{name}:{number}",
                    fix="part it into several rows",
                )
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                raise DataError(
                    what, where=f"{name}:{number}", fix="save the file as UTF-8"
                ) from error


def _row(value: Any, where: str) -> Raw:
    if not isinstance(value, dict):
        raise DataError(
            f"a row must be a JSON object, this is a {type(value).__name__}", where=where
        )
    return where, value


def _jsonl(file: DataFile, source: FileSource) -> Iterator[Raw]:
    for number, line in _lines(file):
        if line.strip():
            where = f"{file.name}:{number}"
            yield _row(
                parse_json(
                    line, where, DataError, fix="each line must be one JSON object", once=True
                ),
                where,
            )


def _json(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """An array of objects; or objects line by line, as in many `.json` files."""
    first = next((line.lstrip()[0] for _, line in _lines(file) if line.strip()), "")
    if first != "[":
        yield from _jsonl(file, source)
        return
    lines, size = list[str](), 0
    for _, line in _lines(file):
        lines.append(line)
        if (size := size + len(line)) > MOST_ARRAY:
            raise DataError(
                f"an array of more than {MOST_ARRAY // MIB} MiB",
                where=file.name,
                fix="write one object a line, into a .jsonl",
            )
    for number, value in enumerate(
        parse_json("".join(lines), file.name, DataError, lines=True, once=True), 1
    ):
        yield _row(value, f"{file.name} row {number}")


def _table(file: DataFile, delimiter: str) -> Iterator[Raw]:
    """CSV or TSV with a header line. Quoted fields may have newlines; a row's line is its first."""
    csv.field_size_limit(2**31 - 1)  # Python's own limit, 128 KiB, is shorter than many a document
    reader = csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            where, line = f"{file.name}:{line}", reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = _header(fields, where)
            elif len(fields) != len(header):
                fix = "quote fields that hold the separator"
                raise DataError(
                    f"{len(fields)} fields, but the header has {len(header)}", where=where, fix=fix
                )
            else:
                yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"not a table: {error}", where=f"{file.name}:{line}") from error


def _header(names: list[str], where: str) -> list[str]:
    if len(set(names)) < len(names):
        raise DataError(f"the header names a column twice: {', '.join(names)}", where=where)
    return names


def _batches(
    file: DataFile, what: str, open_batches: Callable[[IO[bytes]], Iterator[Any]]
) -> Iterator[Raw]:
    """Rows of Arrow's record batches."""
    number = 0
    with file.open(anywhere=True) as stream:
        with judged(what, file.name, DataError):
            batches = open_batches(stream)
        while True:
            with judged(what, file.name, DataError):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            for values in rows:
                number += 1
                yield f"{file.name} row {number}", TableRow(values)
            if batch is None:
                return


def _parquet(file: DataFile, source: FileSource) -> Iterator[Raw]:
    import pyarrow.parquet as parquet

    return _batches(
        file,
        "not a Parquet file",
        lambda stream: parquet.ParquetFile(stream).iter_batches(batch_size=1024),
    )


def _arrow(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Arrow's file format (Feather), or its stream format (which `datasets` writes)."""
    import pyarrow

    def batches(stream: IO[bytes]) -> Iterator[Any]:
        begins = stream.read(6)
        stream.seek(0)
        if begins != b"ARROW1":
            return iter(pyarrow.ipc.open_stream(stream))
        whole = pyarrow.ipc.open_file(stream)
        return (whole.get_batch(index) for index in range(whole.num_record_batches))

    return _batches(file, "not an Arrow file", batches)


def _excel(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """A sheet of a workbook; its first row names the columns, and all cells are text. It is read whole."""
    try:
        import openpyxl  # noqa: F401 - pandas reads with it
        import pandas
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where=file.name, fix="pip install openpyxl pandas"
        ) from None
    with file.open(anywhere=True) as stream, judged("not an Excel file", file.name, DataError):
        with zipfile.ZipFile(stream) as parts:
            if sum(part.file_size for part in parts.infolist()) > MOST_ARRAY:
                raise DataError(
                    f"unpacks to more than {MOST_ARRAY // MIB} MiB",
                    where=file.name,
                    fix="write the rows into a .csv",
                )
        book = pandas.ExcelFile(stream, engine="openpyxl")
        sheets = [str(name) for name in book.sheet_names]
        if source.sheet not in sheets and (source.sheet is not None or len(sheets) > 1):
            fix = f"set `sheet` of the source to {' or '.join(map(repr, sheets))}"
            raise DataError(
                f"has {len(sheets)} sheets"
                if source.sheet is None
                else f"has no sheet {source.sheet!r}",
                where=file.name,
                fix=fix,
            )
        table = pandas.read_excel(
            book, source.sheet or sheets[0], header=None, dtype=str, na_filter=False
        )
    rows = table.values.tolist()
    header = _header(rows[0], f"{file.name} row 1") if rows else []
    for number, cells in enumerate(rows[1:], 2):
        if any(cells):
            yield f"{file.name} row {number}", dict(zip(header, cells, strict=True))


def _text(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Documents separated by blank lines, with the line ends of this machine."""
    start, document = 0, ""
    for number, line in chain(_lines(file), [(0, "")]):
        if line.strip():
            start = start if document else number
            document += line.replace("\r\n", "\n")
        elif document:
            yield f"{file.name}:{start}", {"text": document.strip("\n")}
            document = ""


_READERS: dict[str, Callable[[DataFile, FileSource], Iterator[Raw]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": lambda file, source: _table(file, ","),
    ".tsv": lambda file, source: _table(file, "\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".xlsx": _excel,
    ".txt": _text,
}


def read_tasks(source: TasksSource, forms: Forms) -> Iterator[Raw]:
    """`size` rows of the tasks in turn: the question as `prompt` and the name as `task`, with the answer as `completion`; for pairs the
    answer as `chosen` and a wrong one as `rejected`; for prompts what the verifier needs: `answer`, `options` and `entry`."""
    try:
        reasoning_gym = import_quietly("reasoning_gym")
    except ImportError as error:
        raise no_reasoning_gym() from error
    sets = []
    for index, (name, options) in enumerate(source.tasks.items()):
        share = source.size // len(source.tasks) + (index < source.size % len(source.tasks))
        where = f"tasks/{name}"
        if {"size", "seed"} & options.keys():
            raise DataError("size and seed are keys of the source, not of a task", where=where)
        try:
            sets.append(
                (
                    name,
                    share,
                    reasoning_gym.create_dataset(
                        name, size=max(share, 1), seed=source.seed, **options
                    ),
                )
            )
        except (
            ValueError,
            TypeError,
            AssertionError,
        ) as error:  # its configs refuse unknown tasks, unknown options and bad values
            fix = "see its gallery for names and options"
            raise DataError(
                f"reasoning-gym refuses this task: {error}", where=where, fix=fix
            ) from error
        if forms is PROMPT_FORMS:
            dataset, item = sets[-1][2], sets[-1][2][0]
            own = item["answer"]
            if isinstance(own, str) and dataset.score_answer(
                own, as_json(item)
            ) != dataset.score_answer(own, item):
                raise DataError(
                    "this task's verifier needs entries that JSON cannot hold",
                    where=where,
                    fix="leave it out",
                )
    for number in range(max(share for _, share, _ in sets)):
        for name, share, dataset in sets:
            if number >= share:
                continue
            item = dataset[number]
            where = f"tasks/{name}:{number + 1}"
            columns: dict[str, Any] = {
                "prompt": source.question.replace("{question}", item["question"]),
                "task": name,
            }
            if forms is PROMPT_FORMS:
                columns |= {
                    "answer": item["answer"],
                    "options": source.tasks[name],
                    "entry": as_json(item),
                }
            elif not isinstance(item["answer"], str):
                raise DataError(
                    "this task has no written answer to learn", where=where, fix="leave it out"
                )
            elif forms is PAIR_FORMS:
                rejected = wrong_answer(dataset, number, share, f"{source.seed}/{name}", where)
                columns |= {"chosen": item["answer"], "rejected": rejected}
            else:
                columns["completion"] = item["answer"]
            yield where, columns


def root_of(data: DataConfig) -> Path:
    """The folder of the token caches."""
    return cache_dir() / "data" if data.cache_dir is None else expanded(data.cache_dir).absolute()


def image_path(image: Any, origin: str, root: Path) -> str:
    """The path of an image: as a row names it, or of a file in `root`/images with the bytes that the row holds (of a table's `{bytes,
    path}`, a data URL or a picture that Pillow has read). Raises DataError for what is no image, and EnvironmentFault."""
    if isinstance(image, Mapping):
        image = next(
            (image[key] for key in ("bytes", "url", "path") if image.get(key) is not None), image
        )
    if isinstance(image, str) and image.startswith("data:"):
        with judged("is no data URL of base64", origin, DataError):
            image = base64.b64decode(image.partition(";base64,")[2], validate=True)
    elif hasattr(image, "convert") and hasattr(image, "save"):
        from drumline.models.vision import in_colour  # with torch

        buffer = io.BytesIO()
        with judged("an image cannot be read", origin, DataError, "mend it or take the row out"):
            in_colour(image).save(buffer, format="png")
        image = buffer.getvalue()
    if isinstance(image, bytes):
        path = root / IMAGES / hashlib.sha256(image).hexdigest()
        with disk_errors("cannot be written", str(path), EnvironmentFault, "set data.cache_dir"):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path, shared=True) as file:
                    file.write(image)
        return str(path)
    if not isinstance(image, str) or not image:
        given = "an empty text" if image == "" else type(image).__name__
        raise DataError(
            f"an image is given as {given}, neither as a path nor as its bytes", where=origin
        )
    if "://" in image:
        raise DataError(
            f"an image is a URL, not a path: {image[:60]}",
            where=origin,
            fix="download it and name the file",
        )
    return image


def as_json(value: Any) -> Any:
    """`value` after a round trip through JSON; other types become text."""
    return json.loads(json.dumps(value, default=str))


def no_reasoning_gym() -> EnvironmentFault:
    return EnvironmentFault(
        "reasoning-gym is not installed",
        where="data source of kind tasks",
        fix="pip install reasoning-gym",
    )


def wrong_answer(dataset: Any, number: int, rows: int, seed: str, where: str) -> str:
    """An answer that the verifier of `dataset` scores below that of row `number`: of another of the first `rows` rows, or if those are
    right too, the right answer with a letter or digit changed. Depends on `seed` alone. Raises DataError if it finds none.
    """
    item = dataset[number]
    own = item["answer"]
    best = dataset.score_answer(own, item)
    draw = random.Random(f"{seed}/{number}")
    for answer in _candidates(dataset, number, rows, own, draw):
        if (
            answer.strip()
            and answer.strip() != own.strip()
            and dataset.score_answer(answer, item) < best
        ):
            return answer
    raise DataError(
        "found no wrong answer to this question to make a pair with",
        where=where,
        fix="leave this task out",
    )


def _candidates(
    dataset: Any, number: int, rows: int, own: str, draw: random.Random
) -> Iterator[str]:
    """Answers of other rows, then `own` with one letter or digit replaced by another of its kind; without any, with a digit at its end."""
    for other in draw.sample(range(rows), min(rows, _ROWS_TRIED)):
        answer = dataset[other]["answer"]
        if other != number and isinstance(answer, str):
            yield answer
    places = [index for index, char in enumerate(own) if char.isalnum()]
    for _ in range(_EDITS_TRIED):
        if not places:
            yield own + draw.choice("0123456789")
            continue
        at = draw.choice(places)
        kind = "0123456789" if own[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
        new = draw.choice([other for other in kind if other != own[at].lower()])
        yield own[:at] + (new.upper() if own[at].isupper() else new) + own[at + 1 :]


def read_digits(source: DigitsSource) -> Iterator[Raw]:
    """Rows of a split: real images of 8 × 8 pixels that come with a package, written once to the cache folder as PNG files. Raises
    EnvironmentFault if scikit-learn or Pillow is missing, or the folder cannot be written."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where="data source of kind digits", fix="pip install pillow scikit-learn"
        ) from error
    digits = load_digits()
    count = len(digits.target)
    numbers = {
        "train": range(count - TEST_DIGITS),
        "test": range(count - TEST_DIGITS, count),
        "all": range(count),
    }[source.split]
    folder = cache_dir() / DIGITS
    with disk_errors("cannot be written", str(folder), EnvironmentFault, "set XDG_CACHE_HOME"):
        folder.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            path = folder / f"{number:04}.png"
            if not path.exists():
                grey = (digits.images[number] * (255 / 16)).astype("uint8")
                with whole_file(path, shared=True) as file:
                    Image.fromarray(grey).save(file, format="png")
            yield (
                f"digits/{source.split}:{number}",
                {"image": str(path), "label": int(digits.target[number])},
            )

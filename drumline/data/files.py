"""Reads the rows of files, of reasoning-gym's tasks and of scikit-learn's digits.

Readers stream, so a file may be larger than memory (except a `.json` array). Each yields
`(origin, values)`: `origin` is `path:line`, or `path row N` (from 1) in a format without lines. A
`.txt` file has documents separated by blank lines.
"""

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
from typing import IO, Any, NamedTuple

from drumline.config.data import (
    PAIR_FORMS,
    PROMPT_FORMS,
    DataConfig,
    DigitsSource,
    FileSource,
    Forms,
    TasksSource,
)
from drumline.data.places import DataFile
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import MIB, disk_errors, expanded, import_quietly, judged, parse_json
from drumline.hardware.detect import cache_dir
from drumline.system.files import whole_file

MOST_LINE = 256 * MIB  # bytes of one row
MOST_ARRAY = 16 * MOST_LINE  # bytes of a file that is one JSON array: it is read whole
BATCH_ROWS = 1024  # rows of a Parquet file that are decoded at once
ARROW_MAGIC = b"ARROW1"  # at the start of Arrow's file format
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
IMAGES = "images"  # the folder of images that rows hold
DIGITS = "digits"  # the folder of images that come with scikit-learn
TEST_DIGITS = 360  # the last images are the test split
BRIGHTEST = 16  # of scikit-learn's grey values
_ROWS_TRIED = 16  # other rows, whose answers are tried first
_EDITS_TRIED = 64  # changes of one letter or digit, which are tried next
_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# A row as it is written: its origin and its columns.
Raw = tuple[str, dict[str, Any]]


class TableRow(dict[str, Any]):
    """A row of a typed table, which pads nested values with null keys that only other rows have."""


def read_file(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of one file. Raises DataError with the line that cannot be parsed."""
    reader = _READERS.get(file.kind)
    if reader is None:
        known = " ".join(sorted(_READERS))
        raise DataError(
            f"unknown kind of file {file.kind!r}", where=file.name, fix=f"Drumline reads {known}"
        )
    with disk_errors("cannot be read", file.name, DataError):
        yield from reader(file, source)


def _read_lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each line, with its newline.

    Decodes line by line, so that an error of UTF-8 has a line. Raises DataError.
    """
    number = 0
    with file.open() as stream:
        while True:
            raw = stream.readline(MOST_LINE + 1)
            if not raw:
                return
            number += 1
            where = f"{file.name}:{number}"
            # A binary file may be one line: do not read it whole.
            if len(raw) > MOST_LINE:
                raise DataError(
                    f"a line of more than {MOST_LINE // MIB} MiB",
                    where=where,
                    fix="part it into several rows",
                )
            if number == 1:
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                raise DataError(what, where=where, fix="save the file as UTF-8") from error
            yield number, line


def _require_object(value: Any, where: str) -> Raw:
    """Return a row with its origin. Raises DataError for a value that is no JSON object."""
    if not isinstance(value, dict):
        raise DataError(
            f"a row must be a JSON object, this is a {type(value).__name__}", where=where
        )
    return where, value


def _read_jsonl(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the objects of a file with one object a line."""
    fix = "each line must be one JSON object"
    for number, line in _read_lines(file):
        if line.strip():
            where = f"{file.name}:{number}"
            value = parse_json(line, where, DataError, fix=fix, once=True)
            yield _require_object(value, where)


def _read_json(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the objects of an array; or those line by line, as many `.json` files have them."""
    if not _is_array(file):
        yield from _read_jsonl(file, source)
        return
    lines = []
    size = 0
    for _, line in _read_lines(file):
        lines.append(line)
        size += len(line)
        if size > MOST_ARRAY:
            raise DataError(
                f"an array of more than {MOST_ARRAY // MIB} MiB",
                where=file.name,
                fix="write one object a line, into a .jsonl",
            )
    values = parse_json("".join(lines), file.name, DataError, lines=True, once=True)
    for number, value in enumerate(values, 1):
        yield _require_object(value, f"{file.name} row {number}")


def _is_array(file: DataFile) -> bool:
    """Return whether a JSON file begins with an array."""
    for _, line in _read_lines(file):
        text = line.lstrip()
        if text:
            return text.startswith("[")
    return False


def _read_table(file: DataFile, delimiter: str) -> Iterator[Raw]:
    """Yield the rows of a CSV or TSV with a header line.

    Quoted fields may have newlines; a row's line is its first.
    """
    # Python's own limit, 128 KiB, is shorter than many a document.
    csv.field_size_limit(2**31 - 1)
    lines = (line for _, line in _read_lines(file))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            where = f"{file.name}:{line}"
            line = reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = _check_header(fields, where)
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{len(fields)} fields, but the header has {len(header)}",
                    where=where,
                    fix="quote fields that hold the separator",
                )
            yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"not a table: {error}", where=f"{file.name}:{line}") from error


def _read_csv(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a table with commas."""
    return _read_table(file, ",")


def _read_tsv(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a table with tabs."""
    return _read_table(file, "\t")


def _check_header(names: list[str], where: str) -> list[str]:
    """Return the names of a table's columns. Raises DataError if a name comes twice."""
    if len(set(names)) < len(names):
        raise DataError(f"the header names a column twice: {', '.join(names)}", where=where)
    return names


def _read_batches(
    file: DataFile, what: str, open_batches: Callable[[IO[bytes]], Iterator[Any]]
) -> Iterator[Raw]:
    """Yield the rows of Arrow's record batches.

    Args:
        file: the file.
        what: the error's text if it cannot be read.
        open_batches: returns the record batches of an open file.

    Raises DataError.
    """
    number = 0
    with file.open(anywhere=True) as stream:
        with judged(what, file.name, DataError):
            batches = open_batches(stream)
        while True:
            with judged(what, file.name, DataError):
                batch = next(batches, None)
                if batch is None:
                    return
                rows = batch.to_pylist()
            for values in rows:
                number += 1
                yield f"{file.name} row {number}", TableRow(values)


def _read_parquet(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a Parquet file."""
    import pyarrow.parquet as parquet

    def batches(stream: IO[bytes]) -> Iterator[Any]:
        return parquet.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS)

    return _read_batches(file, "not a Parquet file", batches)


def _read_arrow(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of Arrow's file format (Feather), or its stream format (of `datasets`)."""
    import pyarrow

    def batches(stream: IO[bytes]) -> Iterator[Any]:
        magic = stream.read(len(ARROW_MAGIC))
        stream.seek(0)
        if magic != ARROW_MAGIC:
            return iter(pyarrow.ipc.open_stream(stream))
        whole = pyarrow.ipc.open_file(stream)
        return (whole.get_batch(index) for index in range(whole.num_record_batches))

    return _read_batches(file, "not an Arrow file", batches)


def _read_excel(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield the rows of a sheet of a workbook, which is read whole.

    Its first row names the columns, and all cells are text.
    """
    try:
        import openpyxl  # noqa: F401 - pandas reads with it
        import pandas
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where=file.name, fix="pip install openpyxl pandas"
        ) from None
    with file.open(anywhere=True) as stream, judged("not an Excel file", file.name, DataError):
        _require_small_workbook(stream, file.name)
        book = pandas.ExcelFile(stream, engine="openpyxl")
        sheet = _choose_sheet([str(name) for name in book.sheet_names], source.sheet, file.name)
        table = pandas.read_excel(book, sheet, header=None, dtype=str, na_filter=False)
    rows = table.values.tolist()
    if not rows:
        return
    header = _check_header(rows[0], f"{file.name} row 1")
    for number, cells in enumerate(rows[1:], 2):
        if any(cells):
            yield f"{file.name} row {number}", dict(zip(header, cells, strict=True))


def _require_small_workbook(stream: IO[bytes], name: str) -> None:
    """Raise DataError for a workbook that unpacks to more than memory should take."""
    with zipfile.ZipFile(stream) as parts:
        size = sum(part.file_size for part in parts.infolist())
    if size > MOST_ARRAY:
        raise DataError(
            f"unpacks to more than {MOST_ARRAY // MIB} MiB",
            where=name,
            fix="write the rows into a .csv",
        )


def _choose_sheet(sheets: list[str], wanted: str | None, name: str) -> str:
    """Return the wanted sheet of a workbook, or the only one.

    Args:
        sheets: the names of its sheets.
        wanted: the `sheet` of the source, if it is set.
        name: the file's name, for messages.

    Raises DataError for an unknown sheet, and for several of which none is set.
    """
    if wanted is None:
        if len(sheets) <= 1:
            return sheets[0]
        what = f"has {len(sheets)} sheets"
    else:
        if wanted in sheets:
            return wanted
        what = f"has no sheet {wanted!r}"
    known = " or ".join(repr(sheet) for sheet in sheets)
    raise DataError(what, where=name, fix=f"set `sheet` of the source to {known}")


def _read_text(file: DataFile, source: FileSource) -> Iterator[Raw]:
    """Yield documents separated by blank lines, with the line ends of this machine."""
    start = 0
    document = ""
    # An empty line at the end closes the last document.
    for number, line in chain(_read_lines(file), [(0, "")]):
        if line.strip():
            if not document:
                start = number
            document += line.replace("\r\n", "\n")
        elif document:
            yield f"{file.name}:{start}", {"text": document.strip("\n")}
            document = ""


_READERS: dict[str, Callable[[DataFile, FileSource], Iterator[Raw]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".xlsx": _read_excel,
    ".txt": _read_text,
}


class TaskSet(NamedTuple):
    """A task of reasoning-gym: its name, its number of rows, and its dataset."""

    name: str
    rows: int
    dataset: Any


def read_tasks(source: TasksSource, forms: Forms) -> Iterator[Raw]:
    """Yield `source.size` rows of the tasks in turn.

    A row has the question as `prompt` and the task's name as `task`. Besides these it has the answer
    as `completion`; for pairs the answer as `chosen` and a wrong one as `rejected`; for prompts what
    the verifier needs: `answer`, `options` and `entry`.

    Raises DataError for a task that cannot be used, and EnvironmentFault without reasoning-gym.
    """
    sets = _open_tasks(source, forms)
    most = max(task.rows for task in sets)
    for number in range(most):
        for task in sets:
            if number >= task.rows:
                continue
            where = f"tasks/{task.name}:{number + 1}"
            yield where, _task_row(source, forms, task, number, where)


def _open_tasks(source: TasksSource, forms: Forms) -> list[TaskSet]:
    """Return the tasks of a source. Raises DataError and EnvironmentFault."""
    try:
        reasoning_gym = import_quietly("reasoning_gym")
    except ImportError as error:
        raise no_reasoning_gym() from error
    # The first `more` tasks have a row more than the others.
    least, more = divmod(source.size, len(source.tasks))
    sets = []
    for index, (name, options) in enumerate(source.tasks.items()):
        rows = least
        if index < more:
            rows += 1
        where = f"tasks/{name}"
        if {"size", "seed"} & options.keys():
            raise DataError("size and seed are keys of the source, not of a task", where=where)
        size = max(rows, 1)
        try:
            dataset = reasoning_gym.create_dataset(name, size=size, seed=source.seed, **options)
        # Its configs refuse unknown tasks, unknown options and bad values by these errors.
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(
                f"reasoning-gym refuses this task: {error}",
                where=where,
                fix="see its gallery for names and options",
            ) from error
        if forms is PROMPT_FORMS:
            _require_json_entries(dataset, where)
        sets.append(TaskSet(name, rows, dataset))
    return sets


def _require_json_entries(dataset: Any, where: str) -> None:
    """Raise DataError for a task whose verifier gives another score after a round trip by JSON."""
    item = dataset[0]
    answer = item["answer"]
    if not isinstance(answer, str):
        return
    score_of_json = dataset.score_answer(answer, as_json(item))
    if score_of_json != dataset.score_answer(answer, item):
        raise DataError(
            "this task's verifier needs entries that JSON cannot hold",
            where=where,
            fix="leave it out",
        )


def _task_row(
    source: TasksSource, forms: Forms, task: TaskSet, number: int, where: str
) -> dict[str, Any]:
    """Return the columns of row `number` of a task, see `read_tasks`. Raises DataError."""
    item = task.dataset[number]
    answer = item["answer"]
    prompt = source.question.replace("{question}", item["question"])
    columns: dict[str, Any] = {"prompt": prompt, "task": task.name}
    if forms is PROMPT_FORMS:
        columns["answer"] = answer
        columns["options"] = source.tasks[task.name]
        columns["entry"] = as_json(item)
        return columns
    if not isinstance(answer, str):
        raise DataError("this task has no written answer to learn", where=where, fix="leave it out")
    if forms is PAIR_FORMS:
        seed = f"{source.seed}/{task.name}"
        rejected = wrong_answer(task.dataset, number, task.rows, seed, where)
        columns["chosen"] = answer
        columns["rejected"] = rejected
    else:
        columns["completion"] = answer
    return columns


def root_of(data: DataConfig) -> Path:
    """Return the folder of the token caches."""
    if data.cache_dir is None:
        return cache_dir() / "data"
    return expanded(data.cache_dir).absolute()


def image_path(image: Any, origin: str, root: Path) -> str:
    """Return the path of an image.

    It is the path that a row names, or that of a file in `root`/images with the bytes that the row
    holds.

    Args:
        image: a path, a table's `{bytes, path}`, a data URL, or a picture that Pillow has read.
        origin: the row's name in an error.
        root: the folder of the token caches.

    Raises DataError for a value that is no image, and EnvironmentFault if the file cannot be written.
    """
    image = _path_or_bytes(image, origin)
    if isinstance(image, bytes):
        return _store_image(image, root)
    if not isinstance(image, str) or not image:
        kind = type(image).__name__
        if image == "":
            kind = "an empty text"
        raise DataError(
            f"an image is given as {kind}, neither as a path nor as its bytes", where=origin
        )
    if "://" in image:
        raise DataError(
            f"an image is a URL, not a path: {image[:60]}",
            where=origin,
            fix="download it and name the file",
        )
    return image


def _path_or_bytes(image: Any, origin: str) -> Any:
    """Return the path or the bytes of an image; the same value if it is neither. Raises DataError."""
    if isinstance(image, Mapping):
        for key in ("bytes", "url", "path"):
            if image.get(key) is not None:
                image = image[key]
                break
    if isinstance(image, str) and image.startswith("data:"):
        text = image.partition(";base64,")[2]
        with judged("is no data URL of base64", origin, DataError):
            return base64.b64decode(text, validate=True)
    if hasattr(image, "convert") and hasattr(image, "save"):
        from drumline.models.vision import in_colour  # with torch

        buffer = io.BytesIO()
        with judged("an image cannot be read", origin, DataError, "fix it or take the row out"):
            in_colour(image).save(buffer, format="png")
        return buffer.getvalue()
    return image


def _store_image(data: bytes, root: Path) -> str:
    """Write the bytes of an image to a file, unless it is there. Raises EnvironmentFault."""
    # Named by its content: copies of an image are one file, whichever rows hold them.
    path = root / IMAGES / hashlib.sha256(data).hexdigest()
    with disk_errors("cannot be written", str(path), EnvironmentFault, "set data.cache_dir"):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, shared=True) as file:
                file.write(data)
    return str(path)


def as_json(value: Any) -> Any:
    """Return `value` after a round trip through JSON; other types become text."""
    return json.loads(json.dumps(value, default=str))


def no_reasoning_gym() -> EnvironmentFault:
    """Return the error for a missing reasoning-gym."""
    return EnvironmentFault(
        "reasoning-gym is not installed",
        where="data source of kind tasks",
        fix="pip install reasoning-gym",
    )


def wrong_answer(dataset: Any, number: int, rows: int, seed: str, where: str) -> str:
    """Return an answer that a task's verifier scores below the right one.

    It is the answer of another row; if those are right too, the right answer with a letter or digit
    changed.

    Args:
        dataset: a task of reasoning-gym.
        number: the row of the question.
        rows: how many rows of the task are read. Answers of other rows are not tried.
        seed: decides, with the row, which answers are tried.
        where: the row's name in an error.

    Raises DataError if no wrong answer is found.
    """
    item = dataset[number]
    own = item["answer"]
    best = dataset.score_answer(own, item)
    draw = random.Random(f"{seed}/{number}")
    for answer in _candidates(dataset, number, rows, own, draw):
        text = answer.strip()
        is_other = text and text != own.strip()
        if is_other and dataset.score_answer(answer, item) < best:
            return answer
    raise DataError(
        "found no wrong answer to this question to make a pair with",
        where=where,
        fix="leave this task out",
    )


def _candidates(
    dataset: Any, number: int, rows: int, own: str, draw: random.Random
) -> Iterator[str]:
    """Yield answers of other rows, then `own` with a change of one character."""
    for other in draw.sample(range(rows), min(rows, _ROWS_TRIED)):
        answer = dataset[other]["answer"]
        if other != number and isinstance(answer, str):
            yield answer
    for _ in range(_EDITS_TRIED):
        yield _change_one_character(own, draw)


def _change_one_character(answer: str, draw: random.Random) -> str:
    """Return an answer with a letter or digit replaced by another of its kind.

    An answer without any gets a digit at its end.
    """
    places = [index for index, character in enumerate(answer) if character.isalnum()]
    if not places:
        return answer + draw.choice(_DIGITS)
    place = draw.choice(places)
    old = answer[place]
    alphabet = _LETTERS
    if old.isdigit():
        alphabet = _DIGITS
    new = draw.choice([character for character in alphabet if character != old.lower()])
    if old.isupper():
        new = new.upper()
    return answer[:place] + new + answer[place + 1 :]


def read_digits(source: DigitsSource) -> Iterator[Raw]:
    """Yield the rows of a split: real images of 8 × 8 pixels that come with a package.

    They are written once to the cache folder as PNG files. Raises EnvironmentFault if scikit-learn or
    Pillow is missing, or if the folder cannot be written.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentFault(
            f"{error}", where="data source of kind digits", fix="pip install pillow scikit-learn"
        ) from error
    digits = load_digits()
    count = len(digits.target)
    splits = {
        "train": range(count - TEST_DIGITS),
        "test": range(count - TEST_DIGITS, count),
        "all": range(count),
    }
    folder = cache_dir() / DIGITS
    with disk_errors("cannot be written", str(folder), EnvironmentFault, "set XDG_CACHE_HOME"):
        folder.mkdir(parents=True, exist_ok=True)
        for number in splits[source.split]:
            path = folder / f"{number:04}.png"
            if not path.exists():
                grey = (digits.images[number] * (255 / BRIGHTEST)).astype("uint8")
                with whole_file(path, shared=True) as file:
                    Image.fromarray(grey).save(file, format="png")
            row = {"image": str(path), "label": int(digits.target[number])}
            yield f"digits/{source.split}:{number}", row

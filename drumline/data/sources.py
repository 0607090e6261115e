"""Rows of all sources: files, the Hugging Face hub, saved datasets, tasks, digits, your own.

A row has one of the forms that the algorithm takes (`AlgorithmSpec.forms`), its columns renamed to

    messages                    list of {"role": str, "content": str, …}: a conversation; a content
                                may be a list of texts and images
    prompt, completion          text, or lists of messages: only the completion is trained on
    text                        a document
    prompt, chosen, rejected    a pair: two answers, text or lists of messages; without `prompt`
                                they begin alike
    prompt, completion, label   an answer that is good or bad; a pair is read as two such rows
    text, label                 a text and its class
    image, label                the path of an image and its class
    query, positive, negative   a text that is searched for, one that answers it, and (a list of)
                                those that do not, which may be missing

These column sets are the forms of rows. A form is not a format: that is the layout of another tool,
which `data.formats` converts to a form. The form is that which `columns` maps; without a mapping,
the first whose columns the row has.
`OPTIONAL` columns are kept if the row has them, and `extra` keeps all others unchanged (and tools,
for reward functions).
"""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np

from drumline.config.data import (
    PAIR_FORMS,
    TEXT_FORMS,
    Columns,
    DigitsSource,
    FileSource,
    Forms,
    HubSource,
    SavedSource,
    Source,
    SqlSource,
    TasksSource,
)
from drumline.data.file_locations import locate
from drumline.data.files import RawRows, TableRow, read_file
from drumline.data.formats import Tie, convert_row, describe_nearest_format, judges_answers
from drumline.data.image_files import read_digits
from drumline.data.pairs import is_pair_to_split, split_pair
from drumline.data.sql import read_sql
from drumline.data.tasks import read_tasks
from drumline.data.turns import ROLES, parse_arguments, read_weight
from drumline.errors import DataError
from drumline.foreign import (
    expand_home,
    first_line,
    map_leaves,
    translate_exceptions,
    translate_number_errors,
)
from drumline.system import mirror

Tools = list[dict[str, Any]]
# Takes raw rows, and gives those of them that are wanted.
RawFilter = Callable[[RawRows], RawRows]
# Fields that a row may have besides those of its form.
OPTIONAL = ("margin", "images", "tools")
# Types of values that need no conversion.
JSON_TYPES = {str, int, float, bool, type(None)}
# The marks in a text at which an image or a video stands.
IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
# A row of messages may have its videos in one of these columns.
VIDEO_COLUMNS = ("videos", "video")
# Fields that a chat template renders.
RENDERED_FIELDS = {"messages", "prompt", "chosen"}


@dataclass(frozen=True)
class Row:
    """A row of a source.

    Attributes:
        origin: where it was read, such as `path:line`, `hub/id row 3` or `tasks/name:17`.
        values: its columns under our names.
        extra: its other columns.
        folder: the folder of its data file, or of the YAML: paths in the row are relative to it.
        domain: the group under which metrics and curricula count the row: that of the source if it
            sets one, else the name of its task, file or dataset.
        format: the format that it was read from; empty if it had a form of ours.
        source: the index of its source in the list of sources.
        skip_template: its texts are taken as they are, without the chat template.
        error: why it cannot be used. `values` and `extra` are then its raw columns.
    """

    origin: str
    values: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    # Rows are equal if they say the same, whatever source they come from.
    folder: Path = field(default=Path(), compare=False)
    domain: str = field(default="", compare=False)
    format: str = field(default="", compare=False)
    source: int = field(default=0, compare=False)
    skip_template: bool = field(default=False, compare=False)
    error: DataError | None = field(default=None, compare=False)


def read_rows(
    source: Source,
    base_dir: Path,
    forms: Forms = TEXT_FORMS,
    ties: Counter[str] | None = None,
    source_index: int = 0,
    raw_filter: RawFilter | None = None,
    with_faulty: bool = False,
) -> Iterator[Row]:
    """Yield the rows of a source in its own order, at most `source.limit`.

    A pair becomes two rows if the algorithm learns from answers one by one. Rows of answers of which
    none is better are left out.

    Args:
        source: the source.
        base_dir: the folder that file paths are relative to.
        forms: the forms of rows that the algorithm takes.
        ties: counts the rows that were left out, under the name of the source.
        source_index: the index of the source in its list, for `Row.source`.
        raw_filter: a generator that gets the raw rows, and yields those to take, perhaps none.
        with_faulty: also yield rows that cannot be used, with their error.

    Raises DataError for a source that cannot be read, has no rows, or has a row without a mapped
    column.
    """
    is_mapped = _maps_form_fields(source)
    names = domains(source)
    raw_rows = _read_raw(source, base_dir, forms)
    if raw_filter is not None:
        raw_rows = raw_filter(raw_rows)
    count = 0
    tie_count = 0
    for folder, (origin, values) in islice(raw_rows, source.limit):
        count += 1
        try:
            rows = _convert_raw_row(origin, values, source, forms, count, is_mapped)
        except Tie:
            tie_count += 1
            continue
        except DataError as error:
            if not with_faulty:
                raise
            rows = [Row(origin, values, values, error=error)]
        for row in rows:
            domain = _choose_domain(row, names)
            yield replace(row, folder=folder, domain=domain, source=source_index)
    # With a filter the caller checks whether the source was empty or all rows were filtered out.
    if not count and raw_filter is None:
        raise DataError("the dataset is empty: it has no rows", where=describe(source))
    if tie_count and tie_count == count:
        what = f"all {count} rows are ties: none has a better answer"
        raise DataError(what, where=describe(source))
    if tie_count and ties is not None:
        ties[describe(source)] += tie_count


def _choose_domain(row: Row, names: set[str]) -> str:
    """Return the domain of a row: the only name of its source, or the row's own task."""
    if len(names) == 1:
        (domain,) = names
        return domain
    return str(row.extra["task"])


def _maps_form_fields(source: Source) -> bool:
    """Return whether the user named the column of a field of a form.

    Raises DataError if the source has a format too.
    """
    form_fields = Columns.model_fields.keys() - set(OPTIONAL)
    mapped = [
        field_name for field_name in form_fields if getattr(source.columns, field_name) is not None
    ]
    if not mapped:
        return False
    if source.format not in ("auto", "own"):
        what = "`columns` and `format` say two things"
        raise DataError(what, where=describe(source), fix="leave one of them out")
    return True


def _convert_raw_row(
    origin: str,
    values: dict[str, Any],
    source: Source,
    forms: Forms,
    row_number: int,
    is_mapped: bool,
) -> list[Row]:
    """Return the rows that a raw row stands for: one, or the two answers of a pair.

    Args:
        origin: the row's name in an error.
        values: the row as it is written.
        source: its source.
        forms: the forms of rows that the algorithm takes.
        row_number: the row's number in its source, from 1.
        is_mapped: the source's `columns` say which columns are read.

    Raises DataError, and Tie for a pair without a better answer.
    """
    with translate_number_errors(origin, DataError):
        rows = _split_raw_row(origin, values, source, forms, row_number, is_mapped)
    has_class = any("label" in form and "prompt" not in form for form in forms)
    is_retrieval = any("query" in form for form in forms)
    if (has_class or is_retrieval) and holds_images(rows[0]):
        what = f"row {row_number} holds images, which this algorithm does not take"
        fix = (
            "use another algorithm, take the images out, or read none of a column with "
            "`columns: {images: ''}`"
        )
        raise DataError(what, where=origin, fix=fix)
    return rows


def _split_raw_row(
    origin: str,
    values: dict[str, Any],
    source: Source,
    forms: Forms,
    row_number: int,
    is_mapped: bool,
) -> list[Row]:
    """Return the rows of a raw row, see `_convert_raw_row`."""
    if is_mapped:
        is_split = judges_answers(forms) and _is_mapped_pair(source.columns, values)
    else:
        is_split = is_pair_to_split(values, forms, source.format, origin)
    accepted_forms = forms
    if is_split:
        # The row is read as a pair first, and split at the end.
        accepted_forms = PAIR_FORMS
    format_name = ""
    converted = values
    if not is_mapped:
        format_name, converted = convert_row(values, accepted_forms, source.format, origin)
    row = _read_in_form(origin, converted, source.columns, row_number, accepted_forms)
    row = replace(row, format=format_name)
    if not is_split:
        return [row]
    # As `encode.PairRowEncoder` reads two texts without a prompt.
    are_texts = all(isinstance(row.values[side], str) for side in ("chosen", "rejected"))
    skip_template = are_texts and not {"prompt", "tools"} & row.values.keys()
    rows = []
    for side in split_pair(row.values, origin):
        rows.append(replace(row, values=side, skip_template=skip_template))
    return rows


def _is_mapped_pair(columns: Columns, values: dict[str, Any]) -> bool:
    """Return whether a row of a source with mapped columns is a pair.

    `columns` maps the sides of a pair, or the row has them and `columns` maps no judged answer.
    """
    if columns.chosen or columns.rejected:
        return True
    maps_an_answer = bool(columns.completion or columns.label)
    return "chosen" in values and "completion" not in values and not maps_an_answer


def domains(source: Source) -> set[str]:
    """Return the names that the rows of a source have in metrics and in a curriculum."""
    if source.domain:
        return {source.domain}
    if isinstance(source, TasksSource):
        return set(source.tasks)
    # The name of a file or a dataset without its folders and its ending.
    path = Path(describe(source))
    if "*" in path.name:
        return {_domain_of_pattern(path)}
    return {path.stem}


def _domain_of_pattern(path: Path) -> str:
    """Return the last part of a path that has a name without its wildcards.

    It is `code` for `code/*.jsonl`.
    """
    for part in (path.stem, *reversed(path.parent.parts)):
        name = re.sub(r"[*?\[\]]+", "", part).strip("-_. ")
        if name:
            return name
    return path.stem


def describe(source: Source) -> str:
    """Return a short name of the source, for messages."""
    if isinstance(source, FileSource | SavedSource):
        return source.path
    if isinstance(source, DigitsSource):
        return f"digits/{source.split}"
    if isinstance(source, TasksSource):
        return "tasks/" + ",".join(source.tasks)
    if isinstance(source, HubSource):
        return f"hub/{source.id}"
    return source.label


def _read_raw(source: Source, base_dir: Path, forms: Forms) -> RawRows:
    """Yield the rows of a source as they are written."""
    if isinstance(source, FileSource):
        for file in locate(source, base_dir):
            for raw in read_file(file, source):
                yield file.folder, raw
    elif isinstance(source, TasksSource):
        task_forms = forms
        if judges_answers(forms):
            # A pair of a right and a wrong answer is split into two judged answers.
            task_forms = PAIR_FORMS
        for raw in read_tasks(source, task_forms):
            yield base_dir, raw
    elif isinstance(source, DigitsSource):
        for raw in read_digits(source):
            yield base_dir, raw
    else:
        yield from _read_mappings(source, base_dir)


def _read_mappings(source: Source, base_dir: Path) -> RawRows:
    """Yield the rows of a source that gives mappings. Raises DataError for anything else."""
    name = describe(source)
    complaint = "its rows cannot be read"
    if isinstance(source, HubSource):
        complaint = "the hub dataset broke off"
    row_type: type[dict[str, Any]] = dict
    if isinstance(source, HubSource | SavedSource | SqlSource):
        # Arrow's tables: nulls pad nested values.
        row_type = TableRow
    with translate_exceptions(complaint, name, DataError):
        for row_number, values in enumerate(_open_dataset(source, base_dir), 1):
            if not isinstance(values, Mapping):
                what = f"row {row_number} is {type(values).__name__}, not columns"
                raise DataError(what, where=name, fix="give dictionaries: column → value")
            columns = row_type(_to_plain_columns(values))
            yield base_dir, (f"{name} row {row_number}", columns)


def open_rows(source: Source, base_dir: Path) -> Any:
    """Return the rows of a built-in source as dictionaries of columns, as they are written.

    A dataset of the hub or of a folder is returned itself and can be read by index; other sources
    give an iterator. Raises DataError, also while the iterator is read.
    """
    is_streamed = isinstance(source, HubSource) and source.streaming
    if isinstance(source, HubSource | SavedSource) and not is_streamed:
        return _open_dataset(source, base_dir)
    return (values for _, (_, values) in _read_raw(source, base_dir, TEXT_FORMS))


def _to_plain_columns(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return columns with texts as their names, and values that JSON can hold.

    numpy's arrays and numbers become lists and numbers, and pandas' NA becomes None.
    """
    columns = {}
    for name, value in values.items():
        if type(value) not in JSON_TYPES:
            value = _to_plain_value(value)
        columns[str(name)] = value
    return columns


def _to_plain_value(value: Any) -> Any:
    """Return a value without numpy's and pandas' types, at any depth of lists and dictionaries."""
    return map_leaves(value, _to_plain_leaf)


def _to_plain_leaf(value: Any) -> Any:
    """Return an array as a list, and a number of numpy or a missing value of pandas as Python's."""
    if isinstance(value, np.ndarray):
        return _to_plain_value(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    # By its name: pandas need not be installed.
    if type(value).__name__ == "NAType":
        return None
    return value


def _open_dataset(source: Source, base_dir: Path) -> Any:
    """Return the rows of a hub dataset, a saved dataset, an SQL query or the user's own function.

    A stream of the hub reads and parses remote files while it is read.
    """
    if isinstance(source, HubSource):
        return call_hub(source, "load_dataset", split=source.split, streaming=source.streaming)
    if isinstance(source, SqlSource):
        return read_sql(source, base_dir)
    if isinstance(source, SavedSource):
        return _load_saved(source, base_dir)
    return source.rows(base_dir)


def _read_in_form(
    origin: str, values: dict[str, Any], columns: Columns, row_number: int, accepted_forms: Forms
) -> Row:
    """Return the row in the form that fits it, its columns renamed and their types checked.

    Args:
        origin: the row's name in an error.
        values: its columns.
        columns: the columns that the user mapped.
        row_number: the row's number in its source, from 1.
        accepted_forms: the forms of rows that the algorithm takes.

    Raises DataError for a row of no form, and for a column of another type.
    """
    form_fields = set[str]().union(*accepted_forms)
    mapped = {field_name for field_name in form_fields if getattr(columns, field_name) is not None}
    names = _name_columns(columns, {*form_fields, *OPTIONAL})
    form = _choose_form(values, accepted_forms, names, mapped)
    existing = ", ".join(values) or "none"
    if form is None:
        shapes = ", or ".join(" and ".join(shape) for shape in accepted_forms)
        what = f"row {row_number} has no {shapes}; its columns are: {existing}"
        fix = "map them with `columns`" + describe_nearest_format(values, accepted_forms)
        raise DataError(what, where=origin, fix=fix)
    if not mapped <= set(form):
        kinds = ", ".join(sorted(mapped))
        what = f"`columns` maps parts of different kinds of rows: {kinds}"
        raise DataError(what, where=origin, fix="keep one kind")
    names["images"] = _images_column(names["images"], form, columns, values)
    is_padded = isinstance(values, TableRow)
    result: dict[str, Any] = {}
    for field_name in form:
        name = names[field_name]
        if name not in values:
            what = f"row {row_number} has no column {name!r}; its columns are: {existing}"
            raise DataError(what, where=origin, fix=f"map it with `columns.{field_name}`")
        result[field_name] = _convert_field(
            field_name, name, values[name], origin, row_number, is_padded
        )
    for field_name in ("margin", "images"):
        value = _get_optional(values, names[field_name])
        if value is not None:
            result[field_name] = value
    # Before the tools are read: their column also stays in `extra`, for reward functions.
    used = {names[field_name] for field_name in result}
    tools = None
    if RENDERED_FIELDS & result.keys():
        value = _get_optional(values, names["tools"])
        tools = read_tools(value, names["tools"], origin, is_padded)
    if tools is not None:
        result["tools"] = tools
    extra = {name: value for name, value in values.items() if name not in used}
    return Row(origin, result, extra)


def _name_columns(columns: Columns, form_fields: set[str]) -> dict[str, str]:
    """Return field → column: the column that the user named, else one with the field's own name."""
    names = {}
    for field_name in form_fields:
        name = getattr(columns, field_name)
        # An empty name is a user's too: it means that no column is read.
        if name is None:
            name = field_name
        names[field_name] = name
    return names


def _choose_form(
    values: dict[str, Any], accepted_forms: Forms, names: dict[str, str], mapped: set[str]
) -> tuple[str, ...] | None:
    """Return the form of a row; None without one.

    With `mapped` fields it is a form that has all of them, or, for the error of the caller, some of
    them. Without any it is a form whose columns the row has. Of several forms it is the first whose
    columns hold something.

    Args:
        values: the row's columns.
        accepted_forms: the forms of rows that the algorithm takes.
        names: the column of each field.
        mapped: the fields whose columns the user named.
    """
    if mapped:
        forms = [form for form in accepted_forms if mapped <= set(form)]
        if not forms:
            forms = [form for form in accepted_forms if not mapped.isdisjoint(form)]
    else:
        forms = [form for form in accepted_forms if values.keys() >= set(form)]
    if not forms:
        return None

    def lack_of_form(form: tuple[str, ...]) -> int:
        return max(_rank_of_lack(values, names[field_name]) for field_name in form)

    # The first of equally good ones.
    return min(forms, key=lack_of_form)


def _images_column(
    name: str, form: tuple[str, ...], columns: Columns, values: dict[str, Any]
) -> str:
    """Return the column of a row's images; empty if its form takes none.

    `name`: the column that the user named, or `images`. A row without that column may have its one
    image under `image`.
    """
    if "label" in form and ("text" in form or "image" in form):
        # A row of a class has only its text or its image.
        return ""
    # A table has the column `images` also in rows that have their image under `image`.
    is_empty = not values.get("images") and bool(values.get("image"))
    has_no_images = columns.images is None and ("images" not in values or is_empty)
    # A document takes no images. `_refuse_unsupported_media` in data.images refuses one that has
    # some.
    takes_image = "image" not in form and form != ("text",)
    if has_no_images and takes_image:
        return "image"
    return name


def _get_optional(values: dict[str, Any], name: str) -> Any:
    """Return what a row has in a column; None if it has no such column.

    An empty `name` stands for no column: the user asked to read none.
    """
    if not name:
        return None
    return values.get(name)


def _rank_of_lack(values: dict[str, Any], name: str) -> int:
    """Return a rank by which forms are compared: the lowest is the best.

    It is 0 if the row's column holds something, 1 if it holds nothing, and 2 without the column.
    """
    if name not in values:
        return 2
    value = values[name]
    if value is None or value == []:
        return 1
    return 0


def _convert_field(
    field_name: str, name: str, value: Any, origin: str, row_number: int, padded: bool = False
) -> Any:
    """Return the value of a column as a field of a form: a text, messages, a label or an image.

    Args:
        field_name: the field, such as `prompt`, which decides on the types.
        name: the column's name, for messages.
        value: what the column holds.
        origin: the row's name in an error.
        row_number: the row's number in its source, from 1.
        padded: the row is of a table, which pads messages with null keys.

    Raises DataError for a value of another type.
    """
    if field_name == "label":
        return _read_label(value, name, origin, row_number)
    if field_name == "image" and value is not None and not isinstance(value, str):
        # The bytes of an image, or a picture: `image_files.resolve_image_path` reads them.
        return value
    if field_name == "negative":
        return _read_texts(value, name, origin, row_number)
    if isinstance(value, str) and field_name != "messages":
        _require_encodable(value, name, origin, row_number)
        return value
    takes_text_or_messages = field_name in ("prompt", "completion", "chosen", "rejected")
    is_message = isinstance(value, Mapping) and {"role", "content"} <= value.keys()
    if takes_text_or_messages and is_message:
        # One message in place of a list.
        value = [value]
    if field_name in PLAIN_FIELDS or not isinstance(value, list) or not value:
        found = _describe_type(value)
        wanted = WANTED_TYPES.get(field_name, "text or a list of messages")
        raise DataError(f"row {row_number}: column {name!r} is {found}, not {wanted}", where=origin)
    # All of them first, so that the error is that of the first message which is none.
    for index, message in enumerate(value):
        _check_message(message, f"{name}[{index}]", origin, row_number)
    messages = []
    for index, message in enumerate(value):
        location = f"row {row_number}: {name}[{index}]"
        messages.append(_clean_message(message, padded, location, origin))
    return messages


def _read_label(value: Any, name: str, origin: str, row_number: int) -> str | int:
    """Return a label: true or false, or the name or number of a class. Raises DataError."""
    if isinstance(value, float) and value.is_integer():
        # A table in which another row has no label holds whole numbers as floats.
        return int(value)
    if not isinstance(value, str | int):
        found = _describe_type(value)
        what = f"row {row_number}: column {name!r} is {found}, not a label"
        fix = "give each row one: true or false for an answer, the name or number of a class"
        raise DataError(what, where=origin, fix=fix)
    return value


# Fields that take no messages.
PLAIN_FIELDS = {"text", "image", "query", "positive"}
# Field → the type that it takes, as an error names it.
WANTED_TYPES = {
    "text": "text",
    "image": "a path",
    "query": "text",
    "positive": "text",
    "messages": "a list of messages",
}


def _read_texts(value: Any, name: str, origin: str, row_number: int) -> list[str]:
    """Return the texts of a column that has one text, or a list of them. Raises DataError.

    An empty cell of a table has none.
    """
    if value is None or value == "":
        return []
    texts = value
    if isinstance(value, str):
        texts = [value]
    if not isinstance(texts, list):
        found = _describe_type(value)
        what = f"row {row_number}: column {name!r} is {found}, neither text nor a list of texts"
        raise DataError(what, where=origin)
    for text in texts:
        if not isinstance(text, str):
            found = _describe_type(text)
            what = f"row {row_number}: column {name!r} has {found} among its texts"
            raise DataError(what, where=origin)
        _require_encodable(text, name, origin, row_number)
    return texts


def _describe_type(value: Any) -> str:
    """Return the name of a value's type, for messages. Null and an empty list have names too."""
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    return type(value).__name__


def _require_encodable(text: str, name: str, origin: str, row_number: int) -> None:
    """Raise DataError for a text with half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"row {row_number}: column {name!r} holds a lone surrogate, which is no text"
        raise DataError(what, where=origin) from error


def _check_message(message: Any, location: str, origin: str, row_number: int) -> None:
    """Raise DataError for what is no message with a role, and a content or calls."""
    if not isinstance(message, dict):
        found = type(message).__name__
        what = f"row {row_number}: {location} is {found}, not {{role, content}}"
        raise DataError(what, where=origin)
    content = message.get("content")
    has_role = isinstance(message.get("role"), str)
    is_list = isinstance(content, list)
    has_parts = is_list and bool(content)
    has_content = isinstance(content, str) or bool(message.get("tool_calls")) or has_parts
    for key, is_present in (("role", has_role), ("content", has_content)):
        if not is_present:
            keys = ", ".join(map(str, message)) or "none"
            what = f"row {row_number}: {location} has no text under {key!r}; its keys are: {keys}"
            raise DataError(what, where=origin)
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_content_part(part, f"{location}.content[{index}]", origin, row_number)
    elif isinstance(content, str):
        _require_encodable(content, f"{location}.content", origin, row_number)


def _check_content_part(part: Any, location: str, origin: str, row_number: int) -> None:
    """Raise DataError for a part of a content that is neither a text nor an image or video."""
    if isinstance(part, dict):
        text = part.get("text")
        if is_image(part) or is_video(part) or isinstance(text, str):
            _convert_field("text", location, text or "", origin, row_number)
            return
        found = part.get("type")
    else:
        found = type(part).__name__
    if found == "text":
        found = f"text under {', '.join(map(str, part))}"
    raise DataError(
        f"row {row_number}: {location} is {found}, neither text nor an image or video", where=origin
    )


def _clean_message(
    message: dict[str, Any], padded: bool, location: str, origin: str
) -> dict[str, Any]:
    """Return a message as chat templates take it.

    It has no null keys, its calls are parsed, and a content in parts of text alone is one text.

    Args:
        message: the message, which has a role and a content or calls.
        padded: a table pads the arguments of calls with null keys.
        location: the message's name in an error.
        origin: the row's name in an error.
    """
    message = read_weight(_drop_nulls(message))
    # Columns that are mapped have no format, which would know other names of roles.
    role = message["role"].lower()
    if role in ROLES.values():
        message["role"] = role
    if "tool_calls" in message:
        # Chat templates write arguments as JSON; OpenAI's format has them as text.
        calls = _parse_json(message["tool_calls"])
        if padded:
            calls = drop_null_keys(calls)
        if isinstance(calls, list):
            calls = [parse_arguments(call, location, origin) for call in calls]
        message["tool_calls"] = calls
    content = message.get("content")
    if isinstance(content, list):
        parts = [_drop_nulls(part) for part in content]
        if any(is_image(part) or is_video(part) for part in parts):
            message["content"] = parts
        else:
            message["content"] = "".join(part["text"] for part in parts)
    return message


def _drop_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Return a dictionary without its null items."""
    return {key: item for key, item in value.items() if item is not None}


def is_image(part: dict[str, Any]) -> bool:
    """Return whether a part of a content is an image (image_url in OpenAI's format)."""
    if "type" in part:
        return part["type"] in ("image", "image_url")
    return part.get("image") is not None


def is_video(part: dict[str, Any]) -> bool:
    """Return whether a part of a content is a video."""
    if "type" in part:
        return part["type"] in ("video", "video_url")
    return part.get("video") is not None


def holds_images(row: Row) -> bool:
    """Return whether a row names images or videos in its messages, or has places for them."""
    if row.values.get("images"):
        return True
    return any(_has_image_part(value) for value in row.values.values())


def has_marked_videos(row: Row) -> bool:
    """Return whether a row has a column of videos, and marks in its texts at which they stand.

    Without a mark the column may be there for other reasons.
    """
    if not any(row.extra.get(name) for name in VIDEO_COLUMNS):
        return False
    texts: list[Any] = []
    for value in row.values.values():
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            texts += [turn.get("content") for turn in value if isinstance(turn, dict)]
    return any(isinstance(text, str) and VIDEO_MARK in text for text in texts)


def _has_image_part(messages: Any) -> bool:
    """Return whether a value is a list of messages with an image in a content."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if is_image(part) or is_video(part):
                    return True
    return False


def read_tools(value: Any, name: str, origin: str, padded: bool) -> Tools | None:
    """Return the tools of a row; None if there are none.

    Args:
        value: a list of JSON schemas, possibly as JSON, as may be each schema.
        name: the column's name, for messages.
        origin: the row's name in an error.
        padded: the row is of a table, which pads schemas with null keys.

    Raises DataError for anything else.
    """
    found = value
    if isinstance(value, str):
        if not value.strip():
            return None
        found = _parse_json(value)
    if found in (None, []):
        return None
    tools = []
    if isinstance(found, list):
        tools = [_parse_json(tool) for tool in found]
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        fix = (
            "give a list of JSON schemas, map another column with `columns.tools`, or none with "
            "`columns: {tools: ''}`"
        )
        raise DataError(f"column {name!r} is no list of tools", where=origin, fix=fix)
    if padded:
        return [drop_null_keys(tool) for tool in tools]
    return tools


def drop_null_keys(value: Any) -> Any:
    """Return `value` without null keys, at any depth."""
    if isinstance(value, dict):
        return {key: drop_null_keys(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_null_keys(item) for item in value]
    return value


def _parse_json(value: Any) -> Any:
    """Return the object or list in a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(found, dict | list):
        return found
    return value


def _load_saved(source: SavedSource, base_dir: Path) -> Any:
    """Return a saved dataset, or the split of one that `source.split` names.

    Raises DataError for a folder that `save_to_disk` has not written, and for an unknown split.
    """
    import datasets

    folder = str(base_dir / expand_home(source.path))
    split = source.split
    with translate_exceptions(
        "not a saved dataset", folder, DataError, "give a folder written by save_to_disk"
    ):
        loaded = datasets.load_from_disk(folder)
    if not isinstance(loaded, dict):
        if split is not None:
            what = f"holds one dataset without splits, so no split {split!r}"
            raise DataError(what, where=folder, fix="leave `split` out")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        what = f"holds the splits {', '.join(loaded)}, but `split` is {split or 'not set'}"
        raise DataError(what, where=folder)
    return loaded[split]


def call_hub(source: HubSource, function: str, **arguments: Any) -> Any:
    """Return the result of a function of `datasets` for a source of the hub; offline, from its cache.

    Args:
        source: the dataset.
        function: `load_dataset` or `load_dataset_builder`.
        arguments: further arguments of the function.

    Raises DataError for any failure. If the hub's name does not resolve, `datasets` and
    `huggingface_hub` are set offline for the rest of the process: they would retry for 23 s.
    """
    import datasets
    import huggingface_hub.constants as hub

    name = describe(source)
    if source.id.startswith(mirror.PREFIX):
        folder = mirror.download(source.id, source.revision, "dataset", DataError, name)
        source = source.model_copy(update={"id": folder, "revision": None})
    is_offline = hub.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE
    # A proxy resolves names for us.
    if not is_offline and not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlparse(hub.ENDPOINT).hostname, 443)
        except OSError:
            hub.HF_HUB_OFFLINE = True
            datasets.config.HF_HUB_OFFLINE = True
            is_offline = True
    load = getattr(datasets, function)
    try:
        return load(source.id, name=source.name, revision=source.revision, **arguments)
    except datasets.exceptions.DatasetNotFoundError as error:
        what = f"the hub dataset cannot be had: {first_line(error)}"
        fix = (
            "check the id; for a private or gated dataset accept its terms and run `hf auth login`"
        )
        raise DataError(what, where=name, fix=fix) from error
    except (ConnectionError, TimeoutError) as error:
        state = first_line(error)
        if is_offline:
            state = "this machine is offline and the dataset is not in its cache"
        what = f"the hub dataset cannot be reached: {state}"
        fix = (
            "check the id and the connection, or use a local copy: kind: file or saved; in China "
            f"{mirror.MIRRORS}"
        )
        raise DataError(what, where=name, fix=fix) from error
    except Exception as error:
        # Data files of strangers fail in any way: their parsers, their columns, their splits.
        what = f"the hub dataset cannot be loaded: {first_line(error)}"
        raise DataError(what, where=name) from error

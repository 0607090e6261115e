"""Rows of all sources: files, the Hugging Face hub, saved datasets, reasoning-gym tasks, scikit-learn's digits, your own.

A row has one of the forms that the algorithm takes (`AlgorithmSpec.forms`), its columns renamed to

    messages                    list of {"role": str, "content": str, …}: a conversation; a content may be a list of texts and images
    prompt, completion          text, or lists of messages: only the completion is trained on
    text                        a document
    prompt, chosen, rejected    a pair: two answers, text or lists of messages; without `prompt` they begin alike
    prompt, completion, label   an answer that is good or bad; a pair is read as two such rows
    text, label                 a text and its class
    image, label                the path of an image and its class

The form is that which `columns` maps; without a mapping, the first whose columns the row has. `OPTIONAL` columns are kept if the row has
them, and `extra` keeps all others unchanged (and tools, for reward functions).
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

from drumline.core import mirror
from drumline.core.data import (
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
from drumline.data.files import Raw, TableRow, read_digits, read_file, read_tasks
from drumline.data.formats import Tie, judges_answers, nearest_format, shaped
from drumline.data.pairs import is_pair_to_split, split_pair
from drumline.data.places import locate
from drumline.data.sql import read_sql
from drumline.data.turns import ROLES, weighted, with_arguments
from drumline.errors import DataError
from drumline.foreign import expanded, first_line, judged, number_errors

Tools = list[dict[str, Any]]
Keep = Callable[[Iterator[tuple[Path, Raw]]], Iterator[tuple[Path, Raw]]]
OPTIONAL = ("margin", "images", "tools")
PLAIN = {str, int, float, bool, type(None)}
TALKS = {"messages", "prompt", "chosen"}  # parts that a chat template renders


@dataclass(frozen=True)
class Row:
    """One row: columns under canonical names, and the others. `origin`: `path:line`, `hub/id row 3`, `tasks/name:17`. `domain`: its name in
    the metrics: that of the source, else its task, file or dataset."""

    origin: str
    values: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    # Of its data file, or of the YAML: paths in the row are relative to it.
    folder: Path = field(default=Path(), compare=False)
    domain: str = field(default="", compare=False)
    # That it was read from; empty: it had a form of ours.
    format: str = field(default="", compare=False)
    source: int = field(default=0, compare=False)  # its number in the list of sources
    # Its texts are taken as they are, without the chat template.
    plain: bool = field(default=False, compare=False)
    # Why it cannot be used; its values are then those of its source.
    error: DataError | None = field(default=None, compare=False)


def read_rows(
    source: Source,
    base_dir: Path,
    forms: Forms = TEXT_FORMS,
    ties: Counter[str] | None = None,
    number: int = 0,
    keep: Keep | None = None,
    faulty: bool = False,
) -> Iterator[Row]:
    """The rows of `source`, number `number` of its list, in its own order, at most `source.limit`; file paths are relative to `base_dir`.
    `keep`: which raw rows are taken, perhaps none. `faulty`: also those that cannot be used, with their error. Rows of answers without a
    better one are left out, and counted in `ties` under the source's name. Where an algorithm learns from answers one by one, a pair
    becomes two rows. Raises DataError for a source that cannot be read, has no rows, or has a row without a mapped column."""
    count, undecided, names = 0, 0, domains(source)
    mapped = any(
        getattr(source.columns, part) is not None
        for part in Columns.model_fields.keys() - set(OPTIONAL)
    )
    if mapped and source.format not in ("auto", "own"):
        raise DataError(
            "`columns` and `format` say two things",
            where=describe(source),
            fix="leave one of them out",
        )
    raw = _raw(source, base_dir, PAIR_FORMS if judges_answers(forms) else forms)
    for count, (folder, (origin, values)) in enumerate(
        islice(raw if keep is None else keep(raw), source.limit), 1
    ):
        try:
            with number_errors(origin, DataError):
                found = _rows_in(origin, values, source, forms, count, mapped)
            if forms != TEXT_FORMS and holds_images(found[0]):
                fix = "use algorithm sft, take the images out, or read none of a column with `columns: {images: ''}`"
                raise DataError(
                    f"row {count} holds images, which this algorithm does not take",
                    where=origin,
                    fix=fix,
                )
        except Tie:
            undecided += 1
            continue
        except DataError as error:
            if not faulty:
                raise
            found = [Row(origin, values, values, error=error)]
        for row in found:
            (domain,) = names if len(names) == 1 else (row.extra["task"],)
            yield replace(row, folder=folder, domain=domain, source=number)
    if count == undecided and (count or keep is None):
        what = (
            f"all {count} rows are ties: none has a better answer"
            if count
            else "the dataset is empty: it has no rows"
        )
        raise DataError(what, where=describe(source))
    if undecided and ties is not None:
        ties[describe(source)] += undecided


def _rows_in(
    origin: str, values: dict[str, Any], source: Source, forms: Forms, number: int, mapped: bool
) -> list[Row]:
    """The rows that a raw row, number `number` of its source, stands for: one, or the two answers of a pair.

    `mapped`: the source's `columns` say which columns are read. Raises DataError, and Tie for a pair without a better answer.
    """
    if mapped:
        columns = source.columns
        maps_a_pair = bool(columns.chosen or columns.rejected)
        maps_an_answer = bool(columns.completion or columns.label)
        has_a_pair = "chosen" in values and "completion" not in values and not maps_an_answer
        is_split = judges_answers(forms) and (maps_a_pair or has_a_pair)
    else:
        is_split = is_pair_to_split(values, forms, source.format, origin)
    known = PAIR_FORMS if is_split else forms
    name, made = ("", values) if mapped else shaped(values, known, source.format, origin)
    row = replace(_normalise(origin, made, source.columns, number, known), format=name)
    if not is_split:
        return [row]
    texts = all(isinstance(row.values[side], str) for side in ("chosen", "rejected"))
    is_plain = texts and not {"prompt", "tools"} & row.values.keys()
    return [replace(row, values=side, plain=is_plain) for side in split_pair(row.values, origin)]


def domains(source: Source) -> set[str]:
    """The names that its rows have in metrics and in a curriculum."""
    if source.domain:
        return {source.domain}
    if isinstance(source, TasksSource):
        return set(source.tasks)
    path = Path(describe(source))  # of `code/*.jsonl`: code
    plain = (
        re.sub(r"[*?\[\]]+", "", name).strip("-_. ")
        for name in (path.stem, *reversed(path.parent.parts))
    )
    return {next((name for name in plain if name), path.stem) if "*" in path.name else path.stem}


def describe(source: Source) -> str:
    """A short name of the source, for messages."""
    if isinstance(source, FileSource | SavedSource):
        return source.path
    if isinstance(source, DigitsSource):
        return f"digits/{source.split}"
    if isinstance(source, TasksSource):
        return "tasks/" + ",".join(source.tasks)
    return f"hub/{source.id}" if isinstance(source, HubSource) else source.label


def _raw(source: Source, base_dir: Path, forms: Forms) -> Iterator[tuple[Path, Raw]]:
    """Rows, each with the folder that its paths are relative to."""
    if isinstance(source, FileSource):
        for file in locate(source, base_dir):
            yield from ((file.folder, raw) for raw in read_file(file, source))
    elif isinstance(source, TasksSource | DigitsSource):
        yield from (
            (base_dir, raw)
            for raw in (
                read_tasks(source, forms)
                if isinstance(source, TasksSource)
                else read_digits(source)
            )
        )
    else:
        name, of_hub = describe(source), isinstance(source, HubSource)
        table = TableRow if of_hub or isinstance(source, SavedSource | SqlSource) else dict
        with judged(
            "the hub dataset broke off" if of_hub else "its rows cannot be read", name, DataError
        ):
            for number, values in enumerate(_rows(source, base_dir), 1):
                if not isinstance(values, Mapping):
                    fix = "give dictionaries: column → value"
                    raise DataError(
                        f"row {number} is {type(values).__name__}, not columns", where=name, fix=fix
                    )
                yield base_dir, (f"{name} row {number}", table(_of_tables(values)))


def open_rows(source: Source, base_dir: Path) -> Any:
    """Return the rows of a built-in source as dictionaries of columns, as they are written.

    A dataset of the hub or of a folder is returned itself and can be read by index; other sources
    give an iterator. Raises DataError, also while the iterator is read.
    """
    is_streamed = isinstance(source, HubSource) and source.streaming
    if isinstance(source, HubSource | SavedSource) and not is_streamed:
        return _rows(source, base_dir)
    return (values for _, (_, values) in _raw(source, base_dir, TEXT_FORMS))


def _of_tables(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Columns by text, without numpy's arrays and numbers and pandas' NA."""
    return {
        str(name): value if type(value) in PLAIN else _without_arrays(value)
        for name, value in values.items()
    }


def _without_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_without_arrays(each) for each in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_arrays(each) for each in value]
    return None if type(value).__name__ == "NAType" else value


def _rows(source: Source, base_dir: Path) -> Any:
    """Columns of a hub dataset (a stream reads and parses remote files as it goes), of a saved one, or by the user's own function."""
    if isinstance(source, HubSource):
        return call_hub(source, "load_dataset", split=source.split, streaming=source.streaming)
    if isinstance(source, SqlSource):
        return read_sql(source, base_dir)
    return (
        _load_saved(source, base_dir) if isinstance(source, SavedSource) else source.rows(base_dir)
    )


def _normalise(
    origin: str, values: dict[str, Any], columns: Columns, number: int, known: Forms
) -> Row:
    """The row in its form, with its columns renamed and their types checked."""
    parts = {part for form in known for part in form}
    given = {part: getattr(columns, part) for part in (*parts, *OPTIONAL)}
    mapped = {part for part in parts if given[part] is not None}
    names = {part: part if name is None else name for part, name in given.items()}
    padded = isinstance(values, TableRow)
    forms = [form for form in known if mapped <= set(form) and mapped]
    forms = (
        forms
        or [form for form in known if mapped & set(form)]
        or [form for form in known if all(part in values for part in form)]
    )
    # Of several the one that is there.
    forms.sort(key=lambda form: max(_lack(values, names[part]) for part in form))
    there = ", ".join(values) or "none"
    if not forms:
        what = f"row {number} has no {', or '.join(' and '.join(form) for form in known)}; its columns are: {there}"
        raise DataError(
            what, where=origin, fix="map them with `columns`" + nearest_format(values, known)
        )
    if not mapped <= set(forms[0]):
        raise DataError(
            f"`columns` maps parts of different kinds of rows: {', '.join(sorted(mapped))}",
            where=origin,
            fix="keep one kind",
        )
    if "label" in forms[0] and {"text", "image"} & set(forms[0]):
        names["images"] = ""  # nothing else has the class
    elif (
        "image" not in forms[0]
        and forms[0] != ("text",)
        and columns.images is None
        and "images" not in values
    ):
        names["images"] = "image"
    result: dict[str, Any] = {}
    for part in forms[0]:
        name = names[part]
        if name not in values:
            fix = f"map it with `columns.{part}`"
            raise DataError(
                f"row {number} has no column {name!r}; its columns are: {there}",
                where=origin,
                fix=fix,
            )
        result[part] = _checked(part, name, values[name], origin, number, padded)
    result |= {
        part: values[names[part]]
        for part in OPTIONAL
        if names[part] and values.get(names[part]) is not None
    }
    taken = {names[part] for part in result if part != "tools"}
    tools = result.pop("tools", None)
    if (
        tools is not None
        and TALKS & set(result)
        and (tools := read_tools(tools, names["tools"], origin, padded))
    ):
        result["tools"] = tools
    return Row(origin, result, {name: value for name, value in values.items() if name not in taken})


def _lack(values: dict[str, Any], name: str) -> int:
    """How much a row lacks of a column: 2 where it has none, 1 where that holds nothing, else 0."""
    return 2 if name not in values else int(values[name] is None or values[name] == [])


def _checked(
    part: str, name: str, value: Any, origin: str, number: int, padded: bool = False
) -> Any:
    """`value` if `part` may be that: text, or messages. Raises DataError."""
    if part == "label":
        if not isinstance(value, str | int):
            raise DataError(
                f"row {number}: column {name!r} is {type(value).__name__}, not the name or number of a class",
                where=origin,
            )
        return value
    if part == "image" and value is not None and not isinstance(value, str):
        return value
    if isinstance(value, str) and part != "messages":
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"row {number}: column {name!r} holds a lone surrogate, which is no text",
                where=origin,
            ) from error
        return value
    if (
        part in ("prompt", "completion", "chosen", "rejected")
        and isinstance(value, Mapping)
        and {"role", "content"} <= value.keys()
    ):
        value = [value]  # one message
    if part in ("text", "image") or not isinstance(value, list) or not value:
        found = (
            "null" if value is None else "an empty list" if value == [] else type(value).__name__
        )
        wants = {"text": "text", "image": "a path", "messages": "a list of messages"}.get(
            part, "text or a list of messages"
        )
        raise DataError(f"row {number}: column {name!r} is {found}, not {wants}", where=origin)
    for index, message in enumerate(value):
        _check_message(message, f"{name}[{index}]", origin, number)
    return [
        _without_absent(message, padded, f"row {number}: {name}[{index}]", origin)
        for index, message in enumerate(value)
    ]


def _check_message(message: Any, label: str, origin: str, number: int) -> None:
    if not isinstance(message, dict):
        raise DataError(
            f"row {number}: {label} is {type(message).__name__}, not {{role, content}}",
            where=origin,
        )
    content = message.get("content")
    has_content = (
        isinstance(content, str)
        or bool(message.get("tool_calls"))
        or (isinstance(content, list) and bool(content))
    )
    for key, there in (("role", isinstance(message.get("role"), str)), ("content", has_content)):
        if not there:
            keys = ", ".join(map(str, message)) or "none"
            raise DataError(
                f"row {number}: {label} has no text under {key!r}; its keys are: {keys}",
                where=origin,
            )
    for index, part in enumerate(content if isinstance(content, list) else []):
        if not (isinstance(part, dict) and (is_image(part) or isinstance(part.get("text"), str))):
            found = part.get("type") if isinstance(part, dict) else type(part).__name__
            found = f"text under {', '.join(map(str, part))}" if found == "text" else found
            raise DataError(
                f"row {number}: {label}.content[{index}] is {found}, neither text nor an image",
                where=origin,
            )
        _checked("text", f"{label}.content[{index}]", part.get("text") or "", origin, number)
    if isinstance(content, str):
        _checked("text", f"{label}.content", content, origin, number)


def _without_absent(
    message: dict[str, Any], padded: bool, label: str, origin: str
) -> dict[str, Any]:
    """The message without the null keys that a table pads it with. A content in parts of text alone becomes one text."""
    message = weighted({key: item for key, item in message.items() if item is not None})
    if (
        role := message["role"].lower()
    ) in ROLES.values():  # columns that are mapped are no format, which has its own names of roles
        message["role"] = role
    if "tool_calls" in message:
        # Chat templates write arguments as JSON; OpenAI's format has them as text.
        calls = unpadded(_read(message["tool_calls"])) if padded else _read(message["tool_calls"])
        message["tool_calls"] = (
            [with_arguments(call, label, origin) for call in calls]
            if isinstance(calls, list)
            else calls
        )
    parts = message.get("content")
    if isinstance(parts, list):
        parts = [{key: item for key, item in part.items() if item is not None} for part in parts]
        message["content"] = (
            parts if any(map(is_image, parts)) else "".join(part["text"] for part in parts)
        )
    return message


def is_image(part: dict[str, Any]) -> bool:
    """Whether a part of a content is an image (image_url in OpenAI's format)."""
    return part.get("type", "image" if part.get("image") is not None else None) in (
        "image",
        "image_url",
    )


def holds_images(row: Row) -> bool:
    """Whether a row names images or has places for them."""
    contents = [
        m.get("content")
        for value in row.values.values()
        if isinstance(value, list)
        for m in value
        if isinstance(m, dict)
    ]
    return bool(row.values.get("images")) or any(
        is_image(part) for c in contents if isinstance(c, list) for part in c
    )


def read_tools(value: Any, name: str, origin: str, padded: bool) -> Tools | None:
    """The tools of a row: a list of JSON schemas, possibly as a JSON text; None if there are none. Raises DataError."""
    found = _read(value) if isinstance(value, str) and value.strip() else value
    if found in (None, [], "") or (isinstance(found, str) and not found.strip()):
        return None
    tools = [_read(tool) for tool in found] if isinstance(found, list) else []
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        fix = "give a list of JSON schemas, map another column with `columns.tools`, or none with `columns: {tools: ''}`"
        raise DataError(f"column {name!r} is no list of tools", where=origin, fix=fix)
    return unpadded(tools) if padded else tools


def unpadded(value: Any) -> Any:
    """`value` without null keys, at any depth."""
    if isinstance(value, dict):
        return {key: unpadded(item) for key, item in value.items() if item is not None}
    return [unpadded(item) for item in value] if isinstance(value, list) else value


def _read(value: Any) -> Any:
    """The object or list in a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value


def _load_saved(source: SavedSource, base_dir: Path) -> Any:
    """A saved dataset; of several splits the one that is set. Raises DataError."""
    import datasets

    where, split = str(base_dir / expanded(source.path)), source.split
    with judged("not a saved dataset", where, DataError, "give a folder written by save_to_disk"):
        loaded = datasets.load_from_disk(where)
    if not isinstance(loaded, dict):
        if split is not None:
            raise DataError(
                f"holds one dataset without splits, so no split {split!r}",
                where=where,
                fix="leave `split` out",
            )
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        raise DataError(
            f"holds the splits {', '.join(loaded)}, but `split` is {split or 'not set'}",
            where=where,
        )
    return loaded[split]


def call_hub(source: HubSource, function: str, **arguments: Any) -> Any:
    """The result of load_dataset or load_dataset_builder for the source; offline, from their cache. Any failure becomes one DataError.
    Where the hub's name does not resolve, both libraries are set offline: they would retry for 23 s."""
    import datasets
    import huggingface_hub.constants as hub

    where = describe(source)
    if source.id.startswith(mirror.PREFIX):
        source = source.model_copy(
            update={
                "id": mirror.fetched(source.id, source.revision, "dataset", DataError, where),
                "revision": None,
            }
        )
    if not (
        hub.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE or urllib.request.getproxies()
    ):  # a proxy resolves names for us
        try:
            socket.getaddrinfo(urlparse(hub.ENDPOINT).hostname, 443)
        except OSError:
            hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    offline = hub.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE
    try:
        return getattr(datasets, function)(
            source.id, name=source.name, revision=source.revision, **arguments
        )
    except datasets.exceptions.DatasetNotFoundError as error:
        fix = (
            "check the id; for a private or gated dataset accept its terms and run `hf auth login`"
        )
        raise DataError(
            f"the hub dataset cannot be had: {first_line(error)}", where=where, fix=fix
        ) from error
    except (ConnectionError, TimeoutError) as error:
        fix = f"check the id and the connection, or use a local copy: kind: file or saved; in China {mirror.MIRRORS}"
        state = (
            "this machine is offline and the dataset is not in its cache"
            if offline
            else first_line(error)
        )
        raise DataError(
            f"the hub dataset cannot be reached: {state}", where=where, fix=fix
        ) from error
    except Exception as error:  # data files of strangers fail in any way (their parsers, their columns, their splits)
        raise DataError(
            f"the hub dataset cannot be loaded: {first_line(error)}", where=where
        ) from error

"""Where rows come from and how they become tokens. No torch here."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from drumline.config.mixing import CurriculumKey, DecontaminateKey, DuplicatesKey, Mixed, StreamKey
from drumline.config.registry import Registered, Spec, find_object, nearest, run_user_code
from drumline.config.section import MOST_SEED, Amount, Part, PathText, Section, Short, Steps
from drumline.config.urls import is_url, secret_mistake
from drumline.errors import ConfigError
from drumline.foreign import content_of, expand_home

# The columns of a row, one tuple for each form that it may have.
Forms = tuple[tuple[str, ...], ...]
TEXT_FORMS: Forms = (("messages",), ("prompt", "completion"), ("text",))
PAIR_FORMS: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
# A row may also be a pair, which is split.
JUDGED_FORMS: Forms = (("prompt", "completion", "label"),)
RETRIEVAL_FORMS: Forms = (("query", "positive", "negative"), ("query", "positive"))
PROMPT_FORMS: Forms = (("prompt",), ("messages",))
# Prompts of rollouts with the completion that is learned in place of a sampled one.
ANSWERED_PROMPT_FORMS: Forms = (("prompt", "completion"), ("messages",))
KINDS_OF_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".xlsx", ".txt")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Files of which `datasets`' save_to_disk writes one.
SAVED = ("dataset_dict.json", "state.json")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# A key that only one kind of source has → that kind.
KIND_OF_KEY = {"id": "hub", "query": "sql", "tasks": "tasks"}


def kind_of_file(path: str) -> str:
    """Return a file's ending without that of a compression: `.jsonl` of rows.jsonl.gz."""
    name = Path(path).name.lower()
    if name.endswith(COMPRESSED):
        name = name.removesuffix(Path(name).suffix)
    return Path(name).suffix


class Columns(Section):
    """The columns of a row that have its parts. The default column of a part has the part's name."""

    messages: str | None = Field(None, description="Column with a list of {role, content}.")
    prompt: str | None = Field(
        None, description="Column with the prompt (text, or a list of messages)."
    )
    completion: str | None = Field(None, description="Column with the completion to train on.")
    text: str | None = Field(None, description="Column with plain text.")
    chosen: str | None = Field(
        None,
        description="Column with the better answer of a pair (text, or messages with or without the prompt).",
    )
    rejected: str | None = Field(None, description="Column with the worse answer.")
    margin: str | None = Field(
        None, description="Column with the margin by which chosen is better (optional)."
    )
    label: str | None = Field(
        None,
        description="Column with the class: a name or a number; kto: whether the answer is good, true or false.",
    )
    query: str | None = Field(None, description="Column with the query of a search.")
    positive: str | None = Field(None, description="Column with a text that answers the query.")
    negative: str | None = Field(
        None,
        description="Column with a text or a list of texts that look right and do not answer the query (hard negatives).",
    )
    image: str | None = Field(
        None, description="Column with the path of an image, relative to the data file."
    )
    tools: str | None = Field(
        None,
        description="Column with the tools: JSON schemas for the chat template; empty: no tools.",
    )
    images: str | None = Field(
        None,
        description="Column with a list of image paths, for messages that mark the positions of images.",
    )


class SourceSpec(Spec, Mixed):
    """A kind of data source. One of your own overrides `rows`, and adds keys of its own."""

    group: ClassVar[str] = "sources"
    noun: ClassVar[str] = "data source"
    yaml_key: ClassVar[str] = "data.train"
    extra_module: ClassVar[str] = "drumline.config.data"
    allows_kind_alone: ClassVar[bool] = False
    allows_any_text: ClassVar[bool] = True

    @classmethod
    def kind_key(cls, field: str | None = None) -> str:
        """Return the key of the YAML that holds the kind: `data.eval` has sources, too."""
        if field is None:
            return super().kind_key()
        return f"data.{field}.kind"

    @classmethod
    def long(cls, value: Any, base_dir: Path | None) -> Any:
        """Return the section that a short form of a source stands for.

        A text is a file, folder, glob or URL; OWNER/NAME of the hub if no such path exists; or
        hub:OWNER/NAME, modelscope:OWNER/NAME, tasks:NAME,NAME, digits. In a section without kind,
        `path` is such a text. Any other value is returned as it is, for the schema to refuse.
        """
        if isinstance(value, str):
            return _source_of_text(value, base_dir)
        if not isinstance(value, Mapping) or "kind" in value:
            return value
        for key, kind in KIND_OF_KEY.items():
            if key in value:
                return {**value, "kind": kind}
        path = value.get("path")
        if isinstance(path, str):
            # The text may stand for a source that has no path, such as a dataset of the hub.
            other_keys = {key: inner for key, inner in value.items() if key != "path"}
            return {**other_keys, **_source_of_text(path, base_dir)}
        if path:
            return {**value, "kind": "file"}
        return {**value}

    columns: Columns = Field(
        default_factory=Columns,
        description="Map your column names to messages | prompt + completion | text.",
    )
    format: Literal[
        "auto",
        "own",
        "sharegpt",
        "alpaca",
        "verdict",
        "ranked",
        "pair",
        "answer",
        "transcript",
        "document",
        "retrieval",
    ] = Field(
        "auto",
        description="Format of another tool's rows (see docs/reference/data.md); auto: found by their columns; own: none.",
    )
    limit: Steps | None = Field(None, description="Take at most this many rows.")
    where: str | None = Field(
        None,
        description="SQL condition on a row's columns, run by DuckDB; other rows are left out.",
    )
    domain: str | None = Field(
        None,
        description="ppo, grpo, online_dpo, gkd: name of these prompts in the metrics; null: the task's or file's name.",
    )
    set: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = Field(
        None,
        description="data.eval: the evaluation set that these rows belong to; what is measured on it is then also NAME/loss.",
    )

    @property
    def label(self) -> str:
        """The source's name in messages and metrics."""
        return self.kind

    def rows(self, base_dir: Path) -> Iterator[Any]:
        """Yield rows as dictionaries of columns, always in the same order.

        A kind of your own overrides this. The rows of the built-in kinds are read by `data.sources`,
        except those of kind python.

        Args:
            base_dir: The YAML's folder, which paths are relative to.

        Raises:
            DataError: The rows cannot be read.
        """
        raise ConfigError(
            f"{type(self).__name__} gives no rows",
            where=self.label,
            fix="override `rows(self, base_dir)`",
        )

    @property
    def is_read_by_sources(self) -> bool:
        """Whether `data.sources` reads the rows.

        Otherwise the kind overrides `rows`, as kind python and those of a user's own do.
        """
        return type(self).rows is SourceSpec.rows

    def content(self, base_dir: Path) -> str:
        """Return a text that identifies the rows for the token cache, for a kind with `rows`.

        By default it is a hash of all rows that may be read: at most `limit`, or all if there is a
        condition `where`, since `limit` then counts only rows that meet it.
        """
        most = self.limit
        if self.where:
            most = None
        digest = hashlib.sha256()
        for row in islice(self.rows(base_dir), most):
            digest.update(json.dumps(row, sort_keys=True, default=content_of).encode())
        return digest.hexdigest()

    def code(self, base_dir: Path) -> str:
        """Return a text that identifies the rows of a stream, which may be endless.

        By default it is a hash of the file that defines them.
        """
        return _hash_of_file(type(self))


def _source_of_text(text: str, base_dir: Path | None) -> dict[str, Any]:
    """Return the source that a text stands for; see `SourceSpec.long`."""
    prefix, _, name = text.partition(":")
    if prefix == "tasks" and name:
        tasks = [task.strip() for task in name.split(",")]
        return {"kind": "tasks", "tasks": {task: {} for task in tasks if task}}
    if prefix == "hub" and name:
        return {"kind": "hub", "id": name}
    if prefix == "modelscope" and name:
        return {"kind": "hub", "id": text}
    if text == "digits":
        return {"kind": "digits"}
    if is_url(text) or "\0" in text:
        return {"kind": "file", "path": text}
    path = (base_dir or Path()) / expand_home(text)
    # `os.path` does not raise for paths that cannot be.
    if any(os.path.isfile(path / name) for name in SAVED):  # noqa: PTH113
        return {"kind": "saved", "path": text}
    is_hub_id = _HUB_ID.fullmatch(text) and kind_of_file(text) not in KINDS_OF_FILES
    if is_hub_id and not os.path.exists(path):  # noqa: PTH110
        return {"kind": "hub", "id": text}
    return {"kind": "file", "path": text}


def _hash_of_file(definition: Any) -> str:
    """Return a hash of the file that a class or function is defined in, else of its name."""
    try:
        text = inspect.getsource(inspect.getmodule(definition) or definition)
    except (OSError, TypeError):  # it is not written in Python
        text = str(getattr(definition, "__qualname__", ""))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_secret(path: str) -> str:
    """Return the path. Raises ValueError if it is empty or holds a password."""
    if not path.strip():
        raise ValueError("it is empty: name a file, a folder or a URL")
    mistake = secret_mistake(path)
    if mistake:
        raise ValueError(mistake)
    return path


class FileSource(SourceSpec):
    kind: Literal["file"] = "file"
    path: Annotated[PathText, AfterValidator(_without_secret)] = Field(
        description="A .jsonl, .json, .csv, .tsv, .parquet, .arrow, .xlsx or .txt file, also as .gz, .bz2, .xz or .zst; a glob, or a folder"
        " of such; relative to the YAML's folder. Or a URL that fsspec reads: s3://, gs://, hf://, https://."
    )
    split: str = Field(
        "train",
        description="Of a folder whose files are named by splits (train, test, validation): the one to read.",
    )
    sheet: str | None = Field(None, description="The sheet of an .xlsx file; null: its only one.")


class HubSource(SourceSpec):
    kind: Literal["hub"] = "hub"
    id: PathText = Field(description="A `datasets` hub id, or `modelscope:OWNER/NAME`.")
    name: PathText | None = Field(None, description="The subset (configuration) of the dataset.")
    split: str = Field("train", description="Split expression.")
    revision: PathText | None = Field(None, description="Branch, tag or commit.")
    streaming: bool = Field(
        False,
        description="Read rows as a stream: only tokens are stored, never the raw data. Requires `limit`.",
    )

    @model_validator(mode="after")
    def _stream_needs_an_end(self) -> HubSource:
        if self.streaming and self.limit is None:
            raise ValueError(
                "streaming requires `limit`: the number of rows to take from the stream"
            )
        return self


class SavedSource(SourceSpec):
    kind: Literal["saved"] = "saved"
    path: PathText = Field(description="A folder written by `datasets`' save_to_disk.")
    split: str | None = Field(None, description="The split, if the folder has more than one.")


class SqlSource(SourceSpec):
    """The rows of a query, by `datasets`."""

    kind: Literal["sql"] = "sql"
    query: str = Field(
        min_length=1,
        description="SELECT …, or the name of a table. With ORDER BY rows come in one order.",
    )
    path: PathText | None = Field(
        None, description="An SQLite file, relative to the YAML's folder. It is only read."
    )
    url_env: str | None = Field(
        None,
        pattern=r"^\w+$",
        description="The name of an environment variable that has the database's URL for SQLAlchemy: DATABASE_URL.",
    )

    @model_validator(mode="after")
    def _one_database(self) -> SqlSource:
        if (self.path is None) == (self.url_env is None):
            raise ValueError(
                "name the database: `path` of an SQLite file, or `url_env`, the environment variable that has its URL"
            )
        if self.path is not None and is_url(self.path):
            raise ValueError(
                "a database's URL may hold a password: put it into an environment variable, and that one's name into `url_env`"
            )
        return self

    @property
    def label(self) -> str:
        return f"sql/{self.url_env or Path(self.path or '').name}"


class TasksSource(SourceSpec):
    kind: Literal["tasks"] = "tasks"
    tasks: dict[str, dict[str, Any]] = Field(
        min_length=1,
        description="reasoning-gym task name → its own options ({} for the defaults), e.g. {basic_arithmetic: {max_digits: 2}}.",
    )
    size: int = Field(
        500, gt=0, le=10**8, description="Total number of rows, divided evenly among the tasks."
    )
    question: str = Field(
        "{question}", description="Template of a prompt; {question} is the task's question."
    )
    seed: int = Field(
        0,
        ge=0,
        le=MOST_SEED,
        description="Seed of the task generator. Use different seeds for train and eval.",
    )


class DigitsSource(SourceSpec):
    """scikit-learn's 1797 handwritten digits as images, for classification without a download.

    They have 8 × 8 pixels (Alpaydin & Kaynak 1998).
    """

    kind: Literal["digits"] = "digits"
    split: Literal["train", "test", "all"] = Field(
        "train", description="train: the first 1437; test: the last 360, by different writers."
    )


class PythonSource(SourceSpec):
    """A function of your own that gives rows, or for a model of kind python any samples."""

    kind: Literal["python"] = "python"
    path: PathText = Field(
        description="file.py:function, relative to the YAML's folder, or package.module:function."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the function by name."
    )

    @property
    def label(self) -> str:
        return self.path

    def rows(self, base_dir: Path) -> Any:
        """Return whatever the function returns."""

        def call() -> Any:
            return self._function(base_dir)(**self.options)

        return run_user_code(call, self.path, "data source", doing="calling")

    def code(self, base_dir: Path) -> str:
        return _hash_of_file(self._function(base_dir))

    def _function(self, base_dir: Path) -> Any:
        return find_object(self.path, base_dir, "data source", "function")


Source = Annotated[SourceSpec, Registered(SourceSpec)]


def _as_list(value: Any) -> Any:
    """Return one source as a list of sources."""
    if isinstance(value, str | Mapping):
        return [value]
    return value


def _as_section(value: Any) -> Any:
    """Return sources alone as the section `data`."""
    if isinstance(value, str | list):
        return {"train": value}
    return value


Sources = Annotated[list[Source], Short(_as_list, {"type": ["string", "object"]})]
# `data: rows.jsonl` is short for `data: {train: [rows.jsonl]}`.
DATA_ALONE = Short(
    _as_section,
    {"type": ["string", "array"], "items": {"type": ["string", "object"]}},
)


def _sources_of_sets(value: Any, base_dir: Path | None = None) -> Any:
    """Return the sources of `data.eval` as one list.

    Of {NAME: sources} each source gets the name of its evaluation set.
    """
    if not isinstance(value, Mapping) or _is_one_source(value):
        return _as_list(value)
    named_sources = list[Any]()
    for name, sources in value.items():
        sources = _as_list(sources)
        if not isinstance(sources, list) or not sources:
            raise ValueError(
                f"{name} has no sources: write a path, a list, or sets by name: {{easy: easy.jsonl, hard: [a.jsonl, b.jsonl]}}"
            )
        for source in sources:
            source = SourceSpec.long(source, base_dir)
            if isinstance(source, Mapping):
                source = {**source, "set": name}
            named_sources.append(source)
    return named_sources


def _is_one_source(section: Mapping[Any, Any]) -> bool:
    """Return whether `data.eval` is the section of one source, and not {NAME: sources}.

    A source has a kind, a path, or a key that only one kind has. An evaluation set may have the
    name of such a key, as in {id: id.jsonl, ood: ood.jsonl}. Then the names of other sets beside it
    are not keys of a source, not even misspelt ones.
    """
    if "kind" in section or "path" in section:
        return True
    if not section.keys() & KIND_OF_KEY.keys():
        return False
    known = {*HubSource.model_fields, *SqlSource.model_fields, *TasksSource.model_fields}
    return all(nearest(str(key), known) is not None for key in section)


SETS = Short(_sources_of_sets, {"type": ["string", "object"]})
# Metrics have these before a slash, so no evaluation set may.
RESERVED = ("reward", "tasks")


def is_surely_own(values: Mapping[Any, Any]) -> bool:
    """Return whether a YAML is Drumline's own for sure: `data.train` has a source in full.

    False means that `data.train` does not tell: it may be another tool's, or a short form such as
    `data: rows.jsonl`.
    """
    data = values.get("data")
    train = data.get("train") if isinstance(data, dict) else None
    if not isinstance(train, list):
        return False
    return any(isinstance(source, dict) for source in train)


def spell_out_sources(data: Any, base_dir: Path) -> Any:
    """Return the section `data` with its sources in full, so that overrides find their keys."""
    data = DATA_ALONE.long(data)
    if not isinstance(data, dict):
        return data
    sources_of = {}
    if "train" in data:
        sources_of["train"] = _as_list(data["train"])
    if "eval" in data:
        with suppress(ValueError):  # the check of the section reports it
            sources_of["eval"] = _sources_of_sets(data["eval"], base_dir)
    full = dict(data)
    for key, sources in sources_of.items():
        if isinstance(sources, list):
            sources = [SourceSpec.long(source, base_dir) for source in sources]
        full[key] = sources
    return full


class DataConfig(Section):
    train: Sources = Field(
        min_length=1,
        description="Sources of training rows; they are concatenated. One may be a path alone.",
    )
    eval: Annotated[list[Source], SETS] = Field(
        default_factory=list,
        description="Held-out rows: sources as for train, or evaluation sets by name: {easy: easy.jsonl, hard: [...]}.",
    )
    where: str | None = Field(
        None,
        description="SQL condition on the rows of every training source; other rows are left out.",
    )
    temperature: float | None = Field(
        None,
        ge=0.1,
        le=1000,
        description="Sources share an epoch by size^(1/temperature): 1 as they are, large: all alike.",
    )
    duplicates: DuplicatesKey = Field(
        None, description="Keep the first of training rows that are alike: exact | near; null: all."
    )
    decontaminate: DecontaminateKey = Field(
        None, description="Leave out training rows that hold rows of `eval`; true: by 13-grams."
    )
    curriculum: CurriculumKey = Field(
        None, description="The first epochs go by length, or by a column; null: all are shuffled."
    )
    stream: StreamKey = Field(
        None,
        description="Tokenise blocks of rows while training reads them: data may be larger than the disk. Requires run.steps.",
    )
    holdout: Amount | Part = Field(
        0,
        description="Without `eval`: hold out this many training rows, or this part of them (0.05), chosen by a hash of their content.",
    )
    max_length: int = Field(
        1024, gt=1, le=10**8, description="Maximum tokens of a training sequence or a pack."
    )
    truncation: Literal["error", "right", "left", "drop"] = Field(
        "right",
        description="A row longer than max_length is cut at its end (right) or start (left), dropped, or an error; such rows are counted.",
    )
    packing: bool = Field(
        True,
        description="Pack short rows into max_length; attention and positions do not cross their boundaries.",
    )
    image_max_pixels: int | None = Field(
        None,
        gt=0,
        le=10**10,
        description="Images with more pixels are scaled down in proportion; null: the image processor's limit.",
    )
    video_max_frames: int = Field(
        8,
        gt=0,
        le=10**4,
        description="At most this many frames of a video, at equal distances; the model gets them as images.",
    )
    learn_on: Literal["assistant", "all"] = Field(
        "assistant", description="Tokens with loss: assistant turns and completions, or all."
    )
    reasoning: Literal["keep", "drop", "mask"] = Field(
        "keep",
        description="Reasoning of answers (<think>…</think>, or reasoning_content of a message): learned as the template renders it, left"
        " out, or read and not learned.",
    )
    order: Literal["shuffle", "sequential"] = Field(
        "shuffle",
        description="Order of the samples in an epoch: a shuffle determined by (run.seed, epoch), or the order of the data.",
    )
    workers: int | None = Field(
        None, gt=0, le=1024, description="Processes that tokenise; null: one per core, at most 8."
    )
    prefetch: int = Field(
        2,
        ge=0,
        le=1000,
        description="Global batches that a thread collates in advance; 0: no thread.",
    )
    verify: bool = Field(
        True, description="Verify the token cache's checksums at start, while the model is loading."
    )
    cache_dir: PathText | None = Field(
        None, description="Folder of the token cache; null: ~/.cache/drumline/data."
    )

    @model_validator(mode="after")
    def _sets_of_eval(self) -> DataConfig:
        if any(source.set for source in self.train):
            raise ValueError("`set` names an evaluation set: it is for sources of data.eval")
        reserved = {source.set for source in self.eval} & set(RESERVED)
        if reserved:
            raise ValueError(
                f"no evaluation set is called {reserved.pop()}: metrics of another kind begin so"
            )
        return self

    @property
    def eval_sets(self) -> dict[str, list[Source]]:
        """The sources of each evaluation set by the name of the set, in the order of `eval`.

        The name is empty for sources without one.
        """
        sets: dict[str, list[Source]] = {}
        for source in self.eval:
            sets.setdefault(source.set or "", []).append(source)
        return sets

    @property
    def is_mixed(self) -> bool:
        """Whether keys set how many samples an epoch has of each source.

        Otherwise an epoch has each sample once. In a mix no pack holds rows of two sources.
        """
        if self.stream is not None:
            return False
        return self.temperature is not None or any(source.mixes for source in self.train)

    @property
    def first_ordering_key(self) -> str:
        """The first key that is set of those that mix or order the samples of an epoch.

        It is written without `data.`, and empty if none is set.
        """
        for key in ("temperature", "curriculum", "stream"):
            if getattr(self, key) is not None:
                return key
        for index, source in enumerate(self.train):
            for key in Mixed.model_fields:
                if getattr(source, key) is not None:
                    return f"train[{index}].{key}"
        return ""

    @property
    def first_filter_key(self) -> str:
        """The first key that is set of those that leave rows out by what they hold.

        It is written without `data.`, and empty if none is set.
        """
        for key in ("where", "duplicates", "decontaminate"):
            if getattr(self, key) is not None:
                return key
        for role, index, source in self._all_sources():
            if source.where is not None:
                return f"{role}[{index}].where"
        return ""

    def _all_sources(self) -> Iterator[tuple[str, int, Source]]:
        """Yield (train or eval, index, source) of each source."""
        for index, source in enumerate(self.train):
            yield "train", index, source
        for index, source in enumerate(self.eval):
            yield "eval", index, source

    @model_validator(mode="after")
    def _agrees(self) -> DataConfig:
        """Raise ValueError for keys that contradict each other."""
        self._check_sources()
        self._check_stream()
        self._check_weights()
        if self.decontaminate and not self.eval:
            raise ValueError(
                "decontaminate compares rows with those of `eval`, and there are none; with holdout use duplicates: near"
            )
        return self

    def _check_sources(self) -> None:
        for role, index, source in self._all_sources():
            name = f"{role}[{index}]"
            if role == "eval" and source.mixes:
                raise ValueError(
                    f"{name}: weight, repeats and cap are of training rows; held-out rows are gone through once"
                )
            if source.repeats is not None and source.weight is not None:
                raise ValueError(
                    f"{name}: weight and repeats both say how much an epoch has of it; keep one"
                )

    def _check_stream(self) -> None:
        if not self.stream:
            return
        for name in ("holdout", "duplicates", "temperature"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} needs all rows at once, and a stream has a block of them; leave one of the two out"
                )
        for key in ("repeats", "cap"):
            if any(getattr(source, key) for source in self.train):
                raise ValueError(f"{key} is a part of an epoch, and a stream has none; use weight")

    def _check_weights(self) -> None:
        unrepeated = [source for source in self.train if source.repeats is None]
        has_weights = any(source.weight is not None for source in unrepeated)
        if has_weights:
            for index, source in enumerate(self.train):
                if source.weight is None and source.repeats is None:
                    raise ValueError(
                        f"train[{index}] has no weight, and others have: give it one, or `repeats`"
                    )
        if unrepeated and all(source.weight == 0 for source in self.train):
            raise ValueError(
                "the weights of train sum to nothing; give one source a weight above 0"
            )
        if has_weights and self.temperature is not None:
            raise ValueError(
                "temperature makes weights of sizes, and weights are set: keep one of them"
            )

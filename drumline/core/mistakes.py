"""What pydantic found wrong → one line that names the place, what was given, what is wanted, and the way out."""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from pydantic import BaseModel, ValidationError

from drumline.core.by_name import nearest
from drumline.core.suggest import field_at, keys_at, kind_of, kinds_at, meant, models_at
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


class Origins:
    """Where the values came from: lines of a file, what stands elsewhere (`set_at`), and the overrides laid over both."""

    def __init__(self, name: str, lines: dict[Place, int], overrides: dict[Place, str], set_at: dict[Place, str] | None = None) -> None:
        self.name, self.lines, self.overrides, self.set_at = name, lines, overrides, set_at or {}

    def where(self, place: Place) -> str:
        """The override or the line that a value came from, with its dotted key; the nearest section's line for a key that is not there."""
        for start, override in reversed(self.overrides.items()):
            if place[: len(start)] == start:
                return f"override {override}"
        for start, override in self.overrides.items():
            if place and place not in self.lines and start[: len(place)] == place:
                return f"override {override}"
        dotted = ".".join(place)
        for length in range(len(place), 0, -1):
            if place[:length] in self.set_at:
                return self.set_at[place[:length]]
            if place[:length] in self.lines:
                return f"{self.name}:{self.lines[place[:length]]}: {dotted}"
        return f"{self.name}: {dotted}" if dotted else self.name


def first_mistake(error: ValidationError, origins: Origins) -> ConfigError:
    """The first mistake as one line; how many more there are stands behind it."""
    details = error.errors(include_url=False)
    # Unknown keys go first: a misspelt key also makes the right one look as if it were missing.
    details.sort(key=lambda d: d["type"] != "extra_forbidden")
    place, kind = _place(details[0]["loc"])
    what, fix = _describe(details[0], place, kind)
    more = len(details) - 1
    if more:
        what += f" (and {more} more mistake{'s' * (more > 1)})"
    return ConfigError(what, where=origins.where(place), fix=fix or None)


def check_numbers(given: Any, made: Any, origins: Origins, place: Place = ()) -> None:
    """Refuse what pydantic lets pass: true and false as 1 and 0, and numbers that are not finite. `made`: the config, dumped."""
    if isinstance(given, dict) and isinstance(made, dict):
        for key, value in given.items():
            check_numbers(value, made.get(key), origins, (*place, str(key)))
    elif isinstance(given, list) and isinstance(made, list | tuple):
        for index, (value, other) in enumerate(zip(given, made, strict=True)):
            check_numbers(value, other, origins, (*place, str(index)))
    elif isinstance(given, bool) and isinstance(made, int | float) and not isinstance(made, bool):
        raise ConfigError(f"{_shown(given)} given, a number is wanted", where=origins.where(place), fix=_default(place))
    elif isinstance(made, float) and not math.isfinite(made):
        raise ConfigError(f"{_shown(given)} given, a finite number is wanted", where=origins.where(place), fix=_default(place))


def _place(loc: tuple[str | int, ...]) -> tuple[Place, str | None]:
    """pydantic's location without the union tags that it puts in, and the tag of the section that the last key stands in."""
    place: Place = ()
    tag: str | None = None
    owner: str | None = None
    for part in map(str, loc):
        if tag is None and part in {kind_of(model) for model in models_at(place)}:
            tag = part
        elif part != "[key]":
            place, owner, tag = (*place, part), tag, None
    return place, owner


def _describe(detail: Any, place: Place, kind: str | None) -> tuple[str, str]:
    """(what is wrong, how to mend it) of one of pydantic's errors."""
    error, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if error == "extra_forbidden":
        return _unknown_key(place, kind)
    if error == "missing":
        return _missing(place)
    if error in ("union_tag_invalid", "union_tag_not_found"):
        return _no_kind(error, given, place)
    if error == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        guess = nearest(str(given), choices)
        return f"{_shown(given)} is not one of {', '.join(choices)}", f"did you mean {guess!r}?" if guess else "choose one of them"
    if error == "value_error":
        return str(context["error"]), ""
    if error == "invalid_key" or detail["loc"][-1] == "[key]":
        return f"the key {_shown(given)} is no text", "put it in quotes"
    if isinstance(given, float) and not math.isfinite(given):
        return f"{_shown(given)} given, a finite number is wanted", _default(place)
    template = next((template for start, template in WANTED.items() if error.startswith(start)), None)
    if template is None:
        return f"{_shown(given)} given: {detail['msg'][0].lower()}{detail['msg'][1:]}", _default(place)
    wanted = template.format(**{name: f"{limit:.12g}" for name, limit in context.items() if isinstance(limit, int | float)})
    return f"{_shown(given)} given, {wanted} {'are' if wanted.endswith('values') else 'is'} wanted", _mend(given, wanted, place)


def _mend(given: Any, wanted: str, place: Place) -> str:
    if wanted == "text" and isinstance(given, int | float):
        return "put it in quotes"
    if wanted.startswith("a list") and not isinstance(given, list) and given is not None:
        return "put [ ] around it" if not isinstance(given, dict) else "begin each item with `- `"
    if wanted == "keys and values":
        if len(models_at(place)) > 1:
            return f"write {{kind: …}}; there are {', '.join(kinds_at(place))}"
        known = f"known keys: {', '.join(keys_at(place))}" if keys_at(place) else "write {key: value}"
        return f"leave it out, or give it some; {known}" if given is None and place != ("data",) else known
    return _default(place)


def _default(place: Place) -> str:
    """How to get rid of a wrong value: the default, where there is one to fall back to."""
    field = field_at(place)
    if field is None or field.is_required() or field.default_factory is not None or isinstance(field.default, BaseModel):
        return "`drumline schema` describes it"
    return f"the default is {json.dumps(field.default)}"


def _missing(place: Place) -> tuple[str, str]:
    if place[-1].isdigit():
        return f"{place[-1]} given where more are wanted", _default(place[:-1])
    if place == ("data",):
        return "'data' is missing", "say what to train on: data: {train: [{kind: file, path: rows.jsonl}]}"
    field = field_at(place)
    return f"{place[-1]!r} is missing", f"add it: {field.description}" if field and field.description else "add it; see `drumline schema`"


def _no_kind(error: str, given: Any, place: Place) -> tuple[str, str]:
    kinds = kinds_at(place)
    there = f"there are {', '.join(kinds)}"
    if error == "union_tag_invalid":
        tag = given.get("kind") if isinstance(given, dict) else given
        guess = nearest(str(tag), kinds)
        return f"no kind {_shown(tag)} here", (f"did you mean {guess!r}? " if guess else "") + there
    fitting = [k for k in kinds if isinstance(given, dict) and given and all(str(key) in keys_at(place, k) for key in given)]
    return "which `kind` this is was left out", f"add kind: {fitting[0]}" if len(fitting) == 1 else there


def _unknown_key(place: Place, kind: str | None) -> tuple[str, str]:
    key, section = place[-1], place[:-1]
    what = f"unknown key {key!r}"
    for rule in [rule for model in models_at(section) if kind_of(model) == kind for rule in getattr(model, "rules", ())]:
        if rule.phase == "schema" and rule.name == key:
            return f"{kind} has no {key}: {rule.reason}", f"use {rule.instead}"
    owners = [k for k in kinds_at(section) if k != kind and key in keys_at(section, k)]
    if kind and owners:
        return f"{what} of kind {kind}", f"kind {' or '.join(owners)} has it"
    if guesses := meant(key, section, kind):
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

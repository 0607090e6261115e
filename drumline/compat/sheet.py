"""What a table of old keys is made of: one rule a key, and the sheet that the rules write the new config on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.core.by_name import nearest
from drumline.core.yaml_lines import Place
from drumline.errors import ConfigError

AUTO = ("auto", None)  # values that say nothing


@dataclass(frozen=True)
class Source:
    """A file of another tool, or what another launcher exports (without lines)."""

    name: str
    lines: Mapping[Place, int] = field(default_factory=dict)

    def where(self, place: Place) -> str:
        line = f":{self.lines[place]}" if place in self.lines else ""
        return f"{self.name}{line}: {'.'.join(place)}"


@dataclass(frozen=True)
class Old:
    """One key of an old file. `key` is the name that the tables know, `place` where it is written."""

    key: str
    value: Any
    source: Source
    place: Place

    @property
    def where(self) -> str:
        return self.source.where(self.place)

    def inside(self) -> list[Old]:
        """The keys of the section below this one, none for an empty one. Raises ConfigError where it is no section."""
        if self.value in (None, ""):
            return []
        if not isinstance(self.value, dict):
            raise refuse(self, f"{shown(self.value)} given, keys and values are wanted", "write {key: value}")
        return listed(self.value, self.source, self.place)

    def by_key(self) -> dict[str, Old]:
        """The same by their keys."""
        return {each.key: each for each in self.inside()}


@dataclass
class Sheet:
    """The new config as it comes into being. `origins`: which old key a new value comes from; `taken`: old keys that wait to be
    combined with others; `base`: the folder of the old file, `folder` of the new config, which paths are relative to."""

    base: Path
    folder: Path
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, Old] = field(default_factory=dict)
    taken: dict[str, Old] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resume: str | None = None  # what the old file says of going on

    def put(self, dotted: str, value: Any, old: Old) -> None:
        """Say a value of the new config. Raises ConfigError where another old key has said another."""
        *sections, last = place = tuple(dotted.split("."))
        inside = self.values
        for name in sections:
            inside = inside.setdefault(name, {})
        if last in inside and inside[last] != value:
            raise contradiction(old, self.origins[place])
        inside[last] = value
        self.origins[place] = old
        for length in range(1, len(place)):
            self.origins.setdefault(place[:length], old)

    def get(self, dotted: str, default: Any = None) -> Any:
        """What is said so far."""
        inside: Any = self.values
        for name in dotted.split("."):
            if not isinstance(inside, dict) or name not in inside:
                return default
            inside = inside[name]
        return inside

    @property
    def set_at(self) -> dict[Place, str]:
        """Where each new value stands in the old file."""
        return {place: old.where for place, old in self.origins.items()}

    def note(self, old: Old, text: str) -> None:
        """One line for a key that has no meaning any more, or another one."""
        self.notes.append(f"{old.where}: {text}")


def pop(sheet: Sheet, *names: str) -> dict[str, Old]:
    """Those of the keys that wait, taken off the sheet."""
    return {name: sheet.taken.pop(name) for name in names if name in sheet.taken}


Rule = Callable[[Sheet, Old], None]
Convert = Callable[[Old], Any]


def refuse(old: Old, what: str, fix: str) -> ConfigError:
    """The error for an old key that cannot be translated."""
    return ConfigError(what, where=old.where, fix=fix)


def contradiction(old: Old, other: Old) -> ConfigError:
    """The error for two old keys of which only one can be true."""
    return refuse(old, f"{shown(old.value)}, but {other.where} says {shown(other.value)}", "keep one of them")


def shown(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "keys and values"
    return str(value).lower() if isinstance(value, bool) else repr(value)


# ------------------------------------------------------------------------------------------------------- what a value says


def flag(old: Old) -> bool:
    """true or false, also as text: accelerate's own files have 'no' and "true"."""
    word = str(old.value).lower()
    if word in ("true", "yes", "1", "on"):
        return True
    if word in ("false", "no", "0", "off", "none", ""):
        return False
    raise refuse(old, f"{shown(old.value)} given, true or false is wanted", "write true or false")


def whole(old: Old) -> int:
    """A whole number, also as text."""
    try:
        if isinstance(old.value, bool) or float(old.value) != int(float(old.value)):
            raise ValueError
        return int(float(old.value))
    except (TypeError, ValueError, OverflowError):
        raise refuse(old, f"{shown(old.value)} given, a whole number is wanted", "write a number such as 2") from None


def number(old: Old) -> float:
    """A number, also as text: PyYAML reads 1e-5 as text, so old files may have put it in quotes."""
    try:
        if isinstance(old.value, bool):
            raise ValueError
        return float(old.value)
    except (TypeError, ValueError):
        raise refuse(old, f"{shown(old.value)} given, a number is wanted", "write a number such as 1.0e-5") from None


def name_list(old: Old) -> list[str]:
    """A list of names, also as one text with commas."""
    parts = old.value.split(",") if isinstance(old.value, str) else old.value if isinstance(old.value, list) else [old.value]
    return [str(part).strip() for part in parts if str(part).strip()]


def one_of(table: Mapping[str, Any], why_not: Mapping[str, str] | None = None) -> Convert:
    """One word out of a table, in any case; `why_not` has words that others know, with the reason and the way out."""

    def convert(old: Old) -> Any:
        word = "no" if old.value is False or old.value is None else str(old.value).lower()
        if word in table:
            return table[word]
        if why_not and word in why_not:
            raise refuse(old, f"{shown(old.value)} cannot be translated", why_not[word])
        guess = nearest(word, list(table))
        there = f"there are {', '.join(table)}"
        raise refuse(old, f"no {shown(old.value)} here", f"did you mean {guess!r}? {there}" if guess else there)

    return convert


# ------------------------------------------------------------------------------------------------------------- what a key does


def as_is(old: Old) -> Any:
    return old.value


def to(dotted: str, convert: Convert = as_is) -> Rule:
    """The value goes to a key of the new config; `auto` and nothing say nothing."""

    def rule(sheet: Sheet, old: Old) -> None:
        if old.value not in AUTO:
            sheet.put(dotted, convert(old), old)

    return rule


def switch(dotted: str, value: Any) -> Rule:
    """A key of the new config gets this value where the old one is true."""
    return lambda sheet, old: sheet.put(dotted, value, old) if flag(old) else None


def nothing(sheet: Sheet, old: Old) -> None:
    """The key says nothing that needs a word."""


def later(name: str | None = None) -> Rule:
    """The value waits, under the old key's own name or another, to be combined with others."""

    def rule(sheet: Sheet, old: Old) -> None:
        if old.value in AUTO:
            return
        key = name or old.key
        if key in sheet.taken and sheet.taken[key].value != old.value:
            raise contradiction(old, sheet.taken[key])
        sheet.taken[key] = old

    return rule


def gone(why: str) -> Rule:
    """The key has no meaning any more, and nothing is lost by that."""
    return lambda sheet, old: sheet.note(old, why)


def only(*neutral: Any, why: str, fix: str) -> Rule:
    """A key whose effect Drumline does not have: refused, unless its value says that the effect is not wanted."""

    def rule(sheet: Sheet, old: Old) -> None:
        if old.value in (*AUTO, False, "", *neutral) or str(old.value).lower() in ("no", "none", "false"):
            return
        raise refuse(old, f"{shown(old.value)} given: {why}", fix)

    return rule


def listed(values: dict[Any, Any], source: Source, place: Place = ()) -> list[Old]:
    """The keys of a section that stands at `place`."""
    return [Old(str(key), value, source, (*place, str(key))) for key, value in values.items()]


def read(table: Mapping[str, Rule], sheet: Sheet, olds: list[Old], what: str) -> None:
    """Let each old key do what the table says. Raises ConfigError for a key that is not in it, with the one that was probably meant."""
    for old in olds:
        rule = table.get(old.key)
        if rule is None:
            guess = nearest(old.key, list(table))
            fix = f"did you mean {guess!r}?" if guess else "remove it, or write it as a key of Drumline: `drumline schema` has them"
            raise refuse(old, f"unknown key {old.key!r} of {what}", fix)
        rule(sheet, old)

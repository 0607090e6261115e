"""The keys of an old file, and the sheet that the new config is written on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.core.redact import SECRET, redact
from drumline.core.yaml_lines import Place
from drumline.errors import ConfigError

AUTO = ("auto", None)  # values that set nothing


class Lacking(ConfigError):
    """A value that another tool knows and Drumline does not."""


@dataclass(frozen=True)
class Source:
    """A file of another tool, or the variables of another launcher (without lines)."""

    name: str
    lines: Mapping[Place, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Old:
    """A key of an old file. `key`: its name in the tables; `place`: its position in the file."""

    key: str
    value: Any
    source: Source
    place: Place

    @property
    def where(self) -> str:
        line = f":{self.source.lines[self.place]}" if self.place in self.source.lines else ""
        return f"{self.source.name}{line}: {'.'.join(self.place)}"

    def inside(self) -> list[Old]:
        """The keys of the section below this one, none for an empty one. Raises ConfigError where it is no section."""
        if self.value in (None, ""):
            return []
        if not isinstance(self.value, dict):
            raise refuse(
                self, f"{shown(self.value)} given, keys and values are wanted", "write {key: value}"
            )
        return listed(self.value, self.source, self.place)

    def by_key(self) -> dict[str, Old]:
        """The same by their keys."""
        return {each.key: each for each in self.inside()}


@dataclass
class Sheet:
    """The new config while rules write it. `origins`: the old key of each new value; `waiting`: old keys that wait until a group combines
    them; `base`: the folder of the old file; `folder`: of the new config, which its paths are relative to; None: they are absolute. `weak`:
    values that yield to those of a config silently. `lenient`: what Drumline lacks is left out, with a note in the place of an error."""

    base: Path
    folder: Path | None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, Old] = field(default_factory=dict)
    waiting: dict[str, Old] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    weak: set[Place] = field(default_factory=set)
    resume: str | None = None  # the checkpoint that the old file resumes from
    lenient: bool = False

    def put(self, dotted: str, value: Any, old: Old, over: Any = None) -> None:
        """Set a value of the new config. Raises ConfigError where another old key has set another, which is not `over`."""
        *sections, last = place = tuple(dotted.split("."))
        inside = self.values
        for name in sections:
            inside = inside.setdefault(name, {})
        if last in inside and inside[last] not in (value, over):
            raise contradiction(old, self.origins[place])
        inside[last] = value
        self.origins[place] = old
        for length in range(1, len(place)):
            self.origins.setdefault(place[:length], old)

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value of `section.key` that is set so far, else `default`."""
        inside: Any = self.values
        for name in dotted.split("."):
            inside = inside.get(name) if isinstance(inside, dict) else None
        return default if inside is None else inside

    @property
    def set_at(self) -> dict[Place, str]:
        """The place in the old file of each new value."""
        return {place: old.where for place, old in self.origins.items()}

    def note(self, old: Old, text: str) -> None:
        """Add a line for a key that has lost its meaning, or has another one here."""
        self.notes.append(f"{old.where}: {printed(old)}: {text}")

    def lacks(self, old: Old, why: str, fix: str) -> None:
        """A key whose effect Drumline does not have. Raises ConfigError, unless the sheet is lenient."""
        if not self.lenient:
            raise refuse(old, f"{shown(old.value)} given: {why}", fix)
        self.note(old, f"left out: {why} — {fix}")


def pop(sheet: Sheet, *names: str) -> dict[str, Old]:
    """Those of the keys that wait; the sheet loses them."""
    return {name: sheet.waiting.pop(name) for name in names if name in sheet.waiting}


def refuse(old: Old, what: str, fix: str) -> ConfigError:
    """The error for an old key that cannot be translated."""
    return ConfigError(what, where=old.where, fix=fix)


def contradiction(old: Old, other: Old) -> ConfigError:
    """The error for two old keys of which only one can be true."""
    return refuse(
        old, f"{shown(old.value)}, but {other.where} says {shown(other.value)}", "keep one of them"
    )


def shown(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "keys and values"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def printed(old: Old) -> str:
    """A value for a note: short, on one line, and no secret."""
    if (
        SECRET.search(old.key)
        or "webhook" in old.key
        or (isinstance(old.value, str) and not old.value.isprintable())
    ):
        return "…"
    text = redact(shown(old.value))
    return text if len(text) <= 60 else f"{text[:59]}…"


def listed(values: dict[Any, Any], source: Source, place: Place = ()) -> list[Old]:
    """The keys of a section that stands at `place`."""
    return [Old(str(key), value, source, (*place, str(key))) for key, value in values.items()]

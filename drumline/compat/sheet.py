"""The keys of another tool's file, and the sheet on which rules write the new config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.config.resume import Resume
from drumline.errors import ConfigError
from drumline.system.redact import SECRET, redact
from drumline.system.yaml_lines import Place

AUTO = ("auto", None)  # values that set nothing


class Unsupported(ConfigError):
    """The error for a value that another tool has and Drumline lacks."""


@dataclass(frozen=True)
class Source:
    """Where old keys come from: a file of another tool, or the variables of a launcher.

    `lines` maps the position of each key to its line in the file. Variables have no lines.
    """

    name: str
    lines: Mapping[Place, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OldKey:
    """One key of another tool's file, with its value.

    `key` is its name in the tables of rules, `place` is its position in the file.
    """

    key: str
    value: Any
    source: Source
    place: Place

    @property
    def where(self) -> str:
        """The source, the line if known, and the dotted key, as errors and notes print them."""
        file = self.source.name
        if self.place in self.source.lines:
            file += f":{self.source.lines[self.place]}"
        return f"{file}: {'.'.join(self.place)}"

    def inside(self) -> list[OldKey]:
        """Return the keys of this section; none if it is empty.

        Raises ConfigError if the value is not a section.
        """
        if self.value in (None, ""):
            return []
        if not isinstance(self.value, dict):
            raise translation_error(
                self,
                f"{format_value(self.value)} given, keys and values are wanted",
                "write {key: value}",
            )
        return section_keys(self.value, self.source, self.place)

    def by_key(self) -> dict[str, OldKey]:
        """Return the keys of this section by name, as `inside` does."""
        return {each.key: each for each in self.inside()}


@dataclass
class Sheet:
    """The new config while rules write it.

    Args:
        base: the folder of the old file.
        folder: the folder of the new config. Its paths are relative to it; None makes them
            absolute.
        values: the sections and values of the new config.
        origins: the old key behind each new value, by the position of the value.
        waiting: old keys that wait until a group combines them, by their name in the tables.
        notes: lines that tell the user what lost its meaning.
        weak: positions of values that yield to a config's own values without an error.
        resume: what the old file resumes from; None: it starts afresh.
        lenient: leave out what Drumline lacks, and write a note in place of an error.
    """

    base: Path
    folder: Path | None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, OldKey] = field(default_factory=dict)
    waiting: dict[str, OldKey] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    weak: set[Place] = field(default_factory=set)
    resume: Resume | None = None
    lenient: bool = False

    def put(self, dotted: str, value: Any, old: OldKey, over: Any = None) -> None:
        """Set a value of the new config. `dotted` is its `section.key`, `old` the key it comes from.

        Raises ConfigError if another old key has set a different value. `over` is a value that may
        be replaced.
        """
        place = tuple(dotted.split("."))
        *sections, last = place
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
        """Return the value of `section.key` that is set so far, else `default`."""
        inside: Any = self.values
        for name in dotted.split("."):
            if not isinstance(inside, dict):
                return default
            inside = inside.get(name)
        if inside is None:
            return default
        return inside

    @property
    def set_at(self) -> dict[Place, str]:
        """The position in the old file of each new value, as text."""
        return {place: old.where for place, old in self.origins.items()}

    def note(self, old: OldKey, text: str) -> None:
        """Add a note about a key that has no meaning here, or a different one."""
        self.notes.append(f"{old.where}: {format_for_note(old)}: {text}")

    def report_unsupported(self, old: OldKey, why: str, fix: str) -> None:
        """Report a key whose effect Drumline lacks: a note on a lenient sheet, else ConfigError."""
        if not self.lenient:
            raise translation_error(old, f"{format_value(old.value)} given: {why}", fix)
        self.note(old, f"left out: {why} — {fix}")


def take_waiting(sheet: Sheet, *names: str) -> dict[str, OldKey]:
    """Remove the named keys from the waiting ones and return those that were there."""
    return {name: sheet.waiting.pop(name) for name in names if name in sheet.waiting}


def translation_error(old: OldKey, what: str, fix: str) -> ConfigError:
    """Return the error for an old key that cannot be translated."""
    return ConfigError(what, where=old.where, fix=fix)


def contradiction(old: OldKey, other: OldKey) -> ConfigError:
    """Return the error for two old keys that exclude each other."""
    what = f"{format_value(old.value)}, but {other.where} says {format_value(other.value)}"
    return translation_error(old, what, "keep one of them")


def format_value(value: Any) -> str:
    """Return a value as YAML writes it, or the kind of a list or section."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


MOST_NOTE_CHARACTERS = 60


def format_for_note(old: OldKey) -> str:
    """Return a value for a note: short, on one line, and without secrets."""
    is_secret = bool(SECRET.search(old.key)) or "webhook" in old.key
    has_control_characters = isinstance(old.value, str) and not old.value.isprintable()
    if is_secret or has_control_characters:
        return "…"
    text = redact(format_value(old.value))
    if len(text) <= MOST_NOTE_CHARACTERS:
        return text
    return f"{text[: MOST_NOTE_CHARACTERS - 1]}…"


def section_keys(values: dict[Any, Any], source: Source, place: Place = ()) -> list[OldKey]:
    """Return the keys of a section whose position is `place`."""
    return [OldKey(str(key), value, source, (*place, str(key))) for key, value in values.items()]

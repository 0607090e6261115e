"""The keys of another tool's file, and the new config (the sheet) that rules make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.config.resume import Resume
from drumline.errors import ConfigError
from drumline.system.redact import SECRET, redact
from drumline.system.yaml_lines import Place

# Values of an old key that set nothing.
AUTO = ("auto", None)


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
    """A key of another tool's file, with its value, which may be a section of more keys.

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

    def children(self) -> list[OldKey]:
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

    def children_by_key(self) -> dict[str, OldKey]:
        """Return the keys of this section by name, as `children` does."""
        return {each.key: each for each in self.children()}


@dataclass
class Sheet:
    """The new config while rules write it.

    Args:
        base: the folder of the old file.
        folder: the folder of the new config, which its paths are relative to; None makes them
        absolute.
        values: the sections and values of the new config.
        origins: position of a value in the new config → the old key that it comes from.
        waiting: old keys, by their name in the tables, whose meaning depends on other keys. A
        function
            of the tool takes them when all keys of the file have been read.
        notes: lines that tell the user which keys have no meaning here.
        yielding: positions of values that the user's own config may replace without an error.
        resume: what the old file resumes from; None if it begins anew.
        lenient: whether a key whose effect Drumline lacks gets a note in place of an error.
    """

    base: Path
    folder: Path | None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, OldKey] = field(default_factory=dict)
    waiting: dict[str, OldKey] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    yielding: set[Place] = field(default_factory=set)
    resume: Resume | None = None
    lenient: bool = False

    def put(self, dotted: str, value: Any, old: OldKey, over: Any = None) -> None:
        """Set a value of the new config.

        Args:
            dotted: `section.key` of the new config. The tables never set a key below another value.
            value: the value.
            old: the old key that the value comes from.
            over: a value of another old key that this one may replace; by default the value None.

        Raises ConfigError if another old key has set a different value.
        """
        place = tuple(dotted.split("."))
        *sections, last = place
        section = self.values
        for name in sections:
            section = section.setdefault(name, {})
        if last in section and section[last] not in (value, over):
            raise contradiction(old, self.origins[place])
        section[last] = value
        self.origins[place] = old
        for length in range(1, len(place)):
            self.origins.setdefault(place[:length], old)

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value of `section.key` that is set so far, else `default`."""
        section: Any = self.values
        for name in dotted.split("."):
            if not isinstance(section, dict):
                return default
            section = section.get(name)
        if section is None:
            return default
        return section

    @property
    def set_at(self) -> dict[Place, str]:
        """Position of a value in the new config → its place in the old file, as text.

        Positions whose values were removed again are also here.
        """
        return {place: old.where for place, old in self.origins.items()}

    def note(self, old: OldKey, text: str) -> None:
        """Add a note about an old key that has no meaning here, or a different one. `text`: why."""
        self.notes.append(f"{old.where}: {format_for_note(old)}: {text}")

    def report_unsupported(self, old: OldKey, why: str, fix: str) -> None:
        """Add a note about an old key whose effect Drumline lacks, if the sheet is lenient.

        Raises ConfigError on any other sheet.

        Args:
            old: the old key.
            why: why it has no effect here.
            fix: what to write instead.
        """
        if not self.lenient:
            raise translation_error(old, f"{format_value(old.value)} given: {why}", fix)
        self.note(old, f"left out: {why} — {fix}")


def take_waiting(sheet: Sheet, *names: str) -> dict[str, OldKey]:
    """Remove keys of these names from `sheet.waiting`, and return those that were there, by name."""
    return {name: sheet.waiting.pop(name) for name in names if name in sheet.waiting}


def translation_error(old: OldKey, what: str, fix: str) -> ConfigError:
    """Return the error for an old key that cannot be translated."""
    return ConfigError(what, where=old.where, fix=fix)


def contradiction(old: OldKey, other: OldKey) -> ConfigError:
    """Return the error for two old keys that contradict each other."""
    what = f"{format_value(old.value)}, but {other.where} says {format_value(other.value)}"
    return translation_error(old, what, "keep one of them")


def format_value(value: Any) -> str:
    """Return a value as text for an error; of a list or section only what it is."""
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
    """Return the keys of a section. `place`: the position of the section in the file."""
    return [OldKey(str(key), value, source, (*place, str(key))) for key, value in values.items()]

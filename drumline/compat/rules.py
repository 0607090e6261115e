"""The rules for keys of other tools. A rule writes on the sheet what a key means in Drumline's config.

Each tool has tables of key → rule. The functions here return the rules (`set_key`, `drop`,
`reject`, `postpone`, …) and the converters of values (`read_flag`, `read_number`, …).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drumline.compat.sheet import (
    AUTO,
    OldKey,
    Sheet,
    Unsupported,
    contradiction,
    format_value,
    translation_error,
)
from drumline.config.registry import nearest
from drumline.foreign import finite_number

# A function that writes on a sheet what an old key means.
Rule = Callable[[Sheet, OldKey], None]
# A function that returns the new value for an old key. It raises ConfigError for a wrong value.
Converter = Callable[[OldKey], Any]


def read_flag(old: OldKey) -> bool:
    """Return a value that is true or false, which may be written as a word or as 0 or 1.

    accelerate itself writes 'no' and "true". Raises ConfigError for any other value.
    """
    word = str(old.value).lower()
    if word in ("true", "yes", "1", "on"):
        return True
    if word in ("false", "no", "0", "off", "none", ""):
        return False
    raise translation_error(
        old, f"{format_value(old.value)} given, true or false is wanted", "write true or false"
    )


def read_number(old: OldKey) -> float:
    """Return a number, which may be written as text. Raises ConfigError for any other value.

    PyYAML reads 1e-5 as text, so other tools accept numbers in quotes.
    """
    value = finite_number(old.value)
    if value is None:
        raise translation_error(
            old,
            f"{format_value(old.value)} given, a number is wanted",
            "write a number such as 1.0e-5",
        )
    return value


def read_integer(old: OldKey) -> int:
    """Return a whole number, which may be written as text. Raises ConfigError for any other value."""
    value = finite_number(old.value)
    if value is None or not value.is_integer():
        raise translation_error(
            old,
            f"{format_value(old.value)} given, a whole number is wanted",
            "write a number such as 2",
        )
    return int(value)


def read_names(old: OldKey) -> list[str]:
    """Return a list of names, which may be written as one text with commas."""
    parts: list[Any]
    if isinstance(old.value, str):
        parts = old.value.split(",")
    elif isinstance(old.value, list):
        parts = old.value
    else:
        parts = [old.value]
    stripped = [str(part).strip() for part in parts]
    return [part for part in stripped if part]


def read_choice(table: Mapping[str, Any], why_not: Mapping[str, str] | None = None) -> Converter:
    """Return a converter of a word, in upper or lower case, to its value in a table.

    The converter raises Unsupported for a word that the table lacks.

    Args:
        table: Word in lower case → value.
        why_not: Word that other tools accept → the fix in the error.
    """

    def convert(old: OldKey) -> Any:
        if old.value is False or old.value is None:
            word = "no"
        else:
            word = str(old.value).lower()
        if word in table:
            return table[word]
        if why_not and word in why_not:
            raise Unsupported(
                f"{format_value(old.value)} cannot be translated",
                where=old.where,
                fix=why_not[word],
            )
        guess = nearest(word, list(table))
        fix = f"there are {', '.join(table)}"
        if guess:
            fix = f"did you mean {guess!r}? {fix}"
        raise Unsupported(f"no {format_value(old.value)} here", where=old.where, fix=fix)

    return convert


def keep_value(old: OldKey) -> Any:
    """Return the value of an old key as it is."""
    return old.value


def read_as_text(old: OldKey) -> str:
    """Return the value of an old key as text."""
    return str(old.value)


def choose_by_flag(on: Any, off: Any) -> Converter:
    """Return a converter of true to `on` and of false to `off`."""

    def convert(old: OldKey) -> Any:
        if read_flag(old):
            return on
        return off

    return convert


def set_key(dotted: str, convert: Converter = keep_value, skip: tuple[Any, ...] = AUTO) -> Rule:
    """Return a rule that sets a value of the new config.

    Args:
        dotted: `section.key` of the new config.
        convert: Returns the new value for the old key.
        skip: Values of the old key for which nothing is set.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value not in skip:
            sheet.put(dotted, convert(old), old)

    return rule


def apply_if_on(rule: Rule) -> Rule:
    """Return a rule that applies another rule if the value of the old key is true."""

    def apply(sheet: Sheet, old: OldKey) -> None:
        if read_flag(old):
            rule(sheet, old)

    return apply


def set_if_on(dotted: str, value: Any) -> Rule:
    """Return a rule that sets `section.key` to `value` if the value of the old key is true."""
    return apply_if_on(set_key(dotted, lambda _: value))


def do_nothing(sheet: Sheet, old: OldKey) -> None:
    """Accept a key that needs no translation and no note."""


def postpone(name: str | None = None) -> Rule:
    """Return a rule that puts the old key into `sheet.waiting`, since its meaning depends on others.

    When all keys have been read, a function of the tool takes the waiting keys and sets what they
    mean together. The rule raises ConfigError if another key waits under the same name with a
    different value.

    Args:
        name: The name to wait under; None for the old key's own name.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value in AUTO:
            return
        key = name or old.key
        other = sheet.waiting.get(key)
        if other is None:
            sheet.waiting[key] = old
        elif other.place != old.place and False in (other.value, old.value):
            # Two switches of one thing, of which at least one is off: the other one counts.
            if not other.value:
                sheet.waiting[key] = old
        elif str(other.value).lower() != str(old.value).lower():
            raise contradiction(old, other)
        else:
            sheet.waiting[key] = old

    return rule


def drop(why: str, *silent: Any) -> Rule:
    """Return a rule that leaves out a key that a run here does not need, and adds a note.

    Args:
        why: The reason, for the note.
        silent: Values of the key that get no note.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value not in silent:
            sheet.note(old, why)

    return rule


def reject(*neutral: Any, why: str, fix: str) -> Rule:
    """Return a rule that refuses a key whose effect Drumline lacks, unless its value is harmless.

    Args:
        neutral: Values that are harmless, besides those that turn the effect off.
        why: The reason, for the error.
        fix: What to write instead, for the error.
    """
    # `in` compares by ==, so False also stands for 0 and 0.0.
    off_values = (*AUTO, False, "", *neutral)
    off_words = ("no", "none", "false")

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value not in off_values and str(old.value).lower() not in off_words:
            sheet.report_unsupported(old, why, fix)

    return rule


def apply_rules(
    table: Mapping[str, Rule], sheet: Sheet, old_keys: list[OldKey], what: str, prefix: str = ""
) -> None:
    """Apply to each old key its rule in a table.

    On a lenient sheet unknown keys and unsupported values become notes.

    Args:
        table: Key → rule.
        sheet: The sheet that the rules write on.
        old_keys: The keys of the old file.
        what: What the keys are of, for errors: `a DeepSpeed config`.
        prefix: What the old keys may begin with, in addition to their name in the table.

    Raises ConfigError for a key that the table lacks, and suggests the nearest one.
    """
    for old in old_keys:
        key = old.key.removeprefix(prefix)
        rule = table.get(key)
        if rule is None:
            _report_unknown(sheet, old, what, _suggestion(key, table, prefix))
            continue
        try:
            rule(sheet, replace(old, key=key))
        except Unsupported as error:
            if not sheet.lenient:
                raise
            sheet.note(old, f"left out: {error.what} — {error.fix}")


def _suggestion(key: str, table: Mapping[str, Rule], prefix: str) -> str:
    """Return "did you mean …?" with the table's nearest key, or an empty text."""
    guess = nearest(key, list(table))
    if not guess:
        return ""
    return f"did you mean {prefix + guess!r}?"


def _report_unknown(sheet: Sheet, old: OldKey, what: str, suggestion: str) -> None:
    """Add a note about a key that no table has, if the sheet is lenient; else raise ConfigError."""
    if sheet.lenient:
        note = f"unknown key of {what}"
        if suggestion:
            note += f": {suggestion}"
        sheet.note(old, note)
        return
    fix = suggestion or "remove it, or write it as a key of Drumline: `drumline schema` has them"
    raise translation_error(old, f"unknown key {old.key!r} of {what}", fix)

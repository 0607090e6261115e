"""The rules for keys of other tools: each writes on the sheet what a key means for our config."""

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

Rule = Callable[[Sheet, OldKey], None]
Converter = Callable[[OldKey], Any]


def read_flag(old: OldKey) -> bool:
    """Return a value that is true or false, also written as text.

    accelerate's own files have 'no' and "true". Raises ConfigError for any other value.
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
    """Return a number, also written as text. Raises ConfigError for any other value.

    PyYAML reads 1e-5 as text, so old files may have put it in quotes.
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
    """Return a whole number, also written as text. Raises ConfigError for any other value."""
    value = finite_number(old.value)
    if value is None or not value.is_integer():
        raise translation_error(
            old,
            f"{format_value(old.value)} given, a whole number is wanted",
            "write a number such as 2",
        )
    return int(value)


def read_names(old: OldKey) -> list[str]:
    """Return a list of names, also written as one text with commas."""
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
    """Return a converter of one word, in upper or lower case, to its value in `table`.

    `why_not` has words that other tools accept, each with the fix. The converter raises Unsupported
    for them, and for words that are in neither.
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


def unchanged(old: OldKey) -> Any:
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


def set_key(dotted: str, convert: Converter = unchanged, skip: tuple[Any, ...] = AUTO) -> Rule:
    """Return a rule that sets `section.key` of the new config; values in `skip` set nothing."""

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value not in skip:
            sheet.put(dotted, convert(old), old)

    return rule


def apply_if_on(rule: Rule) -> Rule:
    """Return a rule that applies another one if the old key is true."""

    def apply(sheet: Sheet, old: OldKey) -> None:
        if read_flag(old):
            rule(sheet, old)

    return apply


def set_if_on(dotted: str, value: Any) -> Rule:
    """Return a rule that sets `section.key` of the new config to `value` if the old key is true."""
    return apply_if_on(set_key(dotted, lambda _: value))


def do_nothing(sheet: Sheet, old: OldKey) -> None:
    """Accept a key that needs no translation and no note."""


def postpone(name: str | None = None) -> Rule:
    """Return a rule that lets the value wait on the sheet until a group combines it with others.

    It waits under `name`, or under the old key's own name. The rule raises ConfigError if another
    key waits under that name with a different value.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value in AUTO:
            return
        key = name or old.key
        other = sheet.waiting.get(key)
        if other is None:
            sheet.waiting[key] = old
        elif other.place != old.place and False in (other.value, old.value):
            # Two switches of one thing: the one that is on counts.
            if other.value is False:
                sheet.waiting[key] = old
        elif str(other.value).lower() != str(old.value).lower():
            raise contradiction(old, other)
        else:
            sheet.waiting[key] = old

    return rule


def drop(why: str, *silent: Any) -> Rule:
    """Return a rule for a key without a meaning here, which the run does not miss.

    It adds a note with the reason, except for values in `silent`.
    """

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value not in silent:
            sheet.note(old, why)

    return rule


def reject(*neutral: Any, why: str, fix: str) -> Rule:
    """Return a rule for a key whose effect Drumline lacks.

    It reports an error, unless the value turns the effect off or is in `neutral`.
    """
    off_values = (*AUTO, False, "", *neutral)
    off_words = ("no", "none", "false")

    def rule(sheet: Sheet, old: OldKey) -> None:
        if old.value not in off_values and str(old.value).lower() not in off_words:
            sheet.report_unsupported(old, why, fix)

    return rule


def apply_rules(
    table: Mapping[str, Rule], sheet: Sheet, olds: list[OldKey], what: str, prefix: str = ""
) -> None:
    """Apply the table's rule to each old key, with or without `prefix`.

    Raises ConfigError for a key that the table lacks, and suggests the nearest one; `what` names
    the file in the message. On a lenient sheet unknown keys and unsupported values become notes.
    """
    for old in olds:
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
    """Report a key that no table has: a note on a lenient sheet, else ConfigError."""
    if sheet.lenient:
        note = f"unknown key of {what}"
        if suggestion:
            note += f": {suggestion}"
        sheet.note(old, note)
        return
    fix = suggestion or "remove it, or write it as a key of Drumline: `drumline schema` has them"
    raise translation_error(old, f"unknown key {old.key!r} of {what}", fix)

"""The rules of tables of old keys: a table has one for each key. A rule writes on the sheet what the key means for the new config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drumline.compat.sheet import AUTO, Lacking, Old, Sheet, contradiction, refuse, shown
from drumline.core.registry import nearest

Rule = Callable[[Sheet, Old], None]
Convert = Callable[[Old], Any]
Defaults = dict[str, tuple[Any, str]]  # dotted key → value, and the name in the old file


def flag(old: Old) -> bool:
    """true or false, also as text: accelerate's own files have 'no' and "true"."""
    word = str(old.value).lower()
    if word in ("true", "yes", "1", "on"):
        return True
    if word in ("false", "no", "0", "off", "none", ""):
        return False
    raise refuse(old, f"{shown(old.value)} given, true or false is wanted", "write true or false")


def number(old: Old, whole: bool = False) -> float:
    """A number, also as text: PyYAML reads 1e-5 as text, so old files may have put it in quotes."""
    try:
        found = float(old.value)
        if (
            isinstance(old.value, bool)
            or not math.isfinite(found)
            or (whole and not found.is_integer())
        ):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted, example = ("a whole number", "2") if whole else ("a number", "1.0e-5")
        raise refuse(
            old,
            f"{shown(old.value)} given, {wanted} is wanted",
            f"write a number such as {example}",
        ) from None
    return found


def whole(old: Old) -> int:
    """A whole number, also as text."""
    return int(number(old, whole=True))


def name_list(old: Old) -> list[str]:
    """A list of names, also as one text with commas."""
    parts = (
        old.value.split(",")
        if isinstance(old.value, str)
        else old.value
        if isinstance(old.value, list)
        else [old.value]
    )
    return [str(part).strip() for part in parts if str(part).strip()]


def one_of(table: Mapping[str, Any], why_not: Mapping[str, str] | None = None) -> Convert:
    """One word of a table, in any case; `why_not`: words that other tools know, with the reason and the fix."""

    def convert(old: Old) -> Any:
        word = "no" if old.value is False or old.value is None else str(old.value).lower()
        if word in table:
            return table[word]
        if why_not and word in why_not:
            raise Lacking(
                f"{shown(old.value)} cannot be translated", where=old.where, fix=why_not[word]
            )
        guess = nearest(word, list(table))
        there = f"there are {', '.join(table)}"
        raise Lacking(
            f"no {shown(old.value)} here",
            where=old.where,
            fix=f"did you mean {guess!r}? {there}" if guess else there,
        )

    return convert


def to(dotted: str, convert: Convert = lambda old: old.value, skip: tuple[Any, ...] = AUTO) -> Rule:
    """The value goes to a key of the new config; values in `skip` set nothing."""
    return lambda sheet, old: None if old.value in skip else sheet.put(dotted, convert(old), old)


def if_on(rule: Rule) -> Rule:
    """The rule applies where the old key is true."""
    return lambda sheet, old: rule(sheet, old) if flag(old) else None


def switch(dotted: str, value: Any) -> Rule:
    """A key of the new config gets this value where the old one is true."""
    return if_on(to(dotted, lambda _: value))


def nothing(sheet: Sheet, old: Old) -> None:
    """The key needs no translation and no note."""


def later(name: str | None = None) -> Rule:
    """The value waits on the sheet, under the old key's name or `name`, until a group combines it with other keys."""

    def rule(sheet: Sheet, old: Old) -> None:
        if old.value in AUTO:
            return
        other = sheet.waiting.setdefault(key := name or old.key, old)
        if other.place != old.place and False in (other.value, old.value):
            # Two switches of one thing: the one that is on counts.
            sheet.waiting[key] = old if other.value is False else other
        elif str(other.value).lower() != str(old.value).lower():
            raise contradiction(old, other)
        else:
            sheet.waiting[key] = old

    return rule


def gone(why: str, *silent: Any) -> Rule:
    """The key has no meaning any more, and the run loses nothing: a note gives the reason, except for values in `silent`."""
    return lambda sheet, old: None if old.value in silent else sheet.note(old, why)


def only(*neutral: Any, why: str, fix: str) -> Rule:
    """A key whose effect Drumline does not have: an error, unless its value turns the effect off."""

    def rule(sheet: Sheet, old: Old) -> None:
        if old.value in (*AUTO, False, "", *neutral) or str(old.value).lower() in (
            "no",
            "none",
            "false",
        ):
            return
        sheet.lacks(old, why, fix)

    return rule


def read(
    table: Mapping[str, Rule], sheet: Sheet, olds: list[Old], what: str, prefix: str = ""
) -> None:
    """Apply the table's rule to each old key, with or without `prefix`. Raises ConfigError for one that it lacks, with the nearest; on a
    lenient sheet such keys, and values without a counterpart, are notes."""
    for old in olds:
        key = old.key.removeprefix(prefix)
        rule = table.get(key)
        if rule is None:
            guess = nearest(key, list(table))
            if sheet.lenient:
                sheet.note(
                    old,
                    f"unknown key of {what}"
                    + (f": did you mean {prefix + guess!r}?" if guess else ""),
                )
                continue
            own = "remove it, or write it as a key of Drumline: `drumline schema` has them"
            raise refuse(
                old,
                f"unknown key {old.key!r} of {what}",
                f"did you mean {prefix + guess!r}?" if guess else own,
            )
        try:
            rule(sheet, replace(old, key=key))
        except Lacking as error:
            if not sheet.lenient:
                raise
            sheet.note(old, f"left out: {error.what} — {error.fix}")


def fill(sheet: Sheet, old: Old, defaults: Defaults, whose: str) -> None:
    """Set a tool's own defaults, with one note. `old`: any key of the file."""
    filled = []
    for dotted, (value, name) in defaults.items():
        section = dotted.partition(".")[0]
        if sheet.get(dotted) is not None or (dotted == "run.epochs" and sheet.get("run.steps")):
            continue
        if (section == "batch" and sheet.get("batch.global_samples")) or (
            section == "adapter" and section not in sheet.values
        ):
            continue
        sheet.put(dotted, value, replace(old, key=name, value=value, place=(name,)))
        filled.append(f"{dotted} {value if isinstance(value, list) else shown(value)}")
    if filled:
        sheet.notes.append(
            f"{old.source.name}: not set there, so {whose} own defaults: {', '.join(filled)}"
        )

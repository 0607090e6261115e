"""Reading lines of events.jsonl that anybody may have written.

A line may be torn, of another version, or made to do harm: nested a million times, or with a number
of a million digits. Readers get values of the types that an event declares, or none.
"""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from drumline.foreign import MOST_DEPTH, MOST_WHOLE

# Digits of a number that is kept as text.
MOST_DIGITS = 40
# A larger number is none: sums and products of two numbers stay finite.
MOST = 1e100
# A whole number of fewer characters is below MOST_WHOLE.
SHORT_WHOLE = 19


def _parse_float(text: str) -> float | str:
    """Return a number, or the start of its text if it is too large for any use."""
    value = float(text)
    if abs(value) < MOST:
        return value
    return text[:MOST_DIGITS]


def _parse_int(text: str) -> int | str:
    """Return a whole number, or the start of its text if it is too large."""
    if len(text) < SHORT_WHOLE:
        return int(text)
    # By its length first: `int` of a very long text takes long, or raises.
    if len(text) < MOST_DIGITS and abs(int(text)) < MOST_WHOLE:
        return int(text)
    return text[:MOST_DIGITS]


# What JSON has no word for, but Python's encoder writes nevertheless.
_CONSTANTS = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}
_JSON = json.JSONDecoder(
    parse_float=_parse_float,
    parse_int=_parse_int,
    parse_constant=_CONSTANTS.__getitem__,
)


def parse(line: str) -> dict[str, Any] | None:
    """Return the object of a line; None for what is no object, or nested too deep.

    NaN becomes null. Infinity and numbers beyond all use become texts.
    """
    # Some editors put a byte order mark at the start of a file.
    text = line.removeprefix("\ufeff")
    try:
        values = _JSON.decode(text)
        # Only such a line can have a lone surrogate, or be nested too deep. Most lines are neither,
        # and are not walked through.
        has_surrogates = "\\ud" in line or "\\uD" in line
        brackets = line.count("[") + line.count("{")
        if has_surrogates or brackets > MOST_DEPTH:
            values = _without_surrogates(values, MOST_DEPTH)
    except (ValueError, RecursionError):
        return None
    if isinstance(values, dict):
        return values
    return None


def _without_surrogates(value: Any, depth: int) -> Any:
    """Return a value without lone surrogates, which no file can be written with.

    Raises ValueError if it is nested deeper than `depth`.
    """
    if depth == 0:
        raise ValueError
    if isinstance(value, dict):
        clean = {}
        for key, inner in value.items():
            clean[_without_surrogates(key, depth)] = _without_surrogates(inner, depth - 1)
        return clean
    if isinstance(value, list):
        return [_without_surrogates(inner, depth - 1) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return value


def types_of(cls: type, names: list[str]) -> dict[str, tuple[str, frozenset[type], Any]]:
    """Return what a reader needs of each field of an event.

    Returns:
        The field's name → its key on disk, the types of plain values that fit it, and its declared
        type. The key of `from_` is `from`, which is a word of Python's.
    """
    declared_types = get_type_hints(cls)
    types = {}
    for name in names:
        key = name.removesuffix("_")
        declared = declared_types[name]
        types[name] = (key, _plain_types(declared), declared)
    return types


def _plain_types(kind: Any) -> frozenset[type]:
    """Return the types of plain values (numbers, text, null) that fit a declared type."""
    if get_origin(kind) in (Union, UnionType):
        types: set[type] = set()
        for member in get_args(kind):
            types |= _plain_types(member)
        return frozenset(types)
    if kind is float:
        # JSON may write 1.0 as 1.
        return frozenset([int, float])
    if kind in (int, str, bool, NoneType):
        return frozenset([kind])
    return frozenset()


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a declared type, at any depth."""
    if kind is Any or type(value) in _plain_types(kind):
        return True
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, member) for member in arguments)
    if isinstance(value, list):
        if origin is not list:
            return False
        element = arguments[0]
        return all(fits(each, element) for each in value)
    if isinstance(value, dict):
        # `dict` or `Mapping`. A bare type has no origin.
        is_mapping = origin not in (None, list)
        if not is_mapping:
            return False
        # Keys of JSON are always texts.
        element = arguments[1]
        return all(fits(each, element) for each in value.values())
    return False

"""What may stand in a line of events.jsonl, whoever wrote it: all readers get values of the types that an event declares, or none."""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from drumline.foreign import MOST_DEPTH, MOST_WHOLE

MOST_DIGITS = 40
MOST = 1e100  # a number above is none: sums and products of two stay finite


def _float(text: str) -> float | str:
    return value if abs(value := float(text)) < MOST else text[:MOST_DIGITS]


def _whole(text: str) -> int | str:
    return (
        int(text)
        if len(text) < 19 or (len(text) < MOST_DIGITS and abs(int(text)) < MOST_WHOLE)
        else text[:MOST_DIGITS]
    )


_JSON = json.JSONDecoder(
    parse_float=_float,
    parse_int=_whole,
    parse_constant={"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}.__getitem__,
)


def parse(line: str) -> dict[str, Any] | None:
    """The object of a line: NaN is null, infinity and numbers beyond all use are texts; None for what is no object, or nested too deep."""
    try:
        values = _JSON.decode(line.removeprefix("\ufeff"))
        if "\\ud" in line or "\\uD" in line or line.count("[") + line.count("{") > MOST_DEPTH:
            values = _sound(values, MOST_DEPTH)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _sound(value: Any, depth: int) -> Any:
    """Without lone surrogates, which are no text. Raises ValueError where it is nested too deep."""
    if not depth:
        raise ValueError
    if isinstance(value, dict):
        return {_sound(key, depth): _sound(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_sound(inner, depth - 1) for inner in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def types_of(cls: type, names: list[str]) -> dict[str, tuple[str, frozenset[type], Any]]:
    """Field of an event → what it is called on disk, the types of plain values that are right for it, and what it declares."""
    kinds = get_type_hints(cls)
    return {
        name: (name.removesuffix("_"), _plain_types(kinds[name]), kinds[name]) for name in names
    }


def _plain_types(kind: Any) -> frozenset[type]:
    if get_origin(kind) in (Union, UnionType):
        return frozenset[type]().union(*map(_plain_types, get_args(kind)))
    return frozenset(
        [int, float] if kind is float else [kind] if kind in (int, str, bool, NoneType) else []
    )


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a declared type, at any depth."""
    if kind is Any or type(value) in _plain_types(kind):
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if isinstance(value, list):
        return origin is list and all(fits(each, inner[0]) for each in value)
    return (
        isinstance(value, dict)
        and origin not in (None, list)
        and all(fits(each, inner[1]) for each in value.values())
    )

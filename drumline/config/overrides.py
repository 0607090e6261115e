"""Dotted overrides, `optimizer.lr=1e-4`, laid over the values of a YAML."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from drumline.config.suggest import kinds_at
from drumline.config.yaml_lines import Place, read_yaml
from drumline.errors import ConfigError


def lay_over(values: dict[str, Any], override: str) -> Place:
    """Set `a.b.0.c=value` in nested values, making sections on the way. Returns its place; raises ConfigError naming the override."""
    dotted, equals, text = override.partition("=")
    place = tuple(dotted.split("."))
    if not equals or "" in place:
        raise ConfigError(f"{override!r} is no override", where="command line", fix="write key=value, such as optimizer.lr=1e-4")
    try:
        value = read_yaml(text, "value")[0]
    except ConfigError as error:
        raise _wrong(override, error.what, "put the value in quotes, once for the shell and once for YAML: key='\"…\"'") from None
    inside: Any = values
    for depth, (key, following) in enumerate(pairwise(place), start=1):
        if isinstance(inside, list):
            inside = inside[_index(inside, key, override)]
            continue
        inside[key] = inside = _section(inside.get(key), place[:depth], following, override)
    if isinstance(inside, list):
        inside[_index(inside, place[-1], override)] = value
    elif isinstance(inside, dict):
        inside[place[-1]] = value
    else:
        raise _wrong(override, f"{'.'.join(place[:-1])} has no keys: it is {inside!r}", "give the whole of it")
    return place


def _section(current: Any, place: Place, following: str, override: str) -> Any:
    """What an override goes into: the section that is there, a new one, or one made of its short form (`strategy: ddp`)."""
    if isinstance(current, dict | list):
        return current
    if current is None:
        if following.isdecimal():
            dotted = ".".join(place)
            raise _wrong(override, f"{dotted} is no list yet", f"give the whole of it: {dotted}=[…]")
        return {}
    if isinstance(current, str) and kinds_at(place):
        return {"kind": current}
    raise _wrong(override, f"{'.'.join(place)} has no keys: it is {current!r}", "give the whole of it")


def _index(inside: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(inside):
        count = f"{len(inside)} item" + "s" * (len(inside) != 1)
        fix = f"count from 0 to {len(inside) - 1}" if inside else "give the whole list"
        raise _wrong(override, f"the list has {count}, no {key!r}", fix)
    return int(key)


def _wrong(override: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=f"override {override}", fix=fix)

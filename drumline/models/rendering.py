"""Limits of time and memory for chat templates, which are programs of strangers. Jinja's sandbox prevents other harm.

A rendering may take `MOST_STEPS` steps (blocks, calls, filters) and `MOST_SECONDS` of its thread's time; its output and every value may
have `MOST_SIZE`. Steps are counted, since no alarm reaches a thread. Single operations that counting cannot stop (9**9**9,
`center(10**9)`) are refused before they run. Only public parts of Jinja are used: its sandbox class is changed, for every sandbox.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

MOST_STEPS = 5_000_000
MOST_SECONDS = 5.0  # of the thread that renders
MOST_SIZE = 2**26  # characters or entries; a conversation of a million tokens has some 2**22
MOST_MADE = 2**30  # of all larger values together
MOST_SOURCE = 2**20  # characters of a template; the longest have 20,000
MOST_WIDTH = 10**5  # of padding, indents, repetitions and digits
# Filters and methods of texts whose result may be much larger: by a number, a format, or by joining.
_GROWING = {
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "indent",
    "truncate",
    "tojson",
    "round",
    "batch",
    "slice",
}
_GROWING |= {"sum", "format", "format_map", "replace", "join", "strftime_now"}
# Their time is quadratic in the text; no conversation needs them.
_SLOW = (
    "wordwrap",
    "urlize",
    "striptags",
)
_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")


class TooMuch(jinja2.TemplateError):
    """A template that takes too long, or makes too large values."""


class _Spent(threading.local):
    steps = size = made = 0
    until = float("inf")


_spent = _Spent()


def step(characters: int = 0) -> None:
    """Count a step, and the characters that it writes. Raises TooMuch."""
    _spent.steps += 1
    _spent.size += characters
    if _spent.steps > MOST_STEPS or (_spent.steps % 64 == 0 and time.thread_time() > _spent.until):
        raise TooMuch(f"it takes more than {MOST_STEPS} steps or {MOST_SECONDS:g} seconds")
    if _spent.size > MOST_SIZE:
        raise TooMuch(f"it writes more than {MOST_SIZE} characters")


def counted_text(text: str) -> str:
    """`text`, after counting its characters. Raises TooMuch."""
    step(len(text))
    return text


def sized(value: Any) -> Any:
    """`value`, after counting its size. Raises TooMuch."""
    step()
    size = len(value) if isinstance(value, str) else _size(value, {})
    _spent.made += size if size > MOST_WIDTH else 0
    if size > MOST_SIZE or _spent.made > MOST_MADE:
        raise TooMuch(f"it makes a value of more than {MOST_SIZE} characters")
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Characters, bits and entries of a value; a repeated part counts each time."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length()
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        known[id(value)] = 0  # for a value that contains itself
        parts: Iterable[Any] = (
            (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
        )
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(value)]


def _watched(items: Any) -> Iterator[Any]:
    """The items of an iterable. Raises TooMuch once they are too large together."""
    size = 0
    for item in items:
        size += _size(item, {})
        step()
        if size > MOST_SIZE:
            raise TooMuch(f"it makes a list of more than {MOST_SIZE} characters")
        yield item


def _affordable(name: str, given: Any, arguments: Iterable[Any]) -> None:
    """Raises TooMuch for a call whose result would be too large. `given`: its text or list."""
    arguments = list(arguments)
    wide = any(isinstance(a, int) and abs(a) > MOST_WIDTH for a in arguments)
    if name in ("format", "format_map", "strftime_now"):
        wide = wide or any(
            isinstance(text, str) and _WIDE.search(text) for text in (given, *arguments)
        )
    size = _size(given, {})
    if name in ("replace", "join", "indent"):
        size *= max((_size(a, {}) for a in arguments), default=1) or 1
    if name == "sum":
        size = len(given) * size if any(isinstance(a, str | list | tuple) for a in arguments) else 0
    if name == "join" and arguments and not isinstance(given, str):
        size = _size(given, {}) + len(given) * _size(arguments[0], {})
    if wide or (
        size > MOST_SIZE and (name != "replace" or _replaced(given, arguments) > MOST_SIZE)
    ):
        raise TooMuch(f"{name} would make a value that is too large")


def _replaced(text: Any, arguments: list[Any]) -> int:
    """The number of characters of a text after `replace`."""
    text, old, new = str(text), *map(str, (*arguments, "", "")[:2])
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


class _Counting(CodeGenerator):
    """Compiles a template with calls that count."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Any) -> None:
        body = list(nodes_)
        fixed = sum(
            len(c.data)
            for n in body
            if isinstance(n, nodes.Output)
            for c in n.nodes
            if isinstance(c, nodes.TemplateData)
        )
        self.writeline(f"environment.step({fixed})")
        super().blockvisit(body, frame)

    def _output_child_pre(self, *given: Any) -> None:
        self.write("environment.counted_text(")
        super()._output_child_pre(*given)

    def _output_child_post(self, *given: Any) -> None:
        super()._output_child_post(*given)
        self.write(")")


def _measured(name: str) -> Callable[[Any, Any, Any], None]:
    def visit(self: Any, node: Any, frame: Any) -> None:
        self.write("environment.sized(")
        getattr(CodeGenerator, name)(self, node, frame)
        self.write(")")

    return visit


for _name in ("visit_Concat", "visit_Filter", "visit_List", "visit_Tuple", "visit_Dict"):
    setattr(_Counting, _name, _measured(_name))


class _Limited(jinja2.Template):
    def new_context(self, *given: Any, **more: Any) -> Any:
        _spent.steps = _spent.size = _spent.made = 0
        _spent.until = time.thread_time() + MOST_SECONDS
        return super().new_context(*given, **more)


def _filter(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(make, "jinja_pass_arg") else 0

    @wraps(make)
    def bounded(*given: Any, **more: Any) -> Any:
        value = given[first]
        if hasattr(value, "__next__") or (name in ("join", "sum") and not isinstance(value, str)):
            value = list(_watched(value)) if name in ("join", "sum") else _watched(value)
            given = (*given[:first], value, *given[first + 1 :])
        if name in _GROWING:
            _affordable(name, value, (*given[first + 1 :], *more.values()))
        return make(*given, **more)

    return bounded


_from_string, _call, _binop = Sandbox.from_string, Sandbox.call, Sandbox.call_binop


def _compile(self: Sandbox, source: Any, *given: Any, **more: Any) -> jinja2.Template:
    if len(source) > MOST_SOURCE:
        raise TooMuch(f"a template of {len(source)} characters is none")
    self.globals.pop("lipsum", None)
    self.filters = {
        name: _filter(name, make) for name, make in self.filters.items() if name not in _SLOW
    }
    return _from_string(self, source, *given, **more)


def _called(self: Sandbox, context: Any, called: Any, *given: Any, **more: Any) -> Any:
    step()
    name = getattr(called, "__name__", "")
    if name in _GROWING:
        # The sandbox wraps `format`.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        separated = name == "join" and given
        if separated:
            given = (list(_watched(given[0])), *given[1:])
        _affordable(
            name,
            given[0] if separated else owner,
            (owner,) if separated else (*given, *more.values()),
        )
    return _call(self, context, called, *given, **more)


def _operated(self: Sandbox, context: Any, operator: str, left: Any, right: Any) -> Any:
    if operator == "%" and isinstance(left, str):
        _affordable("format", left, right if isinstance(right, tuple) else (right,))
    elif operator in ("*", "**"):
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "*" and isinstance(right, str | list | tuple):
            left, right = right, left
        times = abs(right) if isinstance(right, int) else 1
        size = (
            _size(left, {}) + _size(right, {})
            if whole and operator == "*"
            else _size(left, {}) * times
        )
        if size > (MOST_WIDTH if whole else MOST_SIZE):
            raise TooMuch(f"{operator} would make a value that is too large")
    return sized(_binop(self, context, operator, left, right))


def limit() -> None:
    """Make every sandbox of this process count. May be called again."""
    parts: dict[str, Any] = {"code_generator_class": _Counting, "template_class": _Limited}
    parts |= {
        "from_string": _compile,
        "call": _called,
        "call_binop": _operated,
        "intercepted_binops": frozenset(["*", "**", "+", "%"]),
    }
    parts |= {function.__name__: staticmethod(function) for function in (step, counted_text, sized)}
    for name, part in parts.items():
        setattr(Sandbox, name, part)

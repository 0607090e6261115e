"""Limits of time and memory for chat templates, which are programs of strangers.

Jinja's sandbox prevents other harm. A rendering may take `MOST_STEPS` steps (blocks, calls,
filters) and `MOST_SECONDS` of its thread's time. Its output and each value may have the size
`MOST_SIZE`. Steps are counted, since a thread cannot be stopped by an alarm. Single operations that
take too long by themselves (9**9**9, `center(10**9)`) are refused before they run.
`limit_templates` changes Jinja's sandbox class, and so every sandbox of the process. It uses only
public parts of Jinja.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

MOST_STEPS = 5_000_000
# Seconds of the thread that renders.
MOST_SECONDS = 5.0
# Characters or entries of a value; a conversation of a million tokens has about 2**22.
MOST_SIZE = 2**26
# Characters or entries of all large values (those above MOST_WIDTH) together.
MOST_MADE = 2**30
# Characters of a template; the longest known have 20,000.
MOST_SOURCE = 2**20
# Characters of padding and indents; repetitions; bits of whole numbers.
MOST_WIDTH = 10**5
# Filters and methods of texts whose result may be much larger than the text: by a number, a format,
# or by joining.
_GROWING = {
    "batch",
    "center",
    "expandtabs",
    "format",
    "format_map",
    "indent",
    "join",
    "ljust",
    "replace",
    "rjust",
    "round",
    "slice",
    "strftime_now",
    "sum",
    "tojson",
    "truncate",
    "zfill",
}
_FORMATTING = ("format", "format_map", "strftime_now")
# Filters whose time is quadratic in the text. No conversation needs them.
_SLOW = (
    "wordwrap",
    "urlize",
    "striptags",
)
# In a format: a width of five digits or more, or a width that an argument sets.
_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")


class TooMuch(jinja2.TemplateError):
    """A template that takes too long, or makes too large values."""


class _Spent(threading.local):
    """What this thread's rendering has used.

    `steps`: counted so far. `size`: characters written. `made`: sizes of larger values together.
    `until`: the thread's time at which it must end, in seconds.
    """

    steps = 0
    size = 0
    made = 0
    until = float("inf")


_spent = _Spent()


def step(characters: int = 0) -> None:
    """Count a step, and the characters that it writes. Raises TooMuch."""
    _spent.steps += 1
    _spent.size += characters
    # The clock is read only every 64 steps, since reading it costs more than a step.
    is_late = _spent.steps % 64 == 0 and time.thread_time() > _spent.until
    if _spent.steps > MOST_STEPS or is_late:
        raise TooMuch(f"it takes more than {MOST_STEPS} steps or {MOST_SECONDS:g} seconds")
    if _spent.size > MOST_SIZE:
        raise TooMuch(f"it writes more than {MOST_SIZE} characters")


def counted_text(text: str) -> str:
    """Return `text`, after counting its characters. Raises TooMuch."""
    step(len(text))
    return text


def count_size(value: Any) -> Any:
    """Return `value`, after counting its size. Raises TooMuch."""
    step()
    size = _size(value)
    if size > MOST_WIDTH:
        _spent.made += size
    if size > MOST_SIZE or _spent.made > MOST_MADE:
        raise TooMuch(f"it makes a value of more than {MOST_SIZE} characters")
    return value


def _size(value: Any) -> int:
    """Return the characters, bits and entries of a value; a repeated part counts each time."""
    return _size_with(value, {})


def _size_with(value: Any, known: dict[int, int]) -> int:
    """Return `_size` of a value.

    `known`: the sizes of containers that were measured already, by their ids.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length()
    if not isinstance(value, list | tuple | dict):
        return 1
    # A template may put one list into another many times: each is measured once.
    if id(value) not in known:
        # Ends the recursion of a value that contains itself.
        known[id(value)] = 0
        size = 1 + sum(_size_with(part, known) for part in value)
        if isinstance(value, dict):
            size += sum(_size_with(part, known) for part in value.values())
        known[id(value)] = size
    return known[id(value)]


def _limit_items(items: Any) -> Iterator[Any]:
    """Yield the items of an iterable. Raises TooMuch once they are too large together."""
    size = 0
    for item in items:
        size += _size(item)
        step()
        if size > MOST_SIZE:
            raise TooMuch(f"it makes a list of more than {MOST_SIZE} characters")
        yield item


def _require_affordable(name: str, value: Any, arguments: Iterable[Any]) -> None:
    """Raise TooMuch for a call of a growing filter or method whose result would be too large.

    `name`: the filter's or method's. `value`: its text or list.
    """
    arguments = list(arguments)
    is_too_large = _has_wide_argument(name, value, arguments)
    if not is_too_large:
        is_too_large = _result_size(name, value, arguments) > MOST_SIZE
    if is_too_large:
        raise TooMuch(f"{name} would make a value that is too large")


def _has_wide_argument(name: str, value: Any, arguments: list[Any]) -> bool:
    """Return whether an argument is a large number, or a format has a large width."""
    if any(isinstance(argument, int) and abs(argument) > MOST_WIDTH for argument in arguments):
        return True
    if name not in _FORMATTING:
        return False
    texts = [text for text in (value, *arguments) if isinstance(text, str)]
    return any(_WIDE.search(text) for text in texts)


def _result_size(name: str, value: Any, arguments: list[Any]) -> int:
    """Return an upper bound of the size of a call's result, ignoring arguments that are numbers."""
    size = _size(value)
    if name == "join" and arguments and not isinstance(value, str):
        separator = arguments[0]
        return size + len(value) * _size(separator)
    if name in ("replace", "join", "indent"):
        largest = max((_size(argument) for argument in arguments), default=1)
        bound = size * max(1, largest)
        if name == "replace" and bound > MOST_SIZE:
            return _size_after_replace(value, arguments)
        return bound
    if name == "sum":
        # Lists are added to a list that grows with each of them.
        adds_lists = any(isinstance(argument, str | list | tuple) for argument in arguments)
        if not adds_lists:
            return 0
        return len(value) * size
    return size


def _size_after_replace(text: Any, arguments: Sequence[Any]) -> int:
    """Return the number of characters of a text after `replace`."""
    text = str(text)
    # A template may leave arguments out, which Jinja then refuses.
    old, new, *_ = (*arguments, "", "")
    old = str(old)
    new = str(new)
    if old:
        replacements = text.count(old)
    else:
        # An empty text stands before each character, and at the end.
        replacements = len(text) + 1
    return len(text) + replacements * len(new)


class _Counting(CodeGenerator):
    """Compiles a template with calls that count.

    The methods are Jinja's, which calls them as it visits the parts of a template.
    """

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Any) -> None:
        """Write a step that counts the characters which a block always writes, then the block."""
        body = list(nodes_)
        fixed_characters = sum(_fixed_characters(node) for node in body)
        self.writeline(f"environment.step({fixed_characters})")
        super().blockvisit(body, frame)

    def _output_child_pre(self, *arguments: Any) -> None:
        self.write("environment.counted_text(")
        super()._output_child_pre(*arguments)

    def _output_child_post(self, *arguments: Any) -> None:
        super()._output_child_post(*arguments)
        self.write(")")


def _fixed_characters(node: nodes.Node) -> int:
    """Return the number of characters that an output writes whatever its values are."""
    if not isinstance(node, nodes.Output):
        return 0
    texts = [child.data for child in node.nodes if isinstance(child, nodes.TemplateData)]
    return sum(len(text) for text in texts)


def _sized_visit(name: str) -> Callable[[Any, Any, Any], None]:
    """Return the visit of a node that writes a call of `count_size` around its value.

    `name`: of Jinja's visit.
    """

    def visit(self: Any, node: Any, frame: Any) -> None:
        self.write("environment.count_size(")
        getattr(CodeGenerator, name)(self, node, frame)
        self.write(")")

    return visit


# Expressions that make a value from others; calls and operators have hooks of their own below.
for _name in ("visit_Concat", "visit_Filter", "visit_List", "visit_Tuple", "visit_Dict"):
    setattr(_Counting, _name, _sized_visit(_name))


class _Limited(jinja2.Template):
    """A template that sets the counts to 0 at the beginning of each rendering."""

    def new_context(self, *arguments: Any, **named: Any) -> Any:
        _spent.steps = 0
        _spent.size = 0
        _spent.made = 0
        _spent.until = time.thread_time() + MOST_SECONDS
        return super().new_context(*arguments, **named)


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is refused if its result would be too large."""
    # Some filters take the environment or the context before the value.
    value_place = 0
    if hasattr(function, "jinja_pass_arg"):
        value_place = 1

    @wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        before = arguments[:value_place]
        value = arguments[value_place]
        after = arguments[value_place + 1 :]
        is_iterator = hasattr(value, "__next__")
        if name in ("join", "sum"):
            # For these the size of all items has to be known before the call.
            if is_iterator or not isinstance(value, str):
                value = list(_limit_items(value))
        elif is_iterator:
            value = _limit_items(value)
        if name in _GROWING:
            _require_affordable(name, value, (*after, *named.values()))
        return function(*before, value, *after, **named)

    return limited


# Jinja's own functions, which ours call.
_from_string = Sandbox.from_string
_call = Sandbox.call
_call_binop = Sandbox.call_binop


def _limited_from_string(
    self: Sandbox, source: Any, *arguments: Any, **named: Any
) -> jinja2.Template:
    """Replacement for `Sandbox.from_string`: compile a template whose filters are limited.

    transformers makes an environment for each template, so no filter is limited twice.
    """
    if len(source) > MOST_SOURCE:
        raise TooMuch(f"a template of {len(source)} characters is none")
    # It writes texts of any length.
    self.globals.pop("lipsum", None)
    filters = {}
    for name, function in self.filters.items():
        if name not in _SLOW:
            filters[name] = _limited_filter(name, function)
    self.filters = filters
    return _from_string(self, source, *arguments, **named)


def _limited_call(
    self: Sandbox, context: Any, function: Any, /, *arguments: Any, **named: Any
) -> Any:
    """Replacement for `Sandbox.call`: call a function unless its result would be too large.

    It may be a method. The first arguments have no names, since a macro may have arguments of any
    name.
    """
    step()
    name = getattr(function, "__name__", "")
    if name in _GROWING:
        # The sandbox wraps `format`.
        method = getattr(function, "__wrapped__", function)
        text = getattr(method, "__self__", None)
        if name == "join" and arguments:
            # The text of the method separates the parts.
            parts = list(_limit_items(arguments[0]))
            arguments = (parts, *arguments[1:])
            _require_affordable(name, parts, (text,))
        else:
            _require_affordable(name, text, (*arguments, *named.values()))
    return _call(self, context, function, *arguments, **named)


def _limited_binop(self: Sandbox, context: Any, operator: str, left: Any, right: Any) -> Any:
    """Replacement for `Sandbox.call_binop`: apply an operator unless its result is too large."""
    if operator == "%" and isinstance(left, str):
        values: tuple[Any, ...] = (right,)
        if isinstance(right, tuple):
            values = right
        _require_affordable("format", left, values)
    elif operator in ("*", "**"):
        if operator == "*" and isinstance(right, str | list | tuple):
            # 3 * "text" is the same as "text" * 3.
            left, right = right, left
        _require_affordable_product(operator, left, right)
    return count_size(_call_binop(self, context, operator, left, right))


def _require_affordable_product(operator: str, left: Any, right: Any) -> None:
    """Raise TooMuch for a product or power that would be too large."""
    are_whole_numbers = isinstance(left, int) and isinstance(right, int)
    limit_of_size = MOST_SIZE
    if are_whole_numbers:
        # Their size is in bits.
        limit_of_size = MOST_WIDTH
    if are_whole_numbers and operator == "*":
        # A product has the bits of both factors together.
        size = _size(left) + _size(right)
    else:
        repetitions = 1
        if isinstance(right, int):
            repetitions = abs(right)
        size = _size(left) * repetitions
    if size > limit_of_size:
        raise TooMuch(f"{operator} would make a value that is too large")


def limit_templates() -> None:
    """Make every sandbox of this process count steps and sizes. May be called again."""
    replacements: dict[str, Any] = {
        "code_generator_class": _Counting,
        "template_class": _Limited,
        "from_string": _limited_from_string,
        "call": _limited_call,
        "call_binop": _limited_binop,
        "intercepted_binops": frozenset(["*", "**", "+", "%"]),
        # Compiled templates call these by their names (see `_Counting`).
        "step": staticmethod(step),
        "counted_text": staticmethod(counted_text),
        "count_size": staticmethod(count_size),
    }
    for name, replacement in replacements.items():
        setattr(Sandbox, name, replacement)

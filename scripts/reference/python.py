"""The page of what `import drumline` offers, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

from drumline.bench.verify import compare
from drumline.inference.model import Model, load
from drumline.planner.public import Plans, plan
from drumline.train.run import Run, train
from drumline.train.session import Session
from scripts.reference.markdown import paragraph

HEAD = """# Python functions

What `import drumline` offers. The guides [Drumline from Python](../guides/python.md) and
[your own model and loop](../guides/own_loop.md) show how to use it. The [exit codes](exit_codes.md) list the exceptions
of `drumline.errors`.

"""


def python_page() -> str:
    """Return the page."""
    parts = []
    functions = {"train": train, "plan": plan, "verify": compare, "load": load, "session": Session}
    for name, function in functions.items():
        parts.append(_function_text(f"drumline.{name}", function))
    for cls in (Run, Plans, Model, Session):
        parts.append(_class_text(cls))
    return HEAD + "\n".join(parts)


def _function_text(name: str, function: Any, level: str = "##") -> str:
    """Return the part about a function: its signature, then its docstring."""
    return f"{level} {name}\n\n```\n{name}{_signature(function)}\n```\n\n{_prose(function)}\n"


class Written(str):
    """A type as the code writes it: its representation has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Any) -> str:
    """Return the signature as it is written: without quotes around types, and without addresses."""
    signature = inspect.signature(function)
    parameters = []
    for name, parameter in signature.parameters.items():
        if name == "self":
            continue
        if isinstance(parameter.annotation, str):
            parameter = parameter.replace(annotation=Written(parameter.annotation))
        parameters.append(parameter)
    result = signature.return_annotation
    if inspect.isclass(function):
        result = inspect.Signature.empty
    elif isinstance(result, str):
        result = Written(result)
    text = str(signature.replace(parameters=parameters, return_annotation=result))
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)


def _class_text(cls: type) -> str:
    """Return the part about a class: its docstring, its properties and its methods."""
    lines = [f"## {cls.__name__}\n", _prose(cls) + "\n"]
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            lines.append(paragraph(f"- `{name}`: {inspect.getdoc(member) or ''}"))
    lines.append("")
    for name, member in vars(cls).items():
        if not name.startswith("_") and inspect.isfunction(member):
            lines.append(_function_text(f"{cls.__name__}.{name}", member, "###"))
    return "\n".join(lines)


def _prose(thing: Any) -> str:
    """Return a docstring as Markdown, paragraph by paragraph. A class has that of its constructor, too."""
    text = inspect.getdoc(thing) or ""
    constructor = getattr(thing, "__init__", None) if inspect.isclass(thing) else None
    if constructor is not None and constructor.__doc__:
        text += f"\n\n{inspect.getdoc(constructor)}"
    paragraphs = text.split("\n\n")
    return "\n\n".join(paragraph(part) for part in paragraphs)

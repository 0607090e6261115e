"""Tools: Python functions that a model calls, each with the JSON schema of its arguments. No torch.

pydantic makes the schema from the types of the parameters, and checks the arguments of a call by it.
The descriptions are those of the docstring (Google's style: a section `Args:`).
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from drumline.config.registry import find_object
from drumline.errors import ConfigError
from drumline.rl.tool_calls import Call

# The most characters of a result, and of an error, that the model gets to read.
MOST_RESULT = 10_000
MOST_ERROR = 1_000
_STRICT = ConfigDict(extra="forbid", protected_namespaces=())
_ARGUMENTS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
# `name: text` or `name (type): text`.
_ARGUMENT = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    function: Callable[..., Any]
    # Checks the arguments of a call.
    arguments: type[BaseModel]
    # What the chat template shows: {"type": "function", "function": {name, description, parameters}}.
    schema: dict[str, Any]

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the result as a text. Raises ValidationError, and whatever the function raises."""
        checked = self.arguments.model_validate(arguments)
        values = {}
        for name in type(checked).model_fields:
            values[name] = getattr(checked, name)
        result = self.function(**values)
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return result[:MOST_RESULT]


class ToolBox:
    """The tools of an environment of kind tools, which runs the calls of a turn."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of all tools, in the order of the config."""
        return [tool.schema for tool in self.tools.values()]

    def answer(self, calls: Sequence[Call]) -> tuple[list[dict[str, Any]], int]:
        """Return a message with the result or the error of each call, and the number of errors."""
        messages = []
        errors = 0
        for call in calls:
            content, has_failed = self._run(call)
            errors += has_failed
            message = {"role": "tool", "name": call.name, "content": content}
            if call.identifier is not None:
                message["tool_call_id"] = call.identifier
            messages.append(message)
        return messages, errors

    def _run(self, call: Call) -> tuple[str, bool]:
        """Return the result of a call, or its error, and whether it is an error."""
        tool = self.tools.get(call.name)
        if tool is None:
            names = ", ".join(self.tools)
            return f"error: there is no tool {call.name!r}; there are: {names}", True
        try:
            return tool.call(call.arguments), False
        except ValidationError as error:
            return f"error: {_describe(error)}"[:MOST_ERROR], True
        except Exception as error:  # noqa: BLE001 — whatever a tool raises, the model gets to read it
            return f"error: {type(error).__name__}: {error}"[:MOST_ERROR], True


def _describe(error: ValidationError) -> str:
    """Return what is wrong with the arguments of a call, a part for each argument."""
    parts = []
    for each in error.errors(include_url=False, include_input=False):
        name = ".".join(map(str, each["loc"]))
        parts.append(f"{name}: {each['msg']}")
    return "; ".join(parts)


def load_tools(paths: Sequence[str], base_dir: Path, where: str) -> list[Tool]:
    """Return the tools of a config.

    Args:
        paths: `module:function` or `file.py:function`, each.
        base_dir: The folder of the YAML.
        where: Their key in the config, for errors.

    Raises ConfigError for a function that is not found, or of which no schema can be made.
    """
    tools: dict[str, Tool] = {}
    for index, path in enumerate(paths):
        place = f"{where}[{index}]"
        function = find_object(path, base_dir, place, "function")
        tool = make_tool(function, place)
        if tool.name in tools:
            raise ConfigError(f"two tools are called {tool.name!r}", where=place, fix="rename one")
        tools[tool.name] = tool
    return list(tools.values())


def make_tool(function: Callable[..., Any], where: str) -> Tool:
    """Return a function as a tool. `where`: its key in the config, for errors.

    Raises ConfigError for a parameter without a type, or of a type that has no JSON schema.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        what = f"{function!r} has no name; a tool is a function with one"
        raise ConfigError(what, where=where, fix="define it with `def`")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name} is async; a tool is a plain function", where=where)
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{name} yields values; a tool returns one", where=where)
    summary, descriptions = _read_docstring(inspect.getdoc(function) or "")
    fields = _fields(function, descriptions, where)
    try:
        arguments = create_model(name, __config__=_STRICT, **fields)
        parameters = arguments.model_json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        first, *_ = str(error).splitlines()
        raise ConfigError(f"{name} has no JSON schema: {first}", where=where) from error
    for parameter in fields:
        # pydantic takes a field of this name for its own settings.
        if parameter not in arguments.model_fields:
            what = f"a parameter of a tool cannot be called {parameter}"
            raise ConfigError(what, where=where, fix="rename it")
    # Nothing that the model needs to know.
    parameters.pop("additionalProperties", None)
    _drop_titles(parameters)
    schema = {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }
    return Tool(name, function, arguments, schema)


def _fields(function: Callable[..., Any], descriptions: dict[str, str], where: str) -> Any:
    """Return parameter → (type, field), as pydantic's `create_model` takes them.

    Raises ConfigError for a parameter that a call cannot name, or that has no type.
    """
    name = function.__name__
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"a type of {name} is not known: {error}", where=where) from error
    fields = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            what = f"the parameter {parameter.name} of {name} cannot be given by its name"
            raise ConfigError(what, where=where, fix="take it out")
        if parameter.name not in types:
            what = f"the parameter {parameter.name} of {name} has no type"
            raise ConfigError(what, where=where, fix=f"write `{parameter.name}: str`, for example")
        default = parameter.default
        if default is parameter.empty:
            default = ...
        description = descriptions.get(parameter.name)
        fields[parameter.name] = (types[parameter.name], Field(default, description=description))
    return fields


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of the function, and parameter → what it says of that."""
    section = _ARGUMENTS.search(text)
    if section is None:
        return text.strip(), {}
    summary = text[: section.start()].strip()
    descriptions: dict[str, str] = {}
    current = ""
    indent = ""
    for line in text[section.end() :].strip("\n").splitlines():
        if line.strip() and not line[0].isspace():
            # The next section.
            break
        match = _ARGUMENT.match(line)
        is_entry = match is not None and (not indent or match[1] == indent)
        if match is not None and is_entry:
            indent = match[1]
            current = match[2]
            descriptions[current] = match[3].strip()
        elif current and line.strip():
            descriptions[current] += f" {line.strip()}"
    return summary, descriptions


def _drop_titles(schema: Any) -> None:
    """Remove the titles that pydantic makes of names from a JSON schema, in place."""
    if isinstance(schema, list):
        for entry in schema:
            _drop_titles(entry)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("title"), str):
        del schema["title"]
    for key, entry in schema.items():
        # A default is a value and no schema.
        if key != "default":
            _drop_titles(entry)

"""What a row of another tool asks: its prompt with what that is about, and the system's message in a column of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.data.rivals import Values
from drumline.errors import DataError

SYSTEMS = ("system", "system_prompt", "system_message")
CONTEXTS = ("input", "context")  # what an instruction is about
QUESTIONS = ("question", "query")
# What those are about: where they stand is not known.
PASSAGES = (
    "article",
    "passage",
    "background",
    "situation",
    "story",
    "document",
)


def first(there: Values, names: tuple[str, ...], kinds: Any = str) -> str | None:
    """The first of the columns `names` that a row has with a value of `kinds`."""
    return next((name for name in names if isinstance(there.get(name), kinds)), None)


def system_of(there: Values) -> tuple[list[dict[str, Any]], set[str]]:
    """The system's message in a column of its own, and that column."""
    name = first(there, SYSTEMS)
    return (
        ([], set())
        if name is None
        else ([{"role": "system", "content": there[name].removeprefix("SYSTEM: ")}], {name})
    )


def headed(prompt: Any, there: Values) -> tuple[Any, set[str]]:
    """The prompt behind the system's message, if a column has one and the prompt none."""
    messages, used = system_of(there)
    turns = (
        []
        if prompt is None
        else [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else prompt
    )
    plain = isinstance(turns, list) and all(
        isinstance(turn, Mapping) and turn.get("role") != "system" for turn in turns[:1]
    )
    if not messages or not plain:
        return prompt, set()
    return [*messages, *turns], used


def with_context(there: Values, prompt: str, origin: str) -> tuple[Any, set[str]]:
    """What the column `prompt` says, a text with what it is about behind it; and the columns of both. Raises DataError where that would be
    left out."""
    if not isinstance(there[prompt], str):
        return there[prompt], {prompt}
    held = {name: there[name] for name in CONTEXTS if name != prompt and name in there}
    # Nor pandas' NaN.
    names = [name for name, value in held.items() if value != {} and value == value]
    left = [name for name in names if type(there[name]) not in (str, int, float)]
    left += [name for name in PASSAGES if prompt in QUESTIONS and isinstance(there.get(name), str)]
    if left:
        what = f"what `{left[0]}` holds would be left out of the prompt, which is `{prompt}`"
        raise DataError(
            what,
            where=origin,
            fix="write it into that column, or into `context` as a text; or map `columns`, to go without it",
        )
    return "\n".join(str(there[name]) for name in (prompt, *names)), {prompt, *names}


def question_of(there: Values, prompt: str, origin: str) -> tuple[Any, set[str]]:
    """The same, with the system's message in front."""
    text, used = with_context(there, prompt, origin)
    question, system = headed(text, there)
    return question, used | system

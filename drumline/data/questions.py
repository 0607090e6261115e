"""The question of a row of another tool: its prompt with what the prompt is about, and the system's message of another column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.data.rivals import Values
from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError

SYSTEMS = ("system", "system_prompt", "system_message")
# Columns that hold what an instruction is about.
CONTEXTS = ("input", "context")
QUESTIONS = ("question", "query")
# Columns that hold what a question is about. Where it belongs in the prompt is not known.
PASSAGES = (
    "article",
    "passage",
    "background",
    "situation",
    "story",
    "document",
)


def find_column(present: Values, names: tuple[str, ...], kinds: Any = str) -> str | None:
    """Return the first of the columns `names` that a row has with a value of the type `kinds`; None without one."""
    for name in names:
        if isinstance(present.get(name), kinds):
            return name
    return None


def read_system(present: Values) -> tuple[Messages, set[str]]:
    """Return the system's message in a column of its own, and that column; nothing of either if there is none."""
    name = find_column(present, SYSTEMS)
    if name is None:
        return [], set()
    content = present[name].removeprefix("SYSTEM: ")
    return [{"role": "system", "content": content}], {name}


def prepend_system(prompt: Any, present: Values) -> tuple[Any, set[str]]:
    """Put the system's message in front of a prompt, if a column has one and the prompt none.

    Returns the prompt, and the column that was used.
    """
    messages, used = read_system(present)
    turns = [] if prompt is None else as_messages(prompt, "user")
    if not messages or not isinstance(turns, list):
        return prompt, set()
    if turns:
        first = turns[0]
        if not isinstance(first, Mapping) or first.get("role") == "system":
            return prompt, set()
    return [*messages, *turns], used


def join_context(present: Values, prompt: str, origin: str) -> tuple[Any, set[str]]:
    """Join the text in the column `prompt` with what it is about. Return the joined text and the columns that it was made of.

    A prompt that is no text stays as it is. Raises DataError if what it is about would be left out.
    """
    if not isinstance(present[prompt], str):
        return present[prompt], {prompt}
    contexts = []
    for name in CONTEXTS:
        if name != prompt and name in present and not _is_empty(present[name]):
            contexts.append(name)
    lost = [name for name in contexts if type(present[name]) not in (str, int, float)]
    if prompt in QUESTIONS:
        lost += [name for name in PASSAGES if isinstance(present.get(name), str)]
    if lost:
        what = f"what `{lost[0]}` holds would be left out of the prompt, which is `{prompt}`"
        fix = "write it into that column, or into `context` as a text; or map `columns`, to go without it"
        raise DataError(what, where=origin, fix=fix)
    names = (prompt, *contexts)
    return "\n".join(str(present[name]) for name in names), set(names)


def _is_empty(context: Any) -> bool:
    """Return whether a context holds nothing: no keys, or pandas' NaN, which differs from itself."""
    return not (context != {} and context == context)


def build_question(present: Values, prompt: str, origin: str) -> tuple[Any, set[str]]:
    """Return the prompt in the column `prompt` with what it is about and the system's message in front, and the columns of all.

    Raises DataError if something would be left out.
    """
    text, used = join_context(present, prompt, origin)
    question, system_columns = prepend_system(text, present)
    return question, used | system_columns

"""The question of a row of another tool.

It is the row's prompt, with what the prompt is about, and with the system's message of another
column before it. A part of a row must not be left out silently: the model would learn to answer a
question that it does not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError

# The columns of a row that hold something.
PresentColumns = Mapping[str, Any]
# Columns that hold the system's message.
SYSTEMS = ("system", "system_prompt", "system_message")
# Columns that hold what an instruction is about.
CONTEXTS = ("input", "context")
# Prompts that may be about a passage.
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


def find_column(present: PresentColumns, names: tuple[str, ...], kinds: Any = str) -> str | None:
    """Return the first of some columns that a row has with a value of some type; None without one.

    Args:
        present: the columns of the row.
        names: the columns to look for, in the order in which they count.
        kinds: a type, or a union of types, as `isinstance` takes it.
    """
    for name in names:
        if isinstance(present.get(name), kinds):
            return name
    return None


def read_system(present: PresentColumns) -> tuple[Messages, set[str]]:
    """Return the system's message in a column of its own, and that column.

    Both are empty if there is none.
    """
    name = find_column(present, SYSTEMS)
    if name is None:
        return [], set()
    # Transcripts of calls, see `turns.CHAT`, have it in this form.
    content = present[name].removeprefix("SYSTEM: ")
    return [{"role": "system", "content": content}], {name}


def prepend_system(prompt: Any, present: PresentColumns) -> tuple[Any, set[str]]:
    """Return a prompt behind the system's message, and the column of that message.

    If no column has one, or the prompt has one of its own, the prompt is returned as it is, and no
    column. `prompt`: a text, messages, or None for a row without a prompt.
    """
    messages, used = read_system(present)
    turns: Messages = []
    if prompt is not None:
        turns = as_messages(prompt, "user")
    if not messages or not isinstance(turns, list):
        return prompt, set()
    if turns:
        first = turns[0]
        if not isinstance(first, Mapping) or first.get("role") == "system":
            return prompt, set()
    return [*messages, *turns], used


def join_context(present: PresentColumns, prompt: str, origin: str) -> tuple[Any, set[str]]:
    """Return a prompt joined with what it is about, and the columns that it was made of.

    A prompt that is no text stays as it is.

    Args:
        present: the columns of the row.
        prompt: the column of the prompt.
        origin: the row's name in an error.

    Raises DataError if what the prompt is about would be left out.
    """
    if not isinstance(present[prompt], str):
        return present[prompt], {prompt}
    contexts = []
    for name in CONTEXTS:
        if name != prompt and name in present and not _is_empty(present[name]):
            contexts.append(name)
    # Lists and dictionaries have no form in a prompt, and neither have true and false.
    lost = [name for name in contexts if type(present[name]) not in (str, int, float)]
    if prompt in QUESTIONS:
        lost += [name for name in PASSAGES if isinstance(present.get(name), str)]
    if lost:
        what = f"what `{lost[0]}` holds would be left out of the prompt, which is `{prompt}`"
        fix = (
            "write it into that column, or into `context` as a text; or map `columns`, to go "
            "without it"
        )
        raise DataError(what, where=origin, fix=fix)
    names = (prompt, *contexts)
    texts = [str(present[name]) for name in names]
    return "\n".join(texts), set(names)


def _is_empty(context: Any) -> bool:
    """Return whether a context holds nothing: no keys, or pandas' NaN, which differs from itself."""
    is_nan = context != context
    return bool(context == {} or is_nan)


def build_question(present: PresentColumns, prompt: str, origin: str) -> tuple[Any, set[str]]:
    """Return a prompt with what it is about, behind the system's message, and the columns of all.

    Args:
        present: the columns of the row.
        prompt: the column of the prompt.
        origin: the row's name in an error.

    Raises DataError if something would be left out.
    """
    text, used = join_context(present, prompt, origin)
    question, system_columns = prepend_system(text, present)
    return question, used | system_columns

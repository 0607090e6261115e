"""Preference pairs as rows: their prompt and two answers.

An algorithm that learns from answers one by one reads a pair as two judged answers.
"""

from __future__ import annotations

import re
from typing import Any

from drumline.config.data import PAIR_FORMS, Forms
from drumline.data.formats import convert_row, judges_answers
from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError

# A prompt or an answer: a text, or the messages of a conversation.
TextOrMessages = str | Messages
SIDES = ("chosen", "rejected")
SAME_ANSWER = "`chosen` and `rejected` are the same answer"
# Columns that hold whether an answer is good.
JUDGEMENTS = {"label", "kto_tag"}


def is_pair_to_split(
    values: dict[str, Any], accepted_forms: Forms, wanted: str, origin: str
) -> bool:
    """Return whether a row is a pair, and the algorithm learns from answers one by one.

    Args:
        values: the row as it is written.
        accepted_forms: the forms of the algorithm's rows.
        wanted: the source's `format`.
        origin: the row's name in an error.

    Raises DataError for a row that `wanted` cannot be read from, and Tie for two answers of which
    neither is better.
    """
    if not judges_answers(accepted_forms):
        return False
    names = {str(name).lower() for name in values}
    if names.issuperset(SIDES):
        return True
    # An answer with a judgement of its own, whatever else the row has.
    if names & JUDGEMENTS:
        return False
    # Pairs under other names, such as two answers and a verdict.
    _, columns = convert_row(dict(values), PAIR_FORMS, wanted, origin)
    return columns.keys() >= set(SIDES)


def split_pair(values: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    """Return the two rows of a pair: its chosen answer with label true, the rejected one with false.

    The rows have `prompt`, `completion` and `label`, and the pair's tools and images. Raises DataError for two
    equal answers, which would be good and bad at once.
    """
    prompt, chosen, rejected = pair_parts(values, origin)
    if chosen == rejected:
        raise DataError(SAME_ANSWER, where=origin, fix="take the row out")
    shared = {"prompt": prompt}
    for key in ("tools", "images"):
        if key in values:
            shared[key] = values[key]
    good = {**shared, "completion": chosen, "label": True}
    bad = {**shared, "completion": rejected, "label": False}
    return [good, bad]


def pair_parts(
    values: dict[str, Any], origin: str
) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    """Return the prompt, the chosen and the rejected answer of a pair.

    Without a `prompt` column the prompt is the common start of both sides; with one, messages may
    repeat it. Raises DataError if one side is text and the other messages, and there is no prompt
    column.
    """
    chosen = values["chosen"]
    rejected = values["rejected"]
    if "prompt" not in values:
        if type(chosen) is not type(rejected):
            what = "one side of the pair is text, the other messages"
            raise DataError(what, where=origin, fix="write both alike, or map `columns.prompt`")
        length = _common_length(chosen, rejected)
        return chosen[:length], chosen[length:], rejected[length:]
    prompt = values["prompt"]
    # Datasets strip the blanks of a prompt in one column and not in the other.
    start = [_strip_content(turn) for turn in as_messages(prompt, "user")]
    return prompt, _remove_prompt(start, chosen), _remove_prompt(start, rejected)


def _remove_prompt(prompt: Messages, side: TextOrMessages) -> TextOrMessages:
    """Return a side without the messages of the prompt that it repeats.

    The system's message may be missing in the side: it may come from a column of its own.
    """
    if not isinstance(side, list):
        return side
    without_system: Messages = []
    if prompt[0]["role"] == "system":
        without_system = prompt[1:]
    for turns in (prompt, without_system):
        if not turns:
            continue
        start = [_strip_content(turn) for turn in side[: len(turns)]]
        if start == turns:
            return side[len(turns) :]
    return side


def _strip_content(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content has no blanks around it."""
    content = turn.get("content")
    if isinstance(content, str):
        return {**turn, "content": content.strip()}
    return turn


def _common_length(chosen: Any, rejected: Any) -> int:
    """Return the length of the common start of two sides: whole messages, or text up to a blank.

    It leaves each side an answer: of messages at least the last one.
    """
    are_messages = isinstance(chosen, list)
    most = min(len(chosen), len(rejected))
    if are_messages:
        most -= 1
    length = 0
    while length < most and chosen[length] == rejected[length]:
        length += 1
    if are_messages:
        return length
    # Not within a word: its two halves would be tokenised unlike the word.
    blanks = [match.start() for match in re.finditer(r"\s+", chosen[:length])]
    if not blanks:
        return 0
    return blanks[-1]

"""Preference pairs as rows: their prompt and two answers, and the two judged answers that one pair stands for."""

from __future__ import annotations

import re
from typing import Any

from drumline.core.data import PAIR_FORMS, Forms
from drumline.data.formats import convert_row, judges_answers
from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError

Text = str | Messages
SIDES = ("chosen", "rejected")
SAME_ANSWER = "`chosen` and `rejected` are the same answer"
JUDGEMENTS = {"label", "kto_tag"}  # columns that say whether an answer is good


def is_pair_to_split(values: dict[str, Any], known: Forms, wanted: str, origin: str) -> bool:
    """Whether a row is a pair, and the algorithm learns from answers that are judged one by one.

    `known`: the forms of the algorithm's rows. `wanted`: the source's `format`. Raises DataError for
    a row that `wanted` cannot be read from, and Tie for two answers of which neither is better.
    """
    if not judges_answers(known):
        return False
    names = {str(name).lower() for name in values}
    if names.issuperset(SIDES):
        return True
    if names & JUDGEMENTS:
        return False
    _, columns = convert_row(dict(values), PAIR_FORMS, wanted, origin)
    return columns.keys() >= set(SIDES)


def split_pair(values: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    """Return the two rows of a pair: its chosen answer with label true, the rejected one with false.

    The rows have `prompt`, `completion` and `label`, and the pair's tools. Raises DataError for two
    equal answers, which would be good and bad at once.
    """
    prompt, chosen, rejected = pair_parts(values, origin)
    if chosen == rejected:
        raise DataError(SAME_ANSWER, where=origin, fix="take the row out")
    shared = {"prompt": prompt}
    if "tools" in values:
        shared["tools"] = values["tools"]
    good = {**shared, "completion": chosen, "label": True}
    bad = {**shared, "completion": rejected, "label": False}
    return [good, bad]


def pair_parts(values: dict[str, Any], origin: str) -> tuple[Text, Text, Text]:
    """Return the prompt, the chosen and the rejected answer of a pair.

    Without a `prompt` column the prompt is the common start of both sides; with one, messages may
    repeat it. Raises DataError if one side is text and the other messages, and there is no prompt
    column.
    """
    chosen, rejected = (values[name] for name in SIDES)
    if "prompt" not in values:
        if type(chosen) is not type(rejected):
            what = "one side of the pair is text, the other messages"
            raise DataError(what, where=origin, fix="write both alike, or map `columns.prompt`")
        at = _common_length(chosen, rejected)
        return chosen[:at], chosen[at:], rejected[at:]
    prompt = values["prompt"]
    begin = [_stripped(turn) for turn in as_messages(prompt, "user")]
    return prompt, _behind(begin, chosen), _behind(begin, rejected)


def _behind(begin: Messages, side: Text) -> Text:
    """A side without the prompt that it repeats, whose system's message may be in a column of its own."""
    bare = begin[1:] if begin[0]["role"] == "system" else []
    for turns in (begin, bare):
        if (
            isinstance(side, list)
            and turns
            and [_stripped(turn) for turn in side[: len(turns)]] == turns
        ):
            return side[len(turns) :]
    return side


def _stripped(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn.get("content")
    return {**turn, "content": content.strip()} if isinstance(content, str) else turn


def _common_length(chosen: Any, rejected: Any) -> int:
    """The length of the common start, which leaves each side an answer: whole messages, or text up to a blank."""
    least = min(len(chosen), len(rejected)) - isinstance(chosen, list)
    at = next((index for index in range(least) if chosen[index] != rejected[index]), least)
    if isinstance(chosen, list):
        return at
    blanks = [match.start() for match in re.finditer(r"\s+", chosen[:at])]
    return blanks[-1] if blanks else 0

"""Reads two answers and which is better, from the columns of a few public datasets.

`data.formats` reads the shapes that many datasets share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from drumline.data.questions import PresentColumns


class TwoAnswers(NamedTuple):
    """Two answers of a row, and which of them is better.

    Attributes:
        columns: response_a, response_b, winner (a, b or tie) and perhaps prompt.
        used: the names of the row's own columns that these are made of.
    """

    columns: dict[str, Any]
    used: set[str]


def read_two_answers(present: PresentColumns) -> TwoAnswers | None:
    """Return the two answers of a row of some public datasets; None for any other row.

    The datasets are OpenAI's webgpt_comparisons and summarize_from_feedback, and the conversations
    of lmsys' arena.
    """
    for read in (_read_webgpt, _read_summaries, _read_arena):
        found = read(present)
        if found is not None:
            return found
    return None


def _read_webgpt(present: PresentColumns) -> TwoAnswers | None:
    """Read two answers with a score each, and a question that is {full_text, …}."""
    used = {"question", "answer_0", "answer_1", "score_0", "score_1"}
    question = present.get("question")
    if not isinstance(question, Mapping) or not used <= present.keys():
        return None
    columns = {
        "prompt": question.get("full_text"),
        "response_a": present["answer_0"],
        "response_b": present["answer_1"],
        "winner": _compare(present["score_0"], present["score_1"]),
    }
    return TwoAnswers(columns, used)


def _read_summaries(present: PresentColumns) -> TwoAnswers | None:
    """Read two summaries of a post or an article, and the number of the better one."""
    info = present.get("info")
    summaries = present.get("summaries")
    if not isinstance(info, Mapping) or "choice" not in present:
        return None
    if not isinstance(summaries, list) or len(summaries) != 2:
        return None
    # None is refused later, by the check of the row's columns.
    texts: list[Any] = []
    for summary in summaries:
        text = None
        if isinstance(summary, Mapping):
            text = summary.get("text")
        texts.append(text)
    columns = {
        "prompt": info.get("post") or info.get("article"),
        "response_a": texts[0],
        "response_b": texts[1],
        # `choice` is the index of the better summary: 0 or 1, below or above a half.
        "winner": _compare(0.5, present["choice"]),
    }
    return TwoAnswers(columns, {"info", "summaries", "choice"})


def _read_arena(present: PresentColumns) -> TwoAnswers | None:
    """Read two conversations, each of JSON lists of questions and answers, and a flag for each."""
    needed = {"prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"}
    if not needed <= present.keys():
        return None
    conversation_a = _parse_conversation(present["prompt"], present["response_a"])
    conversation_b = _parse_conversation(present["prompt"], present["response_b"])
    if conversation_a is None or conversation_b is None:
        return None
    # Both flags are 0 in a tie, so `winner_tie` tells nothing more.
    winner = _compare(present["winner_model_a"], present["winner_model_b"])
    columns = {"response_a": conversation_a, "response_b": conversation_b, "winner": winner}
    used = needed
    if "winner_tie" in present:
        used = needed | {"winner_tie"}
    return TwoAnswers(columns, used)


def _compare(score_a: Any, score_b: Any) -> str:
    """Return which score is higher: a, b or tie.

    `?`, which is refused as a verdict, if they are no numbers.
    """
    try:
        a = float(score_a)
        b = float(score_b)
    except (TypeError, ValueError, OverflowError):
        return "?"
    if a == b:
        return "tie"
    if b > a:
        return "b"
    return "a"


def _parse_conversation(questions: Any, answers: Any) -> list[dict[str, str]] | None:
    """Return the conversation of two JSON lists of as many texts; None for anything else.

    `questions` are those of the user, `answers` those of one model.
    """
    try:
        question_texts = json.loads(questions)
        answer_texts = json.loads(answers)
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(question_texts, list) or not isinstance(answer_texts, list):
        return None
    if not question_texts or len(question_texts) != len(answer_texts):
        return None
    messages = []
    for question, answer in zip(question_texts, answer_texts, strict=True):
        messages.append({"role": "user", "content": question or ""})
        messages.append({"role": "assistant", "content": answer or ""})
    return messages

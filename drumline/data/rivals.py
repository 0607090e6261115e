"""Two answers and a verdict, in shapes that some data sets have alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain, cycle
from typing import Any

Values = Mapping[str, Any]
BY_MODEL = ("winner_model_a", "winner_model_b")


def rivals(there: Values) -> tuple[dict[str, Any], set[str]] | None:
    """(prompt, response_a, response_b, winner: a, b or tie; the columns they were made of) of a row as WebGPT's comparisons,
    summarize_from_feedback or lmsys' arena have it: its two answers are whole conversations. None of any other."""
    question, info, summaries = there.get("question"), there.get("info"), there.get("summaries")
    if (
        isinstance(question, Mapping)
        and {"answer_0", "answer_1", "score_0", "score_1"} <= there.keys()
    ):
        used = {"question", "answer_0", "answer_1", "score_0", "score_1"}
        return _laid(
            question.get("full_text"),
            there["answer_0"],
            there["answer_1"],
            _better(there["score_0"], there["score_1"]),
        ), used
    if (
        isinstance(info, Mapping)
        and isinstance(summaries, list)
        and len(summaries) == 2
        and "choice" in there
    ):
        one, other = (each.get("text") if isinstance(each, Mapping) else None for each in summaries)
        prompt = info.get("post") or info.get("article")
        return _laid(prompt, one, other, _better(0.5, there["choice"])), {
            "info",
            "summaries",
            "choice",
        }
    if there.keys() >= {"prompt", "response_a", "response_b", *BY_MODEL}:
        talks = [_talk(there["prompt"], there[side]) for side in ("response_a", "response_b")]
        if None not in talks:
            used = {"prompt", "response_a", "response_b", *BY_MODEL, "winner_tie"} & there.keys()
            return {
                "response_a": talks[0],
                "response_b": talks[1],
                "winner": _better(*(there[name] for name in BY_MODEL)),
            }, used
    return None


def _laid(prompt: Any, one: Any, other: Any, winner: str) -> dict[str, Any]:
    return {"prompt": prompt, "response_a": one, "response_b": other, "winner": winner}


def _better(one: Any, other: Any) -> str:
    """`?`, which is refused as a verdict, where these are no numbers."""
    try:
        first, second = float(one), float(other)
    except (TypeError, ValueError, OverflowError):
        return "?"
    return "tie" if first == second else "ab"[second > first]


def _talk(questions: Any, answers: Any) -> list[dict[str, str]] | None:
    """The conversation of two lists of texts, in JSON; None of anything else."""
    try:
        lists = json.loads(questions), json.loads(answers)
    except (TypeError, ValueError, RecursionError):
        return None
    if not all(isinstance(texts, list) and texts for texts in lists) or len(lists[0]) != len(
        lists[1]
    ):
        return None
    texts = chain.from_iterable(zip(*lists, strict=True))
    return [
        {"role": role, "content": text or ""}
        for role, text in zip(cycle(("user", "assistant")), texts, strict=False)
    ]

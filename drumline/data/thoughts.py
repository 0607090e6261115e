"""Finds the reasoning in answers, and removes it or takes it out of the targets.

Reasoning is tagged (`<think>…</think>` in a text), or stands under a key of its own in a message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.data.tokens import Tokens
from drumline.errors import DataError

# The advice of an error for reasoning that does not end.
UNENDED = "take the row out, or set data.reasoning: keep"
# Keys of a message that hold its reasoning.
REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_INSIDE = re.compile(r"<think>(.*?)</think>", re.DOTALL)
# Reasoning without its opening tag, which may be in the generation prompt.
_UNOPENED = re.compile(r"\A(?:(?!<think>).)*?</think>\s*", re.DOTALL)


def thoughts_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return the reasoning of all answers of a conversation, stripped, without its tags."""
    found: list[str] = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        for key in REASONING:
            if isinstance(message.get(key), str):
                found.append(message[key])
        content = message.get("content") or ""
        if isinstance(content, list):
            parts = content
        else:
            parts = [{"text": content}]
        for part in parts:
            text = part.get("text") or ""
            found += _INSIDE.findall(text)
    stripped = [thought.strip() for thought in found]
    return [thought for thought in stripped if thought]


def without_thoughts(text: str, what: str, origin: str) -> str:
    """Return an answer without its reasoning.

    Args:
        text: the answer.
        what: its name, for the message.
        origin: the row's name in an error.

    Raises DataError for reasoning that does not end.
    """
    rest = _UNOPENED.sub("", text)
    rest = _THOUGHT.sub("", rest)
    if "<think>" in rest:
        message = f"the reasoning of {what} does not end: no </think>"
        raise DataError(message, where=origin, fix=UNENDED)
    return rest


def mask_thoughts(
    tokens: Tokens,
    learn: npt.NDArray[np.uint8],
    origin: str,
    may_start_inside: bool = True,
    key_reasoning: Sequence[str] = (),
) -> None:
    """Take reasoning out of the targets: set its tokens in `learn` to 0.

    Args:
        tokens: a rendered text.
        learn: uint8[tokens], 1 for a target; changed in place.
        origin: the row's name in an error.
        may_start_inside: whether a range of targets may begin within reasoning.
        key_reasoning: the reasoning texts that messages have under keys of their own, with repeats.
            The template may write them without tags.

    Raises DataError for reasoning that does not end, or cannot be found in the tokens.
    """
    # Most texts have no reasoning.
    if "think>" not in tokens.text and not key_reasoning:
        return
    if tokens.starts is None:
        what = "this tokenizer gives no offsets to find the reasoning by"
        fix = (
            "use a model whose tokenizer has a fast version, or set data.reasoning to keep or drop"
        )
        raise DataError(what, where=origin, fix=fix)
    untagged = _find_untagged(key_reasoning, tokens.text)
    # Where each token starts in the text, and where the text ends.
    characters = np.append(tokens.starts, len(tokens.text))
    # The flags change at the start and at the stop of each range of targets.
    edges = np.flatnonzero(np.diff(learn, prepend=0, append=0))
    stretches = edges.reshape(-1, 2)
    for start, stop in stretches.tolist():
        first_character = int(characters[start])
        stretch = tokens.text[characters[start] : characters[stop]]
        end_of_last = 0
        for first, last in _find_spans(stretch, may_start_inside, key_reasoning, untagged):
            first_token = tokens.token_at(first_character + first, origin)
            stop_token = tokens.token_at(first_character + last, origin)
            # The first token of the reasoning may begin before the targets do.
            learn[max(start, first_token) : stop_token] = 0
            end_of_last = max(end_of_last, last)
        # Without a closing tag nobody knows at which token the answer begins.
        if "<think>" in stretch[end_of_last:]:
            what = "the reasoning of an answer does not end: no </think>"
            raise DataError(what, where=origin, fix=UNENDED)


def _find_untagged(key_reasoning: Sequence[str], text: str) -> list[str]:
    """Return those of `key_reasoning`, each once, that are in no tagged reasoning of `text`."""
    tagged = [match[0] for match in _THOUGHT.finditer(text)]
    untagged = []
    for thought in dict.fromkeys(key_reasoning):
        if not any(thought in each for each in tagged):
            untagged.append(thought)
    return untagged


def _find_spans(
    stretch: str, may_start_inside: bool, key_reasoning: Sequence[str], untagged: list[str]
) -> list[tuple[int, int]]:
    """Return the characters [first, last) of each piece of reasoning in a stretch of targets.

    Args:
        stretch: the text of consecutive targets.
        may_start_inside: whether the stretch may begin within reasoning.
        key_reasoning: see `mask_thoughts`.
        untagged: the texts of `key_reasoning` that are in no tags, each once.
    """
    matches: list[re.Match[str]] = []
    if may_start_inside:
        matches += _UNOPENED.finditer(stretch)
    matches += _THOUGHT.finditer(stretch)
    for thought in untagged:
        # The text may have the same words elsewhere: take as many places as the row has thoughts.
        places = re.finditer(re.escape(thought), stretch)
        matches += islice(places, key_reasoning.count(thought))
    return [match.span() for match in matches]

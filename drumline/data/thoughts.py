"""The reasoning of answers, in their text: left out, or not learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.data.tokens import Tokens
from drumline.errors import DataError

UNENDED = "take the row out, or set data.reasoning: keep"
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_INSIDE = re.compile(r"<think>(.*?)</think>", re.DOTALL)
# The generation prompt may have opened it.
_BEGUN = re.compile(r"\A(?:(?!<think>).)*?</think>\s*", re.DOTALL)


def thoughts_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return the reasoning of all answers, without its tags and the blanks around it."""
    found = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        found += [message[key] for key in REASONING if isinstance(message.get(key), str)]
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            found += _INSIDE.findall(part.get("text") or "")
    return [thought.strip() for thought in found if thought.strip()]


def without_thoughts(text: str, what: str, origin: str) -> str:
    """An answer without its reasoning. Raises DataError for reasoning that does not end."""
    rest = _THOUGHT.sub("", _BEGUN.sub("", text))
    if "<think>" in rest:
        raise DataError(
            f"the reasoning of {what} does not end: no </think>", where=origin, fix=UNENDED
        )
    return rest


def mask_thoughts(
    tokens: Tokens,
    learn: npt.NDArray[np.uint8],
    origin: str,
    begun: bool = True,
    own: Sequence[str] = (),
) -> None:
    """Take reasoning out of the targets. `begun`: a stretch of targets may begin within it; `own`: reasoning that the template writes
    in a form of its own. Raises DataError."""
    if "think>" not in tokens.text and not own:
        return
    if tokens.starts is None:
        fix = (
            "use a model whose tokenizer has a fast version, or set data.reasoning to keep or drop"
        )
        raise DataError(
            "this tokenizer gives no offsets to find the reasoning by", where=origin, fix=fix
        )
    tagged = [match[0] for match in _THOUGHT.finditer(tokens.text)]
    bare = [
        thought for thought in dict.fromkeys(own) if not any(thought in each for each in tagged)
    ]
    edges = np.flatnonzero(np.diff(learn, prepend=0, append=0))
    ends = np.append(tokens.starts, len(tokens.text))
    for start, stop in edges.reshape(-1, 2).tolist():
        begin, part = int(ends[start]), tokens.text[ends[start] : ends[stop]]
        found = [*(_BEGUN.finditer(part) if begun else ()), *_THOUGHT.finditer(part)]
        found += [
            match
            for thought in bare
            for match in [*re.finditer(re.escape(thought), part)][: own.count(thought)]
        ]
        for match in found:
            learn[
                max(start, tokens.at(begin + match.start(), origin)) : tokens.at(
                    begin + match.end(), origin
                )
            ] = 0
        if "<think>" in part[max((match.end() for match in found), default=0) :]:
            raise DataError(
                "the reasoning of an answer does not end: no </think>", where=origin, fix=UNENDED
            )

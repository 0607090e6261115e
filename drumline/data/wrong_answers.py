"""Wrong answers to reasoning-gym questions: what a preference pair rejects, told wrong by the task's own verifier."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from drumline.errors import DataError

_OTHERS = 16  # answers of other rows that are tried first
_EDITS = 64


def wrong_answer(dataset: Any, number: int, rows: int, seed: str, where: str) -> str:
    """An answer that the verifier of `dataset` scores below row `number`'s own: that of another of the first `rows` rows, and where all
    of these are right too, the own one with a letter or digit changed. The same for the same seed. Raises DataError where none is found.
    """
    item = dataset[number]
    own = item["answer"]
    best = dataset.score_answer(own, item)
    draw = random.Random(f"{seed}/{number}")
    for answer in _candidates(dataset, number, rows, own, draw):
        if answer.strip() and answer.strip() != own.strip() and dataset.score_answer(answer, item) < best:
            return answer
    raise DataError("found no wrong answer to this question to make a pair with", where=where, fix="leave this task out")


def _candidates(dataset: Any, number: int, rows: int, own: str, draw: random.Random) -> Iterator[str]:
    for other in draw.sample(range(rows), min(rows, _OTHERS)):
        answer = dataset[other]["answer"]
        if other != number and isinstance(answer, str):
            yield answer
    for _ in range(_EDITS):
        yield _edited(own, draw)


def _edited(text: str, draw: random.Random) -> str:
    """`text` with one letter or digit replaced by another of its kind; behind a text without any, a digit."""
    places = [index for index, char in enumerate(text) if char.isalnum()]
    if not places:
        return text + draw.choice("0123456789")
    at = draw.choice(places)
    char = text[at]
    kind = "0123456789" if char.isdigit() else "abcdefghijklmnopqrstuvwxyz"
    new = draw.choice([other for other in kind if other != char.lower()])
    return text[:at] + (new.upper() if char.isupper() else new) + text[at + 1 :]

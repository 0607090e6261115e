"""Finds the answer of a row by its learn flags."""

from __future__ import annotations

from typing import Any

import numpy as np


def last_answer(learn: Any) -> tuple[int, int]:
    """Return [start, stop) of the last run of learned tokens.

    (0, stop) if all tokens before `stop` are learned, (0, 0) if none is.
    """
    stop = 0
    learned = np.flatnonzero(learn)
    if len(learned):
        stop = int(learned[-1]) + 1
    start = 0
    unlearned = np.flatnonzero(learn[:stop] == 0)
    if len(unlearned):
        start = int(unlearned[-1]) + 1
    return start, stop

"""Finds the answer of a row by its learn flags."""

from __future__ import annotations

from typing import Any

import numpy as np


def last_answer(learn: Any) -> tuple[int, int]:
    """Return the token range [start, stop) of the last run of targets.

    (0, stop) if all tokens before `stop` are targets, (0, 0) if none is. `learn`: uint8[n], 1 for a
    target.
    """
    stop = 0
    targets = np.flatnonzero(learn)
    if len(targets):
        stop = int(targets[-1]) + 1
    start = 0
    context = np.flatnonzero(learn[:stop] == 0)
    if len(context):
        start = int(context[-1]) + 1
    return start, stop

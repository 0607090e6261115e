"""Where the answer of a row lies, by its learn flags."""

from __future__ import annotations

from typing import Any

import numpy as np


def last_answer(learn: Any) -> tuple[int, int]:
    """[start, stop) of the last run of learned tokens; (0, stop) where all before `stop` are learned, (0, 0) where none is."""
    stop = int(np.flatnonzero(learn)[-1]) + 1 if learn.any() else 0
    silent = np.flatnonzero(learn[:stop] == 0)
    return (int(silent[-1]) + 1 if len(silent) else 0), stop

"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from drumline.core.config import ScheduleConfig


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, schedule: ScheduleConfig) -> float:
    """The rate of step `step` (counted from 0) of `steps`.

    Warm-up rises linearly, from 0 or from one step above it, and reaches the peak at step `warmup`. Then: constant; linear to
    `min_ratio`; cosine to `min_ratio` (Loshchilov & Hutter 2017, one half period); wsd: constant, and linear to `min_ratio` over the last
    `decay_ratio` of all steps (Hu et al. 2024). The last step still trains: it gets the rate just above the end of the course.
    """
    if step < warmup:
        return peak * (step / warmup if schedule.warmup_from_zero else (step + 1) / (warmup + 1))
    done = (step - warmup) / max(1, steps - warmup)
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "linear":
        left = 1.0 - done
    elif schedule.kind == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    else:
        left = min(1.0, (steps - step) / max(1.0, schedule.decay_ratio * steps))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * max(0.0, left))

"""Where a run stands, where its time went, and a step whose numbers are on their way to the host."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from drumline.core.config import Config
from drumline.core.plan import Plan
from drumline.core.run import EvalConfig
from drumline.data.stream import Ints
from drumline.dist.reduce import Gathered
from drumline.errors import ConfigError, TrainingStopped
from drumline.foreign import expanded
from drumline.telemetry.events import Emit, Nonfinite

# A fresh fp16 scale of 2^16 may have to halve this often before the first step fits.
MAX_RESCALES = 20
LATE = "stream", "spikes"
PAIRS = "drumline: keys and values"  # the only key of a dictionary whose keys are not all texts
SQUARES = "squared_norms"  # a sum of ranks that step by themselves: of their own gradients


@dataclass
class TrainState:
    """The trainer's own state. `position` counts samples drawn from the global order since step 0; `tokens` are real ones, all ranks.
    `best`: the best eval.metric; `evaluated`: steps at the last evaluation, 0 before one (-1: an older checkpoint); `mark`: the metric that
    eval.patience compares with, and `stale`: evaluations in a row since that were not better. `stream`: what a stream goes on from
    besides; `spikes`: what health.on_spike compares with and has passed over."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    best: float | None = None
    skips: int = 0
    evaluated: int = -1
    mark: float | None = None
    stale: int = 0
    stream: dict[str, Any] = field(default_factory=dict)
    spikes: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """As a checkpoint has it. What of `stream` and `spikes` is a function is asked for now; collective, as a save is."""
        now = {
            name: {
                key: value() if callable(value) else value
                for key, value in getattr(self, name).items()
            }
            for name in LATE
        }
        return {**vars(self), **now, "stream": keyed(now["stream"])}

    def __post_init__(self) -> None:
        self.stream = unkeyed(self.stream)


def keyed(value: Any) -> Any:
    """The same for JSON, which has no keys but texts: a dictionary with numbers as keys is one of pairs."""
    if isinstance(value, list | tuple):
        return [keyed(each) for each in value]
    if not isinstance(value, dict) or not all(
        isinstance(key, str | int | float | None) for key in value
    ):
        return value
    pairs = [[key, keyed(each)] for key, each in value.items()]
    return dict(pairs) if all(isinstance(key, str) for key in value) else {PAIRS: pairs}


def unkeyed(value: Any) -> Any:
    """What `keyed` was given, as JSON gives it back."""
    if isinstance(value, list):
        return [unkeyed(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: unkeyed(each)
        for key, each in (value[PAIRS] if value.keys() == {PAIRS} else value.items())
    }


@dataclass
class Flight:
    """A step whose update is made, or under way on a GPU, and whose numbers are on their way to the host. Those from `position` on are the
    loop's alone."""

    gathered: Gathered
    step: int  # steps done with it
    denominator: float = 0.0  # of the loss; 0: what the sum `weight` turns out to be
    position: int = 0
    # Of the global batch, without fillers.
    sample_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: int = 0
    lr: float = 0.0
    began: float = 0.0  # unix, with waiting for data
    data_s: float = 0.0  # that this rank waited for data
    volume: int | None = None  # bytes
    clock: str | None = None  # what Measure calls its seconds
    limit: float | None = None  # a larger loss is a spike
    logged: bool = False

    def __post_init__(self) -> None:
        self.computed = time.time()

    @cached_property
    def arrived(self) -> tuple[dict[str, float], list[list[float]], float]:
        """Sums over all samples, numbers by rank, and when the step ended: on a GPU the host goes on before."""
        if SQUARES in self.gathered.names:
            self.gathered.fetch((self.gathered[SQUARES] / self.gathered.world_size).sqrt())
        total, by_rank = self.gathered.read()
        total.pop(SQUARES, None)
        return total, by_rank, self.computed if self.gathered.arrived is None else time.time()

    @property
    def total(self) -> dict[str, float]:
        return self.arrived[0]

    @property
    def by_rank(self) -> list[list[float]]:
        """Of each rank the signal, and of the loop `retry_at`, seconds of waiting for data and for other ranks, bytes of memory, seconds
        of the step before; then the gradient norm alone."""
        return self.arrived[1]

    @property
    def loss(self) -> float:
        return self.total["loss"] / (self.denominator or self.total["weight"] or 1.0)

    @property
    def grad_norm(self) -> float:
        return self.by_rank[-1][0]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def judge(
    flight: Flight, plan: Plan, state: TrainState, rescales: bool, emit: Emit, where: str, fix: str
) -> None:
    """Count steps in a row that are not finite, which left the weights as they were, each with an event that names its samples.
    `rescales`: fp16's scale may be too large. Raises TrainingStopped by policy."""
    if flight.finite:
        state.skips = 0
        return
    health, loss, grad_norm = plan.config.health, flight.loss, flight.grad_norm
    rescale = rescales and math.isfinite(loss)
    policy = "rescale" if rescale else health.on_nan
    state.skips += 1
    emit(
        Nonfinite(
            step=flight.step,
            policy=policy,
            loss=loss,
            grad_norm=grad_norm,
            sample_ids=flight.sample_ids.tolist(),
        )
    )
    if policy == "stop" or state.skips > (MAX_RESCALES if rescale else health.max_skips):
        what = f"loss {loss:g}, gradient norm {grad_norm:g} at step {flight.step}"
        raise TrainingStopped(
            what + f" ({state.skips} in a row)" * (policy != "stop"), where=where, fix=fix
        )


def judged(
    metrics: dict[str, float], options: EvalConfig, state: TrainState
) -> tuple[float | None, bool]:
    """eval.metric of an evaluation (None: its task was not scored), and whether it is the best so far. Counts for eval.patience. The
    untrained weights are the base line, not a candidate: a run exports something that it trained. Raises ConfigError."""
    name, metric = options.metric, metrics.get(options.metric)
    unscored = name.startswith("tasks/") and not any(each.startswith("tasks/") for each in metrics)
    if metric is None and not unscored:
        raise ConfigError(
            f"no metric {name!r}", where="eval.metric", fix=f"one of {', '.join(metrics)}"
        )
    if metric is None or state.step == 0:
        return metric, False

    def beats(other: float | None, by: float) -> bool:
        sign = 1.0 if options.mode == "min" else -1.0
        return math.isfinite(metric) and (other is None or sign * metric < sign * other - by)

    better, counts = beats(state.best, 0.0), beats(state.mark, options.min_delta)
    state.best = metric if better else state.best
    if options.patience is not None:
        state.mark, state.stale = (metric, 0) if counts else (state.mark, state.stale + 1)
    return metric, better


def due(every: int | None, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return every is not None and now // every > before // every


def fallback_folder(config: Config, run_dir: str) -> Path | None:
    """Where the last checkpoint of a run goes whose own disk is full: a folder of the run's own in `checkpoint.fallback_dir`."""
    if config.checkpoint.fallback_dir is None:
        return None
    run = Path(run_dir).absolute()
    own = f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"
    return expanded(config.checkpoint.fallback_dir).absolute() / own


class Goodput:
    """Seconds of this process by what they were spent on; what no category claims is start-up until the first step, then `other`."""

    CATEGORIES = ("productive", "recompute", "eval", "save", "restore", "startup")

    def __init__(self, started: float) -> None:
        self.started = started
        self.seconds = dict.fromkeys(self.CATEGORIES, 0.0)
        # Of start-up, in order: from the process's begin, or the end of a part, to the end of the next.
        self.parts = {"imports and plan": max(0.0, started - psutil.Process().create_time())}
        self._first_step, self._part_began, self._begun = False, started, False

    @contextmanager
    def spend(self, category: str) -> Iterator[None]:
        before = time.time()
        try:
            yield
        finally:
            self.seconds[category] += time.time() - before

    def end_part(self, name: str) -> None:
        """Of start-up, what was since the last part, or since `started`, is this one."""
        now = time.time()
        self.parts[name], self._part_began = now - self._part_began, now

    def begun(self) -> dict[str, float] | None:
        """After the first step, once: the seconds of the parts of start-up, that step among them (compilation is in it)."""
        if self._begun:
            return None
        self._begun = True
        self.end_part("first step")
        return {name: round(seconds, 3) for name, seconds in self.parts.items()}

    def first_step(self) -> None:
        """Start-up ends here: all time so far that nothing else has claimed."""
        if not self._first_step:
            self._first_step = True
            claimed = sum(self.seconds.values())
            self.seconds["startup"] = time.time() - self.started - claimed

    def report(self) -> dict[str, float]:
        elapsed = time.time() - self.started
        other = max(0.0, elapsed - sum(self.seconds.values()))
        return {
            k: round(v, 3) for k, v in {"elapsed": elapsed, **self.seconds, "other": other}.items()
        }

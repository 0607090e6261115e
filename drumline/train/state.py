"""The state of a run: its counters, the step whose numbers are still on their way, and its time.

`TrainState` is what a checkpoint holds, `PendingStep` a step that was made and not yet reported,
and `Goodput` the seconds of the process by what they were spent on.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import psutil

from drumline.config.config import Config
from drumline.config.run import EvalConfig
from drumline.data.order import Ints
from drumline.dist.reduce import PendingSums
from drumline.errors import ConfigError, TrainingStopped
from drumline.foreign import expand_home
from drumline.plan.plan import Plan
from drumline.telemetry.events import Emit, Nonfinite

# A fresh fp16 scale of 2^16 may have to halve this often before the first step fits.
MAX_RESCALES = 20
# Fields of TrainState whose values may be functions, which `TrainState.dump` calls.
CALLED_AT_SAVE = ("stream", "spikes")
# The only key of a dictionary that `encode_keys` returns for one with other keys than strings.
PAIRS = "drumline: keys and values"
# The name of the sum of all ranks' squared gradient norms, for engines with local updates (local
# SGD), in which each rank updates by its own gradients.
SQUARES = "squared_norms"

Number = TypeVar("Number", float, list[float])


@dataclass
class TrainState:
    """The position and the counters of a run, as a checkpoint holds them.

    The names of the fields are keys in checkpoints. A new field needs a default, so that older
    checkpoints can be read; an older version cannot read a checkpoint that has the new field.
    """

    # Steps done.
    step: int = 0
    # Samples drawn from the global order since step 0.
    position: int = 0
    # Real tokens (no padding) of all ranks.
    tokens: int = 0
    # The best eval.metric so far.
    best: float | None = None
    # How many steps in a row were skipped until now.
    skips: int = 0
    # The number of the last step that was evaluated; 0 before the first evaluation; -1 in
    # checkpoints of older versions.
    evaluated: int = -1
    # For eval.patience: the best metric so far, which an evaluation has to improve on by more than
    # eval.min_delta. `best` counts smaller improvements, too.
    mark: float | None = None
    # How many evaluations in a row did not improve on `mark`.
    stale: int = 0
    # What the data loader or the rollouts need, besides `position`, to continue. In a session: the
    # user's own values, `Session.state`.
    stream: dict[str, Any] = field(default_factory=dict)
    # What `health.Spikes.state` returns.
    spikes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = decode_keys(self.stream)

    def dump(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it.

        Functions among the values of `stream` and `spikes` are replaced by what they return now.
        Collective, because they may be.
        """
        dumped = dict(vars(self))
        for name in CALLED_AT_SAVE:
            values = {}
            for key, value in dumped[name].items():
                values[key] = value() if callable(value) else value
            dumped[name] = values
        dumped["stream"] = encode_keys(dumped["stream"])
        return dumped


def encode_keys(value: Any) -> Any:
    """Return `value` with dictionaries in a form that JSON can hold; `decode_keys` undoes it.

    JSON has only strings as keys, so a dictionary with a number or None among its keys becomes
    `{PAIRS: [[key, value], …]}`. A dictionary with any other key is returned as it is, and JSON
    will refuse it.
    """
    if isinstance(value, list | tuple):
        return [encode_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str | int | float | None) for key in value):
        return value
    pairs = [[key, encode_keys(each)] for key, each in value.items()]
    if all(isinstance(key, str) for key in value):
        return dict(pairs)
    return {PAIRS: pairs}


def decode_keys(value: Any) -> Any:
    """Return the value that `encode_keys` was given, from its result after a way through JSON."""
    if isinstance(value, list):
        return [decode_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    items = value.items()
    if value.keys() == {PAIRS}:
        items = value[PAIRS]
    return {key: decode_keys(each) for key, each in items}


class StepNumbers(NamedTuple, Generic[Number]):
    """Numbers that each rank reports with the sums of a step, in the order in which they are sent.

    A rank sends a float for each field. What arrives is a list for each field, with one float for
    each rank.
    """

    # Number of the signal by which this rank was asked to stop; 0 for none.
    stop_signal: Number
    # `Saver.retry_after_step` of this rank.
    retry_after_step: Number
    # Seconds that the rank waited for data, and in communication (NaN if that is not measured).
    data_s: Number
    comm_s: Number
    memory_bytes: Number
    # Seconds of the step before.
    last_step_s: Number


class ArrivedNumbers(NamedTuple):
    """The numbers of a step that have reached the host."""

    total: dict[str, float]  # sums over all samples, by name
    by_rank: list[list[float]]  # for each number that ranks report: its value on each rank
    finished_at: float  # unix time


@dataclass
class PendingStep:
    """A step that was made, whose numbers may still be on their way to the host.

    A session sets only `gathered` and `step`; the other fields are for `Loop`. `host_finished_at`:
    unix time when the host had begun all work of the step; the device may still compute.
    """

    gathered: PendingSums
    step: int  # steps done, with this one
    denominator: float = 0.0  # of the loss; 0: the sum `weight` is the denominator
    position: int = 0
    # The samples of the global batch, without fillers.
    sample_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: int = 0
    lr: float = 0.0
    began: float = 0.0  # unix time, before waiting for the batch
    data_s: float = 0.0  # seconds that this rank waited for data
    sent_bytes: int | None = None
    timing: str | None = None  # the name under which `Measure` collects the step's seconds
    limit: float | None = None  # a larger loss is a spike
    is_logged: bool = False

    def __post_init__(self) -> None:
        self.host_finished_at = time.time()

    @cached_property
    def arrived(self) -> ArrivedNumbers:
        """The step's numbers. The first access waits until they are on the host."""
        if SQUARES in self.gathered.names:
            # With local updates the mean of the ranks' squared norms is reported.
            mean_square = self.gathered[SQUARES] / self.gathered.world_size
            self.gathered.fetch(mean_square.sqrt())
        total, by_rank = self.gathered.read()
        total.pop(SQUARES, None)
        finished_at = self.host_finished_at
        if self.gathered.arrived is not None:
            # On a GPU the host goes on before the step is over.
            finished_at = time.time()
        return ArrivedNumbers(total, by_rank, finished_at)

    @property
    def total(self) -> dict[str, float]:
        return self.arrived.total

    @property
    def stop_signals(self) -> list[float]:
        """The signal that asks each rank to stop, by rank; 0 for none."""
        return self.arrived.by_rank[0]

    @property
    def numbers(self) -> StepNumbers[list[float]]:
        """The numbers of all ranks, each by rank."""
        return StepNumbers(*self.arrived.by_rank[: len(StepNumbers._fields)])

    @property
    def device_values(self) -> list[list[float]]:
        """What `Meter.values` of each rank returned, each value by rank.

        It is empty if the step is not logged.
        """
        # The gradient norm comes last.
        return self.arrived.by_rank[len(StepNumbers._fields) : -1]

    @property
    def loss(self) -> float:
        return self.total["loss"] / (self.denominator or self.total["weight"] or 1.0)

    @property
    def grad_norm(self) -> float:
        return self.arrived.by_rank[-1][0]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def check_finite(
    pending: PendingStep,
    plan: Plan,
    state: TrainState,
    uses_loss_scale: bool,
    emit: Emit,
    where: str,
    fix: str,
) -> None:
    """Count and report a step whose loss or gradient norm is not finite.

    Such a step has left the weights as they were. An event names its samples. A step that is finite
    sets the count back to 0.

    Args:
        uses_loss_scale: The engine scales the loss (fp16). A norm that is not finite, beside a
            finite loss, then only means that the scale was too large, and the engine has halved it.
        where, fix: Of the error.

    Raises TrainingStopped if the policy (`health.on_nan`) is to stop, or after too many such steps
    in a row.
    """
    if pending.is_finite:
        state.skips = 0
        return
    health = plan.config.health
    policy: Literal["rescale", "stop", "skip"] = health.on_nan
    most_in_a_row = health.max_skips
    if uses_loss_scale and math.isfinite(pending.loss):
        policy = "rescale"
        most_in_a_row = MAX_RESCALES
    state.skips += 1
    event = Nonfinite(
        step=pending.step,
        policy=policy,
        loss=pending.loss,
        grad_norm=pending.grad_norm,
        sample_ids=pending.sample_ids.tolist(),
    )
    emit(event)
    if policy == "stop" or state.skips > most_in_a_row:
        what = f"loss {pending.loss:g}, gradient norm {pending.grad_norm:g} at step {pending.step}"
        if policy != "stop":
            what += f" ({state.skips} in a row)"
        raise TrainingStopped(what, where=where, fix=fix)


def rate_evaluation(
    metrics: dict[str, float], options: EvalConfig, state: TrainState
) -> tuple[float | None, bool]:
    """Return (eval.metric of an evaluation, whether it is the best so far), and update `state`.

    The metric is None if it belongs to a task that was not scored this time. At step 0 it is never
    the best, so that a run exports weights that it has trained. `state` gets the best metric, and
    what eval.patience counts.

    Raises ConfigError if there is no such metric.
    """
    name = options.metric
    metric = metrics.get(name)
    if metric is None:
        has_task_scores = any(each.startswith("tasks/") for each in metrics)
        if name.startswith("tasks/") and not has_task_scores:
            return None, False
        raise ConfigError(
            f"no metric {name!r}", where="eval.metric", fix=f"one of {', '.join(metrics)}"
        )
    if state.step == 0:
        return metric, False
    is_best = _is_better(metric, state.best, 0.0, options.mode)
    if is_best:
        state.best = metric
    if options.patience is not None:
        if _is_better(metric, state.mark, options.min_delta, options.mode):
            state.mark = metric
            state.stale = 0
        else:
            state.stale += 1
    return metric, is_best


def _is_better(metric: float, other: float | None, min_delta: float, mode: str) -> bool:
    """Whether a finite metric is better than another by more than `min_delta`.

    `mode`: min or max.
    """
    if not math.isfinite(metric):
        return False
    if other is None:
        return True
    if mode == "min":
        return metric < other - min_delta
    return metric > other + min_delta


def is_due(every: int | None, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return every is not None and now // every > before // every


def fallback_folder(config: Config, run_dir: str) -> Path | None:
    """Return the folder for the last checkpoint of a run whose own disk is full.

    It is a folder in `checkpoint.fallback_dir` that no other run uses; None without that key.
    """
    if config.checkpoint.fallback_dir is None:
        return None
    run = Path(run_dir).absolute()
    digest = hashlib.sha256(str(run).encode()).hexdigest()
    parent = expand_home(config.checkpoint.fallback_dir).absolute()
    return parent / f"{run.name}-{digest[:8]}"


class Goodput:
    """The seconds of this process, by what they were spent on.

    Time that no category claims counts as start-up until the first step, and as `other` after it.
    """

    CATEGORIES = ("productive", "recompute", "eval", "save", "restore", "startup")

    def __init__(self, started: float) -> None:
        """`started`: unix time."""
        self.started = started
        self.seconds = dict.fromkeys(self.CATEGORIES, 0.0)
        # Seconds of the parts of start-up, in order. The first part begins with the process, each
        # other one where the part before it ends.
        before_start = started - psutil.Process().create_time()
        self.parts = {"imports and plan": max(0.0, before_start)}
        self._part_began = started
        self._has_stepped = False
        self._has_reported_startup = False

    @contextmanager
    def spend(self, category: str) -> Iterator[None]:
        """Add the seconds of a `with` block to a category."""
        before = time.time()
        try:
            yield
        finally:
            self.seconds[category] += time.time() - before

    def end_part(self, name: str) -> None:
        """Give a name to the part of start-up that ends now."""
        now = time.time()
        self.parts[name] = now - self._part_began
        self._part_began = now

    def end_startup(self) -> None:
        """Count all time so far that no category has claimed as start-up.

        Called when a step begins; only the first call does something.
        """
        if self._has_stepped:
            return
        self._has_stepped = True
        claimed = sum(self.seconds.values())
        self.seconds["startup"] = time.time() - self.started - claimed

    def report_startup(self) -> dict[str, float] | None:
        """Return the seconds of each part of start-up, at the first call; None at later ones.

        Called after the first step, which is the last of the parts, because it compiles.
        """
        if self._has_reported_startup:
            return None
        self._has_reported_startup = True
        self.end_part("first step")
        return {name: round(seconds, 3) for name, seconds in self.parts.items()}

    def report(self) -> dict[str, float]:
        """Return seconds by category, with `elapsed` for all and `other` for the unclaimed rest."""
        elapsed = time.time() - self.started
        other = max(0.0, elapsed - sum(self.seconds.values()))
        seconds = {"elapsed": elapsed, **self.seconds, "other": other}
        return {name: round(value, 3) for name, value in seconds.items()}

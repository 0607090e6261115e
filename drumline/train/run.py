"""`drumline.train(…)` from Python: the same plan, launcher and ranks as the command line has, and what is left of a run to look at."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.load import Overrides, Request, overrides_of
from drumline.core.out_of_memory import memory_errors
from drumline.core.output import lossy
from drumline.errors import ConfigError, Preempted, TrainingStopped, UserError, WorkerFailed
from drumline.launchers.environment import die_with_launchers, expandable_segments, launched_by
from drumline.launchers.tasks import join_tasks
from drumline.telemetry.events import Eval, Event, Step, read

# Ends that leave weights to go on with.
RETURNED = (
    0,
    TrainingStopped.exit_code,
    Preempted.exit_code,
)


@dataclass(frozen=True)
class Run:
    """A run, read anew at each access. `exit_code`: 0 finished; 3 stopped by a policy of the config; 75 saved after a stop signal."""

    dir: Path
    exit_code: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """Each event of the run so far, in order, in a list that is read anew at each call, as `drumline.telemetry.events` has them."""
        return [event.values() for event in self._read()]

    @property
    def metrics(self) -> dict[str, float]:
        """The last number of each name: of steps as `loss`, of evaluations as `eval/loss`."""
        found: dict[str, float] = {}
        for event in self._read():
            if isinstance(event, Step | Eval):
                prefix = "eval/" if isinstance(event, Eval) else ""
                numbers = {
                    key: value
                    for key, value in event.values().items()
                    if isinstance(value, int | float) and key != "t"
                }
                found |= {f"{prefix}{key}": float(value) for key, value in numbers.items()}
        return found

    def _read(self) -> list[Event]:
        return read(self.dir / "events.jsonl")

    @property
    def best(self) -> Path | None:
        """The best checkpoint by `eval.metric`, else the newest one; None where nothing was saved."""
        from drumline.checkpoint.load import best_or_latest

        return best_or_latest(self.dir / "checkpoints")

    @property
    def export(self) -> Path | None:
        """The Hugging Face folder that the run has written; None where it wrote none."""
        folder = self.dir / "export"
        return folder if folder.is_dir() else None


@lossy()
@memory_errors()
def train(
    config: str | Path | Mapping[str, Any],
    overrides: Overrides | None = None,
    *,
    resume: bool | str | Path = False,
    allow: Sequence[str] = (),
    callbacks: Sequence[str] = (),
    trust_remote_code: bool = False,
    display: bool = False,
) -> Run:
    """Plan, launch and train as `drumline train` does, and return when the run has ended.

    `config`: the path of a YAML, or its keys as a dictionary, in which paths are relative to the current folder. `overrides`: dotted key
    → value, or `key=value` as on the command line. `resume`: True, or a checkpoint or run folder; `allow`: keys that may differ then.
    `callbacks`: `run.callbacks`, classes as `mine.py:MyCallback`.
    `display`: show what the command line shows. Under torchrun, srun and mpirun this process joins as a rank.

    Raises the exceptions of `drumline.errors`: UserError and its kinds for a mistake, WorkerFailed for ranks that failed, NotSaved for
    weights that no disk took. A run that a policy or a signal has stopped comes back, with its `exit_code`.
    """
    from drumline.train.command import launch_ranks, requested

    join_tasks()
    expandable_segments()
    changes = overrides_of(overrides)
    if callbacks:
        if any(not isinstance(path, str) for path in callbacks):
            fix = "name the class by path: callbacks=['mine.py:MyCallback']"
            raise ConfigError(
                "ranks are other processes, and get no objects of this one",
                where="callbacks",
                fix=fix,
            )
        changes += overrides_of({"run.callbacks": [*callbacks]})
    changes += ["model.trust_remote_code=true"] * trust_remote_code
    place = None if resume is False else "newest" if resume is True else os.fspath(resume)
    request = requested(config, changes, place, tuple(allow))
    if launched_by() is not None:
        return _join(request, display)
    stderr = ErrorLine(display)
    with redirect_stderr(stderr):
        run_dir, code = launch_ranks(request(), display)
    if code in RETURNED:
        return Run(run_dir, code)
    raise (UserError if code == UserError.exit_code else WorkerFailed)(
        stderr.error or f"{run_dir}: the ranks ended with code {code}"
    )


def _join(request: Callable[..., Request], display: bool) -> Run:
    """Train as one rank of a launcher that is not ours."""
    from drumline.train.launched import join, train_rank

    die_with_launchers()
    with ExitStack() as stack:
        plan, start = join(request, stack, display)
        try:
            train_rank(plan, start, display)
        except (TrainingStopped, Preempted) as stopped:
            return Run(Path(plan.run_dir), stopped.exit_code)
    return Run(Path(plan.run_dir))


class ErrorLine(io.TextIOBase):
    """Standard error while ranks run: shown where there is a display; the line of an error is kept."""

    def __init__(self, display: bool) -> None:
        self.shown, self.error = sys.stderr if display else None, ""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith("error: "):
                self.error = line.removeprefix("error: ")
            elif line.startswith("note: ") and self.shown is None:
                print(line, file=sys.__stderr__)
        return self.shown.write(text) if self.shown else len(text)

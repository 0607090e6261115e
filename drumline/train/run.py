"""`drumline.train(…)` from Python: plan, launch and train as the command line does, and return a `Run`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config.load import Overrides, Request, overrides_of
from drumline.config.resume import Resume
from drumline.errors import ConfigError, Preempted, TrainingStopped, UserError, WorkerFailed
from drumline.launch.environment import die_with_launchers, launched_by, use_expandable_segments
from drumline.launch.tasks import join_tasks
from drumline.plan.out_of_memory import memory_errors
from drumline.system.output import lossy
from drumline.telemetry.events import Eval, Event, Step, read

# Exit codes of runs that leave weights to go on with. For these `train` raises no error.
RETURNED = (0, TrainingStopped.exit_code, Preempted.exit_code)


@dataclass(frozen=True)
class Run:
    """A run. Each access to a property reads the run folder again.

    `exit_code`: 0: finished; 3: stopped by a policy of the config; 75: saved after a stop signal.
    """

    dir: Path
    exit_code: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of the run so far, in order, with the fields that `drumline.telemetry.events` lists."""
        return [event.values() for event in self._read()]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric: of steps under its name, of evaluations as `eval/NAME`."""
        metrics: dict[str, float] = {}
        for event in self._read():
            if not isinstance(event, Step | Eval):
                continue
            prefix = "eval/" if isinstance(event, Eval) else ""
            for name, value in event.values().items():
                # "t" is the time of the event.
                if isinstance(value, int | float) and name != "t":
                    metrics[f"{prefix}{name}"] = float(value)
        return metrics

    def _read(self) -> list[Event]:
        return read(self.dir / "events.jsonl")

    @property
    def best(self) -> Path | None:
        """The best checkpoint by `eval.metric`, or the newest one; None if nothing was saved."""
        from drumline.checkpoint.load import best_or_latest

        return best_or_latest(self.dir / "checkpoints")

    @property
    def export(self) -> Path | None:
        """The Hugging Face folder that the run has written; None if it wrote none."""
        folder = self.dir / "export"
        return folder if folder.is_dir() else None


@lossy()  # a closed terminal or pipe loses what is printed, and does not end the run
@memory_errors()  # memory that runs out in this process is an EnvironmentFault
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

    Under torchrun, srun and mpirun this process joins as a rank. A run that a policy or a signal
    has stopped is returned, with its `exit_code`.

    Args:
        config: The path of a YAML, or its keys as a dictionary, in which paths are relative to the current folder.
        overrides: Dotted key → value, or `key=value` as on the command line.
        resume: True, or a checkpoint or run folder.
        allow: Keys that may differ on a resume.
        callbacks: `run.callbacks`, classes as `mine.py:MyCallback`.
        display: Show what the command line shows.

    Raises the exceptions of `drumline.errors`: UserError and its kinds for a mistake, WorkerFailed
    for ranks that failed, NotSaved for weights that no disk took.
    """
    from drumline.train.command import launch_ranks, request_maker

    join_tasks()
    use_expandable_segments()
    changes = overrides_of(overrides)
    if callbacks:
        if any(not isinstance(path, str) for path in callbacks):
            raise ConfigError(
                "ranks are other processes, and get no objects of this one",
                where="callbacks",
                fix="name the class by path: callbacks=['mine.py:MyCallback']",
            )
        changes += overrides_of({"run.callbacks": list(callbacks)})
    if trust_remote_code:
        changes.append("model.trust_remote_code=true")
    make_request = request_maker(config, changes, Resume.from_argument(resume), tuple(allow))
    if launched_by() is not None:
        return _join(make_request, display)
    stderr = ErrorLine(display)
    with redirect_stderr(stderr):
        run_dir, code = launch_ranks(make_request(), display)
    if code in RETURNED:
        return Run(run_dir, code)
    message = stderr.error or f"{run_dir}: the ranks ended with code {code}"
    if code == UserError.exit_code:
        raise UserError(message)
    raise WorkerFailed(message)


def _join(make_request: Callable[..., Request], display: bool) -> Run:
    """Train as one rank of a launcher that is not ours."""
    from drumline.train.launched import join, train_rank

    die_with_launchers()
    with ExitStack() as stack:
        plan, resume = join(make_request, stack, display)
        try:
            train_rank(plan, resume, display)
        except (TrainingStopped, Preempted) as stopped:
            return Run(Path(plan.run_dir), stopped.exit_code)
    return Run(Path(plan.run_dir))


class ErrorLine(io.TextIOBase):
    """Replaces standard error while ranks run, and keeps the line of an error in `error`.

    With `display` all lines are shown, without it only notes.
    """

    def __init__(self, display: bool) -> None:
        self.shown = sys.stderr if display else None
        self.error = ""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith("error: "):
                self.error = line.removeprefix("error: ")
            elif line.startswith("note: ") and self.shown is None:
                print(line, file=sys.__stderr__)
        if self.shown is None:
            return len(text)
        return self.shown.write(text)

"""Trackers that repeat the run's metrics and samples: TensorBoard, W&B, MLflow, trackio, SwanLab, each through its own library.
events.jsonl stays the truth.
And callbacks of the user's own, `run.callbacks`: classes whose methods get the events of a run, and cannot change a number of it.

A run that is started again goes on in the same run of each tracker: RUN/trackers.json remembers which.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drumline.core.files import write_whole
from drumline.core.output import say
from drumline.core.redact import plain, redact
from drumline.core.registry import find_function, find_object
from drumline.core.run import TrackerConfig
from drumline.errors import ConfigError, EnvironmentFault
from drumline.foreign import class_and_line, first_line
from drumline.telemetry.events import Eval, Event, Restore, Rollout, Save, Step
from drumline.telemetry.watched import Devices, Samples

# Events that have metrics → the group that they are shown in.
GROUPS: dict[type[Event], str] = {
    Step: "train",
    Eval: "eval",
    Save: "save",
    Rollout: "rollout",
    Devices: "device",
}
# run.report_to → its library, how to install it, and what to check when it does not start.
LIBRARIES = {
    "tensorboard": (
        "tensorboard",
        "pip install tensorboard",
        "see whether RUN/tensorboard can be written",
    ),
    "wandb": ("wandb", "pip install wandb", "run `wandb login`, set WANDB_MODE=offline"),
    "mlflow": (
        "mlflow",
        "pip install mlflow-skinny sqlalchemy alembic",
        "see where MLFLOW_TRACKING_URI points",
    ),
    "trackio": ("trackio", "pip install trackio", "see whether TRACKIO_DIR can be written"),
    "swanlab": ("swanlab", "pip install swanlab", "run `swanlab login`, set SWANLAB_MODE=offline"),
}
# Kind of event → the method that gets it as a dictionary, as it is in events.jsonl.
HOOKS = {
    "run_start": "on_start",
    "step": "on_step",
    "eval": "on_eval",
    "save": "on_save",
    "run_end": "on_end",
}
MOST_RANKS = 8  # with a chart of their own
MEMORY = "trackers.json"
SHOWN = ("set", "prompt", "text", "answer")  # columns of a table of samples


@dataclass(frozen=True)
class Run:
    """What a tracker gets to know of the run. `known`: the tracker's own id of the run, where it was begun by an earlier process."""

    folder: Path
    name: str
    config: dict[str, Any]
    known: str | None
    options: TrackerConfig = field(default_factory=TrackerConfig)

    def project(self, variable: str) -> str:
        """`run.tracker.project`, else what a variable of the tracker's own says."""
        return self.options.project or os.environ.get(variable) or "drumline"


@dataclass(frozen=True)
class Tracker:
    """A tracker's run: its id, how to write metrics (GROUP/NAME → number) of one group at a step, go back to a step, and end; and how to
    show samples (see `watched.Samples`) of a step."""

    id: str
    write: Callable[[str, dict[str, float], int], None]
    close: Callable[[], object]
    rewind: Callable[[int], None] = lambda step: None
    show: Callable[[list[dict[str, Any]], int], object] = lambda samples, step: None


class Sink:
    """One tracker. A tracker that fails during the run is reported once and not used again; training goes on."""

    def __init__(self, name: str, tracker: Tracker | None) -> None:
        self.name, self._tracker = name, tracker

    def event(self, event: Event) -> None:
        """Hand over the metrics of an event of GROUPS, under its group, and samples; go back where a checkpoint is loaded."""
        if isinstance(event, Restore):
            self._guard(lambda tracker: tracker.rewind(event.step))
        elif isinstance(event, Samples):
            self._guard(lambda tracker: tracker.show(event.samples, event.step))
        elif isinstance(event, Step | Eval | Save | Rollout | Devices):
            group = GROUPS[type(event)]
            named = {f"{group}/{key}": value for key, value in metrics(event).items()}
            self._guard(lambda tracker: tracker.write(group, named, event.step))

    def close(self) -> None:
        self._guard(lambda tracker: tracker.close())

    def _guard(self, action: Callable[[Tracker], object]) -> None:
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything, and none of it is worth the run
            self._tracker = None
            _warn(self.name, error)


def metrics(event: Event) -> dict[str, float]:
    """The numbers of an event, `t` and `step` left out; the least and the most of the experts' loads; and the memory of the
    ranks, each of a few, or the least and the most."""
    values = event.values()
    numbers = {
        k: float(v)
        for k, v in values.items()
        if isinstance(v, int | float) and not isinstance(v, bool) and k not in ("t", "step")
    }
    if loads := values.get("expert_load"):
        numbers |= {"expert_load/least": float(min(loads)), "expert_load/most": float(max(loads))}
    by_rank: dict[str, dict[int, float]] = {
        "memory_bytes": dict(enumerate(map(float, values.get("memory_bytes") or [])))
    }
    for rank, found in enumerate(values.get("ranks") or []):
        for name, value in found.items():
            if isinstance(value, int | float):
                by_rank.setdefault(name, {})[rank] = float(value)
    for name, ranks in by_rank.items():
        if len(ranks) <= MOST_RANKS:
            numbers |= {f"{name}/rank_{rank}": value for rank, value in ranks.items()}
        else:
            numbers |= {f"{name}/least": min(ranks.values()), f"{name}/most": max(ranks.values())}
    return numbers


def check_installed(report_to: Sequence[str], base_dir: Path = Path()) -> None:
    """Raises EnvironmentFault for a tracker whose library is not there, ConfigError for one of your own that cannot be imported."""
    for name in report_to:
        if name not in LIBRARIES:
            maker_of(name, base_dir)
            continue
        module, command, _ = LIBRARIES[name]
        if find_spec(module) is None:
            raise EnvironmentFault(
                f"{name} is not installed",
                where="run.report_to",
                fix=f"{command}, or take it out of the list",
            )


def maker_of(name: str, base_dir: Path) -> Callable[[Run], Tracker]:
    """What opens a tracker: of this module, of an installed package, or `file.py:function` of your own. Raises ConfigError."""
    own = {
        "tensorboard": _tensorboard,
        "wandb": _wandb,
        "mlflow": _mlflow,
        "trackio": _trackio,
        "swanlab": _swanlab,
    }
    if name in own:
        return own[name]
    return find_function(
        name,
        "trackers",
        base_dir,
        "run.report_to",
        "the tracker",
        "install it, or take it out of the list",
    )


def open_sinks(
    report_to: Sequence[str],
    run_dir: Path,
    config: dict[str, Any],
    name: str,
    base_dir: Path = Path(),
    options: TrackerConfig | None = None,
) -> list[Sink]:
    """The trackers of `run.report_to`; rank 0 alone opens them. `config` is shown there, redacted. `name`: where `options` has none.

    Raises EnvironmentFault for a library that is not installed, and, at the first start of a run, for a tracker that does not
    start. A run that has begun goes on without a tracker that cannot be reached.
    """
    check_installed(report_to, base_dir)
    try:  # the trackers' ids of this run, from an earlier process
        known = {str(k): str(v) for k, v in json.loads((run_dir / MEMORY).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        known = {}
    sinks, options = [], options or TrackerConfig()
    for kind in report_to:
        run = Run(run_dir, options.name or name, plain(config), known.get(kind), options)
        try:
            tracker = maker_of(kind, base_dir)(run)
            if not isinstance(tracker, Tracker):
                raise TypeError(f"it gives {type(tracker).__name__}, a Tracker is wanted")
        except Exception as error:
            if run.known is None:
                hint = LIBRARIES[kind][2] if kind in LIBRARIES else "look at its code"
                fix = f"{hint}, or take {kind} out of the list"
                raise EnvironmentFault(
                    f"{kind} does not start: {_line(error)}", where="run.report_to", fix=fix
                ) from error
            _warn(kind, error)
            tracker = None
        if tracker is not None:
            known[kind] = str(tracker.id)
        sinks.append(Sink(kind, tracker))
    if sinks:
        write_whole(run_dir / MEMORY, json.dumps(known))
    return sinks


def _warn(name: str, error: Exception) -> None:
    say(f"warning: {name} gets no more metrics, the run goes on: {_line(error)}")


def _line(error: BaseException) -> str:
    return redact(f"{class_and_line(error)}: {' '.join(str(error).split())[:200]}")


def find_callbacks(paths: Sequence[str], base_dir: Path) -> list[Any]:
    """An instance of each class. Raises ConfigError for what is no class with one of the methods, or cannot be made."""
    made = []
    for path in paths:
        cls = find_object(path, base_dir, "run.callbacks")
        if not isinstance(cls, type) or not any(hasattr(cls, name) for name in HOOKS.values()):
            fix = f"write a class with one of {', '.join(HOOKS.values())}"
            raise ConfigError(f"{path} is no callback", where="run.callbacks", fix=fix)
        try:
            made.append(cls())
        except Exception as error:
            raise ConfigError(
                f"{path}() raised {class_and_line(error)}: {first_line(error)}",
                where="run.callbacks",
            ) from error
    return made


class Callbacks:
    """The callbacks of one rank: all on rank 0, elsewhere those whose class has `every_rank = True`. One that raises is reported once
    and not called again; the run goes on."""

    def __init__(self, paths: Sequence[str], base_dir: Path, rank: int) -> None:
        found = zip(paths, find_callbacks(paths, base_dir), strict=True)
        self.rank = rank
        self.called = {
            path: callback
            for path, callback in found
            if rank == 0 or getattr(callback, "every_rank", False)
        }

    def event(self, event: Event) -> None:
        hook = HOOKS.get(event.kind)
        if hook is None:
            return
        for path, callback in [*self.called.items()]:
            try:
                getattr(callback, hook, lambda values: None)(plain(event.values()))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own code may raise anything, none of it worth the run
                del self.called[path]
                say(
                    f"warning: callback {path}.{hook} raised {_line(error)}; it is not called again, the run goes on"
                )


# -------------------------------------------------------------------------------------------------------- the libraries


def _tensorboard(run: Run) -> Tracker:
    """Event files in RUN/tensorboard. Metrics of steps that are done again are marked as void (purge_step)."""
    folder = str(run.folder / "tensorboard")
    make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    writer = make(folder)
    if about := {key: value for key, value in run.options.model_dump().items() if value}:
        writer.add_text("run", _indented(json.dumps(about, indent=2, ensure_ascii=False)))

    def write(group: str, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(samples: list[dict[str, Any]], step: int) -> None:
        for number, sample in enumerate(samples):
            writer.add_text(
                f"samples/{number}", _indented(f"{sample['prompt']}\n\n{sample['text']}"), step
            )
        writer.flush()

    def rewind(step: int) -> None:
        nonlocal writer
        writer.close()
        writer = make(folder, purge_step=step + 1)

    return Tracker(folder, write, lambda: writer.close(), rewind, show)


def _indented(text: str) -> str:
    """As TensorBoard's Markdown shows it letter by letter."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _wandb(run: Run) -> Tracker:
    """W&B; offline or online as WANDB_MODE says. Each group has its own step: a save is reported after later steps have been."""
    wandb, own = importlib.import_module("wandb"), run.options
    about: dict[str, Any] = {
        "project": run.project("WANDB_PROJECT"),
        "group": own.group,
        "tags": own.tags or None,
        "notes": own.notes,
    }
    began = wandb.init(
        name=run.name, dir=str(run.folder), config=run.config, id=run.known, resume="allow", **about
    )
    for group in (*GROUPS.values(), "samples"):
        began.define_metric(f"{group}/step", hidden=True)
        began.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def show(samples: list[dict[str, Any]], step: int) -> None:
        table = wandb.Table(
            columns=["step", *SHOWN],
            data=[[step, *(sample[name] for name in SHOWN)] for sample in samples],
        )
        began.log({"samples/step": step, "samples/answers": table})

    return Tracker(
        str(began.id),
        lambda group, numbers, step: began.log({f"{group}/step": step, **numbers}),
        began.finish,
        show=show,
    )


def _mlflow(run: Run) -> Tracker:
    """MLflow, wherever MLFLOW_TRACKING_URI points; mlflow.db in the current folder where it does not. Samples are files of the run."""
    mlflow, own = importlib.import_module("mlflow"), run.options
    if run.known is None:
        mlflow.set_experiment(run.project("MLFLOW_EXPERIMENT_NAME"))
    began = mlflow.start_run(run_id=run.known) if run.known else mlflow.start_run(run_name=run.name)
    about = {"group": own.group, "tags": ", ".join(own.tags), "mlflow.note.content": own.notes}
    mlflow.set_tags({key: value for key, value in about.items() if value})
    mlflow.log_dict(run.config, "config.json")
    return Tracker(
        str(began.info.run_id),
        lambda _, numbers, step: mlflow.log_metrics(
            {_mlflow_name(name): value for name, value in numbers.items()}, step=step
        ),
        mlflow.end_run,
        show=lambda samples, step: mlflow.log_dict(
            {"samples": samples}, f"samples/step-{step:08}.json"
        ),
    )


def _mlflow_name(name: str) -> str:
    """MLflow refuses a whole step for one name with other letters, or that is no plain path."""
    parts = (re.sub(r"[^\w. -]", "_", part) for part in name.split("/"))
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _trackio(run: Run) -> Tracker:
    """trackio's local store (or a Space, where its own variables name one)."""
    trackio, own = importlib.import_module("trackio"), run.options
    about: dict[str, Any] = {"group": own.group, "resume": "must" if run.known else "never"}
    config = run.config | {
        key: value for key, value in (("tags", list(own.tags)), ("notes", own.notes)) if value
    }
    began = trackio.init(
        project=own.project or "drumline", name=run.known or run.name, config=config, **about
    )

    def show(samples: list[dict[str, Any]], step: int) -> None:
        table = importlib.import_module("pandas").DataFrame(
            [{name: sample[name] for name in SHOWN} for sample in samples]
        )
        trackio.log({"samples": trackio.Table(dataframe=table)}, step=step)

    # Where the store has a run of that name, trackio makes up another one.
    return Tracker(
        str(began.name),
        lambda _, numbers, step: trackio.log(numbers, step=step),
        trackio.finish,
        show=show,
    )


def _swanlab(run: Run) -> Tracker:
    """SwanLab; offline, local or online as SWANLAB_MODE says. What is written offline is in RUN/swanlab, a folder for each start, and
    `swanlab sync` puts those of one id together (experimental: uploads have not been tried)."""
    swanlab, own = importlib.import_module("swanlab"), run.options
    about: dict[str, Any] = {
        "group": own.group,
        "tags": list(own.tags) or None,
        "description": own.notes,
    }
    about |= {"id": run.known, "resume": "allow"} if run.known else {}
    folder, project = str(run.folder / "swanlab"), run.project("SWANLAB_PROJ_NAME")
    began = swanlab.init(project=project, name=run.name, log_dir=folder, config=run.config, **about)

    def show(samples: list[dict[str, Any]], step: int) -> None:
        swanlab.log(
            {
                "samples": [
                    swanlab.Text(sample["text"], caption=sample["prompt"]) for sample in samples
                ]
            },
            step=step,
        )

    return Tracker(
        str(began.id),
        lambda _, numbers, step: swanlab.log(numbers, step=step),
        swanlab.finish,
        show=show,
    )

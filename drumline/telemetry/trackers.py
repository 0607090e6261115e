"""Trackers and callbacks, which get the events of a run.

A tracker shows the run's metrics and samples: TensorBoard, W&B, MLflow, trackio or SwanLab, each
through its own library. events.jsonl stays the source of truth. A run that is started again goes on
in the same run of each tracker: RUN/trackers.json has their ids.

Callbacks are classes of the user's own (`run.callbacks`), whose methods get the events of a run.
They cannot change a number of it.
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
from typing import Any, NamedTuple

from drumline.config.registry import find_function, find_object
from drumline.config.run import TrackerConfig
from drumline.errors import ConfigError, EnvironmentFault
from drumline.foreign import class_and_line, first_line
from drumline.system.files import write_whole
from drumline.system.output import say
from drumline.system.redact import redact, redacted_json
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


class Library(NamedTuple):
    """The library of a tracker."""

    # Its name in Python.
    module: str
    # The command that installs it.
    install: str
    # What to check if the tracker does not start.
    hint: str


# run.report_to → library. Names that are not here are trackers of the user's own, see `maker_of`.
LIBRARIES = {
    "tensorboard": Library(
        "tensorboard",
        "pip install tensorboard",
        "see whether RUN/tensorboard can be written",
    ),
    "wandb": Library("wandb", "pip install wandb", "run `wandb login`, set WANDB_MODE=offline"),
    "mlflow": Library(
        "mlflow",
        "pip install mlflow-skinny sqlalchemy alembic",
        "see where MLFLOW_TRACKING_URI points",
    ),
    "trackio": Library("trackio", "pip install trackio", "see whether TRACKIO_DIR can be written"),
    "swanlab": Library(
        "swanlab", "pip install swanlab", "run `swanlab login`, set SWANLAB_MODE=offline"
    ),
}
# Kind of event → the method that gets it as a dictionary, as it is in events.jsonl.
HOOKS = {
    "run_start": "on_start",
    "step": "on_step",
    "eval": "on_eval",
    "save": "on_save",
    "run_end": "on_end",
}
# Ranks that each have a chart of their own, at most.
MOST_RANKS = 8
# The file of a run folder with the id that each tracker gave the run.
IDS_FILE = "trackers.json"
# Columns of a table of samples.
SHOWN = ("set", "prompt", "text", "answer")


@dataclass(frozen=True)
class Run:
    """What a tracker gets to know of a run when it opens it."""

    folder: Path
    name: str
    # What a tracker shows of the config, redacted.
    config: dict[str, Any]
    # The tracker's own id of the run, if an earlier process has opened it; else None.
    known: str | None
    # `run.tracker` of the config.
    options: TrackerConfig = field(default_factory=TrackerConfig)

    def project(self, variable: str) -> str:
        """Return the project to show the run in.

        It is `run.tracker.project`, else the value of the tracker's own environment variable, else
        `drumline`.
        """
        return self.options.project or os.environ.get(variable) or "drumline"


@dataclass(frozen=True)
class Tracker:
    """A run that is open in a tracker, as the functions that write to it."""

    # The tracker's own id of the run, by which a later process finds it again.
    id: str
    # Write metrics of one group at a step: group, GROUP/NAME → number, step.
    write: Callable[[str, dict[str, float], int], None]
    # End the run.
    close: Callable[[], object]
    # Go back to a step, since the steps after it are done again.
    rewind: Callable[[int], None] = lambda step: None
    # Show samples (see `watched.Samples`) of a step.
    show: Callable[[list[dict[str, Any]], int], object] = lambda samples, step: None


class Sink:
    """Passes events on to one tracker.

    A tracker that fails during the run is reported once and not used again; training goes on.
    """

    def __init__(self, name: str, tracker: Tracker | None) -> None:
        self.name = name
        self._tracker = tracker

    def event(self, event: Event) -> None:
        """Pass the metrics or samples of an event on to the tracker.

        Metrics are those of the events of GROUPS, each under its group. When a checkpoint is
        loaded, the tracker goes back to its step.
        """
        if isinstance(event, Restore):
            self._guard(lambda tracker: tracker.rewind(event.step))
        elif isinstance(event, Samples):
            self._guard(lambda tracker: tracker.show(event.samples, event.step))
        elif isinstance(event, Step | Eval | Save | Rollout | Devices):
            group = GROUPS[type(event)]
            numbers = {}
            for key, value in metrics(event).items():
                numbers[f"{group}/{key}"] = value
            self._guard(lambda tracker: tracker.write(group, numbers, event.step))

    def close(self) -> None:
        """End the tracker's run."""
        self._guard(lambda tracker: tracker.close())

    def _guard(self, action: Callable[[Tracker], object]) -> None:
        """Call `action` with the tracker, unless it has failed before."""
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything, and none of it is worth the run
            self._tracker = None
            _warn(self.name, error)


def metrics(event: Event) -> dict[str, float]:
    """Return the numbers of an event without `t` and `step`, as name → number.

    Of the experts' loads it has the least and the most, and the fullest expert of each layer. Of the
    ranks' memory and devices it has each of a few ranks, or the least and the most.
    """
    values = event.values()
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if _is_number(value) and name not in ("t", "step"):
            numbers[name] = float(value)
    loads = values.get("expert_load")
    if loads:
        numbers["expert_load/least"] = float(min(loads))
        numbers["expert_load/most"] = float(max(loads))
    for layer, ratio in enumerate(values.get("expert_load_max_by_layer") or []):
        numbers[f"expert_load_max/layer_{layer}"] = float(ratio)
    for name, of_ranks in _numbers_by_rank(values).items():
        if len(of_ranks) <= MOST_RANKS:
            for rank, number in of_ranks.items():
                numbers[f"{name}/rank_{rank}"] = number
        else:
            numbers[f"{name}/least"] = min(of_ranks.values())
            numbers[f"{name}/most"] = max(of_ranks.values())
    return numbers


def _is_number(value: Any) -> bool:
    """Return whether a value is a number; Python's True is an int, but none here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers_by_rank(values: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return name → rank → number, of the values of an event that ranks have each."""
    memory: dict[int, float] = {}
    for rank, bytes_ in enumerate(values.get("memory_bytes") or []):
        memory[rank] = float(bytes_)
    by_rank = {"memory_bytes": memory}
    # The devices of an event have their numbers by name, each rank its own.
    for rank, device in enumerate(values.get("ranks") or []):
        for name, value in device.items():
            if isinstance(value, int | float):
                numbers = by_rank.setdefault(name, {})
                numbers[rank] = float(value)
    return by_rank


def check_installed(report_to: Sequence[str], base_dir: Path = Path()) -> None:
    """Check that the trackers of `run.report_to` can be opened.

    Raises EnvironmentFault for a tracker whose library is not installed, and ConfigError for one of
    the user's own that cannot be imported.
    """
    for name in report_to:
        if name not in LIBRARIES:
            maker_of(name, base_dir)
            continue
        library = LIBRARIES[name]
        if find_spec(library.module) is None:
            what = f"{name} is not installed"
            fix = f"{library.install}, or take it out of the list"
            raise EnvironmentFault(what, where="run.report_to", fix=fix)


def maker_of(name: str, base_dir: Path) -> Callable[[Run], Tracker]:
    """Return the function that opens a tracker.

    `name`: one of LIBRARIES, of an installed package, or `file.py:function` of the user's own.
    Raises ConfigError if there is no such function.
    """
    built_in = {
        "tensorboard": _tensorboard,
        "wandb": _wandb,
        "mlflow": _mlflow,
        "trackio": _trackio,
        "swanlab": _swanlab,
    }
    if name in built_in:
        return built_in[name]
    fix = "install it, or take it out of the list"
    return find_function(name, "trackers", base_dir, "run.report_to", "the tracker", fix)


def open_sinks(
    report_to: Sequence[str],
    run_dir: Path,
    config: dict[str, Any],
    name: str,
    base_dir: Path = Path(),
    options: TrackerConfig | None = None,
) -> list[Sink]:
    """Open the trackers of `run.report_to`; only rank 0 opens them.

    Raises EnvironmentFault for a library that is not installed, and, at the first start of a run,
    for a tracker that does not start. A run that has begun goes on without a tracker that cannot be
    reached.

    Args:
        report_to: The names of trackers, see `maker_of`.
        run_dir: The folder of the run.
        config: What the trackers show, which is redacted first.
        name: Of the run, if `options` has none.
        base_dir: The folder that paths of the user's own trackers are relative to.
        options: `run.tracker` of the config.
    """
    check_installed(report_to, base_dir)
    if options is None:
        options = TrackerConfig()
    ids = _known_ids(run_dir)
    sinks = []
    for kind in report_to:
        run = Run(run_dir, options.name or name, redacted_json(config), ids.get(kind), options)
        tracker = _open_tracker(kind, run, base_dir)
        if tracker is not None:
            ids[kind] = str(tracker.id)
        sinks.append(Sink(kind, tracker))
    if sinks:
        write_whole(run_dir / IDS_FILE, json.dumps(ids))
    return sinks


def _known_ids(run_dir: Path) -> dict[str, str]:
    """Return tracker → its id of this run, from an earlier process; {} if there is none."""
    path = run_dir / IDS_FILE
    # ValueError: it is no JSON. AttributeError: it is no object.
    try:
        ids = json.loads(path.read_text())
        return {str(kind): str(run_id) for kind, run_id in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _open_tracker(kind: str, run: Run, base_dir: Path) -> Tracker | None:
    """Open a tracker; None, after a warning, if it fails in a run that an earlier process has begun."""
    try:
        open_run = maker_of(kind, base_dir)
        tracker = open_run(run)
        if not isinstance(tracker, Tracker):
            raise TypeError(f"it gives {type(tracker).__name__}, a Tracker is wanted")
    # A tracker's library may raise anything.
    except Exception as error:
        if run.known is not None:
            # A run that has begun goes on without it.
            _warn(kind, error)
            return None
        hint = LIBRARIES[kind].hint if kind in LIBRARIES else "look at its code"
        what = f"{kind} does not start: {_line(error)}"
        fix = f"{hint}, or take {kind} out of the list"
        raise EnvironmentFault(what, where="run.report_to", fix=fix) from error
    return tracker


def _warn(name: str, error: Exception) -> None:
    """Say that a tracker has failed and is not used again."""
    say(f"warning: {name} gets no more metrics, the run goes on: {_line(error)}")


def _line(error: BaseException) -> str:
    """Return an error on one line without secrets, 200 characters of its message at most."""
    message = " ".join(str(error).split())
    return redact(f"{class_and_line(error)}: {message[:200]}")


def find_callbacks(paths: Sequence[str], base_dir: Path) -> list[Any]:
    """Return an instance of each class of `run.callbacks`.

    Raises ConfigError for a path that leads to no class with one of the methods of HOOKS, or whose
    class cannot be made without arguments.
    """
    methods = HOOKS.values()
    callbacks = []
    for path in paths:
        cls = find_object(path, base_dir, "run.callbacks")
        is_callback = isinstance(cls, type) and any(hasattr(cls, name) for name in methods)
        if not is_callback:
            listed = ", ".join(methods)
            fix = f"write a class with one of {listed}"
            raise ConfigError(f"{path} is no callback", where="run.callbacks", fix=fix)
        try:
            callbacks.append(cls())
        except Exception as error:
            what = f"{path}() raised {class_and_line(error)}: {first_line(error)}"
            raise ConfigError(what, where="run.callbacks") from error
    return callbacks


class Callbacks:
    """The callbacks of one rank: all on rank 0, elsewhere those of classes with `every_rank = True`.

    A callback that raises is reported once and not called again; the run goes on.
    """

    def __init__(self, paths: Sequence[str], base_dir: Path, rank: int) -> None:
        self.rank = rank
        # By path. A callback that raises is taken out.
        self.called: dict[str, Any] = {}
        callbacks = find_callbacks(paths, base_dir)
        for path, callback in zip(paths, callbacks, strict=True):
            runs_here = rank == 0 or getattr(callback, "every_rank", False)
            if runs_here:
                self.called[path] = callback

    def event(self, event: Event) -> None:
        """Call the method for this kind of event, of each callback that has one."""
        hook = HOOKS.get(event.kind)
        if hook is None:
            return
        # A copy of the list, since a callback that raises is taken out of it.
        for path, callback in list(self.called.items()):
            try:
                method = getattr(callback, hook, _ignore)
                # A copy for each, so that no callback changes what the next one gets.
                values = redacted_json(event.values())
                method(values)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own code may raise anything, none of it worth the run
                del self.called[path]
                say(
                    f"warning: callback {path}.{hook} raised {_line(error)}; it is not called again, the run goes on"
                )


def _ignore(values: dict[str, Any]) -> None:
    """Do nothing: the method of a callback that has none for an event."""


def _tensorboard(run: Run) -> Tracker:
    """Open event files in RUN/tensorboard.

    Metrics of steps that are done again are marked as void (purge_step).
    """
    folder = str(run.folder / "tensorboard")
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    writer_class = tensorboard.SummaryWriter
    writer = writer_class(folder)
    options = run.options.model_dump()
    about = {key: value for key, value in options.items() if value}
    if about:
        # TensorBoard has no names and tags of runs, so they are a text of it.
        text = json.dumps(about, indent=2, ensure_ascii=False)
        writer.add_text("run", _indent(text))

    def write(group: str, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(samples: list[dict[str, Any]], step: int) -> None:
        for number, sample in enumerate(samples):
            text = f"{sample['prompt']}\n\n{sample['text']}"
            writer.add_text(f"samples/{number}", _indent(text), step)
        writer.flush()

    def rewind(step: int) -> None:
        nonlocal writer
        writer.close()
        writer = writer_class(folder, purge_step=step + 1)

    # A function, since `rewind` makes another writer.
    return Tracker(folder, write, lambda: writer.close(), rewind, show)


def _indent(text: str) -> str:
    """Return a text as code in Markdown, which TensorBoard shows letter by letter."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _wandb(run: Run) -> Tracker:
    """Open a run of W&B; WANDB_MODE sets offline or online.

    Each group has its own step: a save is reported after later steps have been.
    """
    wandb = importlib.import_module("wandb")
    options = run.options
    wandb_run = wandb.init(
        name=run.name,
        dir=str(run.folder),
        config=run.config,
        id=run.known,
        resume="allow",
        project=run.project("WANDB_PROJECT"),
        group=options.group,
        tags=options.tags or None,
        notes=options.notes,
    )
    for group in (*GROUPS.values(), "samples"):
        wandb_run.define_metric(f"{group}/step", hidden=True)
        wandb_run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def write(group: str, numbers: dict[str, float], step: int) -> None:
        wandb_run.log({f"{group}/step": step, **numbers})

    def show(samples: list[dict[str, Any]], step: int) -> None:
        rows = []
        for sample in samples:
            cells = [sample[name] for name in SHOWN]
            rows.append([step, *cells])
        table = wandb.Table(columns=["step", *SHOWN], data=rows)
        wandb_run.log({"samples/step": step, "samples/answers": table})

    return Tracker(str(wandb_run.id), write, wandb_run.finish, show=show)


def _mlflow(run: Run) -> Tracker:
    """Open a run of MLflow, at MLFLOW_TRACKING_URI, or in mlflow.db in the current folder.

    Samples are files of the run.
    """
    mlflow = importlib.import_module("mlflow")
    options = run.options
    if run.known:
        mlflow_run = mlflow.start_run(run_id=run.known)
    else:
        mlflow.set_experiment(run.project("MLFLOW_EXPERIMENT_NAME"))
        mlflow_run = mlflow.start_run(run_name=run.name)
    about = {
        "group": options.group,
        "tags": ", ".join(options.tags),
        "mlflow.note.content": options.notes,
    }
    tags = {key: value for key, value in about.items() if value}
    mlflow.set_tags(tags)
    mlflow.log_dict(run.config, "config.json")

    def write(_: str, numbers: dict[str, float], step: int) -> None:
        named = {_mlflow_name(name): value for name, value in numbers.items()}
        mlflow.log_metrics(named, step=step)

    def show(samples: list[dict[str, Any]], step: int) -> None:
        mlflow.log_dict({"samples": samples}, f"samples/step-{step:08}.json")

    return Tracker(str(mlflow_run.info.run_id), write, mlflow.end_run, show=show)


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes.

    It refuses a whole step for one name with other characters, or that is no plain path.
    """
    parts = []
    for part in name.split("/"):
        if part in ("", ".", ".."):
            parts.append("_")
        else:
            parts.append(re.sub(r"[^\w. -]", "_", part))
    return "/".join(parts)


def _trackio(run: Run) -> Tracker:
    """Open a run in trackio's local store, or in a Space that its own variables name."""
    trackio = importlib.import_module("trackio")
    options = run.options
    config = dict(run.config)
    if options.tags:
        config["tags"] = list(options.tags)
    if options.notes:
        config["notes"] = options.notes
    trackio_run = trackio.init(
        project=options.project or "drumline",
        name=run.known or run.name,
        config=config,
        group=options.group,
        resume="must" if run.known else "never",
    )

    def write(_: str, numbers: dict[str, float], step: int) -> None:
        trackio.log(numbers, step=step)

    def show(samples: list[dict[str, Any]], step: int) -> None:
        rows = []
        for sample in samples:
            row = {name: sample[name] for name in SHOWN}
            rows.append(row)
        pandas = importlib.import_module("pandas")
        table = trackio.Table(dataframe=pandas.DataFrame(rows))
        trackio.log({"samples": table}, step=step)

    # If the store has a run of that name already, trackio makes up another name.
    return Tracker(str(trackio_run.name), write, trackio.finish, show=show)


def _swanlab(run: Run) -> Tracker:
    """Open a run of SwanLab; SWANLAB_MODE sets offline, local or online.

    What is written offline is in RUN/swanlab, a folder for each start, and `swanlab sync` joins
    those of one id (experimental: uploads have not been tried).
    """
    swanlab = importlib.import_module("swanlab")
    options = run.options
    known: dict[str, Any] = {}
    if run.known:
        known = {"id": run.known, "resume": "allow"}
    swanlab_run = swanlab.init(
        project=run.project("SWANLAB_PROJ_NAME"),
        name=run.name,
        log_dir=str(run.folder / "swanlab"),
        config=run.config,
        group=options.group,
        tags=list(options.tags) or None,
        description=options.notes,
        **known,
    )

    def write(_: str, numbers: dict[str, float], step: int) -> None:
        swanlab.log(numbers, step=step)

    def show(samples: list[dict[str, Any]], step: int) -> None:
        texts = []
        for sample in samples:
            text = swanlab.Text(sample["text"], caption=sample["prompt"])
            texts.append(text)
        swanlab.log({"samples": texts}, step=step)

    return Tracker(str(swanlab_run.id), write, swanlab.finish, show=show)

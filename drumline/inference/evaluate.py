"""`drumline eval`: the metrics of a checkpoint on the held-out set, as the training run would measure them."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from drumline import __version__
from drumline.checkpoint.load import check, newest, pointed
from drumline.core.explain import default_run_dir, strategy_name
from drumline.core.files import write_whole
from drumline.core.load import Loaded, load
from drumline.core.plan import Plan
from drumline.errors import CheckpointError, ConfigError, DrumlineError, EnvironmentFault, UserError
from drumline.foreign import read_object
from drumline.launchers.environment import launched_by
from drumline.launchers.local import launch
from drumline.report.bars import bars
from drumline.telemetry.events import Eval, Event
from drumline.train.setup import EVAL_RESULTS, Request, make_plan

# An evaluation is over or not: nothing is started again, and only the caller gets the result.
ALONE = ["launch.max_restarts=0", "run.report_to=[]"]


def evaluate(config_path: Path, overrides: list[str], place: Path | None) -> int:
    """Score the weights at `place` (find_weights) under the config's strategy, print a table, and write RUN/eval.json."""
    if launched_by() is not None:
        raise UserError("drumline eval starts its own processes", where=str(launched_by()), fix="call it by itself")
    plan, weights, run_dir = planned(config_path, overrides, place)
    began = time.time()
    code, metrics = _measure(plan, weights)
    if code:
        return code
    result = {
        "weights": weights.origin,
        "checkpoint": str(weights.checkpoint) if weights.checkpoint else None,
        "strategy": strategy_name(plan),
        "world_size": plan.mesh.world_size,
        "precision": plan.precision,
        "seconds": time.time() - began,
        **metrics,
    }
    show(f"{weights.origin} on {metrics['samples']} held-out samples", metrics["metrics"])
    write(run_dir, "held_out", result)
    return 0


def planned(config_path: Path, overrides: list[str], place: Path | None) -> tuple[Plan, Weights, Path]:
    """The plan with its held-out set prepared, what is evaluated, and the run folder. Raises ConfigError without a held-out set."""
    run_dir = run_folder(config_path, overrides)
    weights = find_weights(config_path, [*overrides, *ALONE], place, run_dir)
    with bars(Console(stderr=True)) as on_progress:
        plan = make_plan(Request(weights.loaded), on_progress=on_progress)
    if plan.data is None or plan.data.eval_cache is None:
        raise ConfigError("there is no held-out set", where="data", fix="set data.eval, or data.holdout: a number of rows")
    return plan, weights, run_dir


def run_folder(config_path: Path, overrides: list[str]) -> Path:
    """The run folder that `drumline train` has with the same config and overrides."""
    loaded = load(config_path, overrides)
    return Path(loaded.config.run.dir or default_run_dir(loaded.path))


@dataclass(frozen=True)
class Weights:
    """What is evaluated: `checkpoint` laid over the model of the config, or, where it is None, the model of `loaded` as it is published."""

    loaded: Loaded
    checkpoint: Path | None
    origin: str


def find_weights(config_path: Path, overrides: list[str], place: Path | None, run_dir: Path) -> Weights:
    """`place`: a checkpoint, a run folder or a Hugging Face folder; None: the best or newest checkpoint of `run_dir`, and before there
    is one the model that training starts from. Raises CheckpointError for a place that is none of them."""
    loaded = load(config_path, overrides, trusted=False)
    if place is None:
        found = of_run(run_dir)
        return Weights(loaded, found, str(found) if found else f"{loaded.config.model.id or 'the model'}, not trained")
    if (place / "plan.json").exists():
        found = of_run(place)
        if found is None:
            raise CheckpointError("this run has no whole checkpoint", where=str(place), fix="train first, or set checkpoint.every")
        return Weights(loaded, found, str(found))
    if (place / "config.json").exists():
        own = ["model.revision=null", "model.init=pretrained", "model.config={}", "adapter=none"]
        own += ["model.tokenizer=null"] if (place / "tokenizer_config.json").exists() else []
        return Weights(load(config_path, [*overrides, f"model.id={place.absolute()}", *own], trusted=False), None, str(place))
    check(place, verify=False, alone=True)
    return Weights(loaded, place, str(place))


def of_run(run_dir: Path) -> Path | None:
    """The best checkpoint by eval.metric, else the newest whole one; None where there is none."""
    root = run_dir / "checkpoints"
    return pointed(root, "best") or newest(root, verify=False, alone=True).path


def _measure(plan: Plan, weights: Weights) -> tuple[int, dict[str, Any]]:
    """(exit code, step, samples and metrics) of ranks that leave the run folder alone: theirs is a temporary one, kept if they fail."""
    scratch = Path(tempfile.mkdtemp(prefix="drumline-eval-"))
    found: list[Eval] = []

    def follow(event: Event) -> None:
        if isinstance(event, Eval):
            found.append(event)

    (scratch / "checkpoints").mkdir()
    there = plan.model_copy(update={"run_dir": str(scratch)})
    there.save(scratch / "plan.json")
    start = str(weights.checkpoint) if weights.checkpoint else None
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        code = launch(there, scratch / "plan.json", start, follow, "drumline.inference.rank", trial=True)
        if code:
            at_end.pop_all()
            return code, {}
    if not found:
        raise DrumlineError("the ranks ended without a metric", where=str(scratch))
    step = found[-1].step if weights.checkpoint else None
    return 0, {"step": step, "samples": found[-1].samples, "metrics": found[-1].metrics}


def show(title: str, metrics: dict[str, Any]) -> None:
    """A table of metrics under a title, on standard output."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)


def write(run_dir: Path, section: str, result: dict[str, Any]) -> None:
    """Lay a section over RUN/eval.json; the others stay. Raises EnvironmentFault."""
    path = run_dir / EVAL_RESULTS
    try:
        known = read_object(path, EnvironmentFault, "move it away") if path.exists() else {}
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**known, section: {"time": time.time(), "drumline": __version__, **result}}, indent=2) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error}", where=str(path), fix="move it away, or mend the folder") from error
    Console(stderr=True).print(f"written to {path}", highlight=False, soft_wrap=True)

"""Trackers that repeat the run's figures: TensorBoard, W&B, MLflow, trackio, each through its own library. events.jsonl stays the truth."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault

Write = Callable[[dict[str, float], int], None]
KINDS = {"step": "train", "eval": "eval", "save": "save"}


class Sink:
    """One tracker. A tracker that fails during the run is named once and left alone; training goes on."""

    def __init__(self, name: str, write: Write, close: Callable[[], None]) -> None:
        self.name, self._write, self._close = name, write, close
        self.broken = False

    def event(self, event: dict[str, Any]) -> None:
        """Hand over the figures of a step, eval or save event under `train/…`, `eval/…`, `save/…`."""
        prefix = KINDS.get(event["kind"])
        if prefix is None:
            return
        figures = {
            f"{prefix}/{k}": float(v)
            for k, v in event.items()
            if isinstance(v, int | float) and not isinstance(v, bool) and k not in ("t", "step")
        }
        for rank, bytes_ in enumerate(event.get("memory_bytes", [])):
            figures[f"{prefix}/memory_bytes/rank_{rank}"] = float(bytes_)
        self._guard(lambda: self._write(figures, event["step"]))

    def close(self) -> None:
        self._guard(self._close)

    def _guard(self, action: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything, and none of it is worth the run
            self.broken = True
            print(f"warning: {self.name} failed and gets no more figures: {type(error).__name__}: {error}", file=sys.stderr)


def open_sinks(report_to: Sequence[str], run_dir: Path, config: dict[str, Any], name: str) -> list[Sink]:
    """The trackers of `run.report_to`. Raises EnvironmentFault, before anything is trained, for a library that is not installed."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    return [makers[kind](run_dir, config, name) for kind in report_to]


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise EnvironmentFault(
            f"{extra} is not installed", where="run.report_to", fix=f"pip install 'drumline[{extra}]', or take it out of the list"
        ) from None


def _tensorboard(run_dir: Path, config: dict[str, Any], name: str) -> Sink:
    writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def write(figures: dict[str, float], step: int) -> None:
        for key, value in figures.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return Sink("tensorboard", write, writer.close)


def _wandb(run_dir: Path, config: dict[str, Any], name: str) -> Sink:
    run = _library("wandb", "wandb").init(project="drumline", name=name, dir=str(run_dir), config=config)
    return Sink("wandb", lambda figures, step: run.log(figures, step=step), run.finish)


def _mlflow(run_dir: Path, config: dict[str, Any], name: str) -> Sink:
    mlflow = _library("mlflow", "mlflow")
    mlflow.start_run(run_name=name)
    mlflow.log_dict(config, "config.json")
    return Sink("mlflow", lambda figures, step: mlflow.log_metrics(figures, step=step), mlflow.end_run)


def _trackio(run_dir: Path, config: dict[str, Any], name: str) -> Sink:
    trackio = _library("trackio", "trackio")
    trackio.init(project="drumline", name=name, config=config)
    return Sink("trackio", lambda figures, step: trackio.log(figures, step=step), trackio.finish)

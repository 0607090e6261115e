"""`drumline eval --lm-eval`: tasks of EleutherAI's lm-evaluation-harness, through its Python API, on one device."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.errors import CheckpointError, DrumlineError, EnvironmentFault
from drumline.inference.evaluate import run_folder, show, write
from drumline.inference.open import exported_folder, open_model
from drumline.report.bars import bars

YAML = (".yaml", ".yml")
TRUSTED = "model.trust_remote_code=true"


def harness(
    config_path: Path, overrides: list[str], place: Path | None, tasks: list[str], limit: int | None, include_path: Path | None
) -> int:
    """Score `place`, else the run of a config or the folder itself (see `model_of`), and write RUN/eval.json where there is a run.

    `limit`: questions of each task. `include_path`: a folder of further task YAMLs. Raises EnvironmentFault without the package, and
    for whatever the harness fails on: a task that it does not know, data that cannot be had.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise EnvironmentFault("the package lm-eval is missing", where="--lm-eval", fix="pip install lm-eval")
    source = place or (run_folder(config_path, overrides) if config_path.suffix in YAML else config_path)
    if not source.exists():
        raise CheckpointError("no such run or folder", where=str(source), fix="train first, or name one with --checkpoint")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.time()
    results = _evaluate(model_of(source, TRUSTED in overrides), [task.strip() for task in tasks if task.strip()], limit, include_path)
    metrics = {f"{task} {name}": value for task, found in results.items() for name, value in found.items()}
    show(f"{source} by lm-eval", metrics)
    if (source / "plan.json").exists():
        write(source, "lm_eval", {"seconds": time.time() - began, "limit": limit, "tasks": results})
    return 0


def model_of(source: Path, trust: bool = False) -> dict[str, Any]:
    """lm-eval's arguments for the model: the folder of an export, which it loads itself, or what a run's checkpoint holds, in memory."""
    folder = exported_folder(source) if (source / "plan.json").exists() else source
    if folder is not None and (folder / "config.json").exists():
        import torch

        return {"pretrained": str(folder), "device": "cuda" if torch.cuda.is_available() else "cpu", "trust_remote_code": trust}
    with bars(Console(stderr=True)) as on_progress:
        loaded = open_model(str(source), on_progress, trust)
    return {"pretrained": loaded.model, "tokenizer": loaded.tokenizer}


def _evaluate(model: dict[str, Any], tasks: list[str], limit: int | None, include_path: Path | None) -> dict[str, dict[str, float]]:
    """Task → metric → value, as the harness aggregates them; `metric_stderr` beside each."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    try:
        manager = TaskManager(include_path=str(include_path) if include_path else None)
        loaded = "hf" if isinstance(model["pretrained"], str) else HFLM(**model, batch_size=8)
        arguments = {"model_args": model, "batch_size": 8} if loaded == "hf" else {}
        found = lm_eval.simple_evaluate(model=loaded, tasks=tasks, limit=limit, task_manager=manager, **arguments)
    except DrumlineError:
        raise
    except Exception as error:  # a boundary: tasks are code and data of strangers, mostly fetched over a network
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFault(f"lm-eval failed: {type(error).__name__}: {lines[0][:300]}", where="--lm-eval " + ",".join(tasks)) from error
    assert found is not None, "this process is the first rank"
    return {task: _metrics(metrics) for task, metrics in found["results"].items()}


def _metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Numbers under `metric`, or `metric filter` where an answer was filtered."""
    named = {name.replace(",none", "").replace(",", " "): value for name, value in metrics.items() if "," in name}
    return {name: float(value) for name, value in named.items() if isinstance(value, float | int)}

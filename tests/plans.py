"""Configs and plans for tests: small ones that are written down, and the plan of a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.config.config import Config
from drumline.config.load import load
from drumline.config.mesh import Mesh
from drumline.plan.plan import BatchPlan, Plan, Predicted
from drumline.train.setup import Request, make_plan


def small_config(**sections: Any) -> Config:
    """Return a config whose rows are a file named x; `sections` are its other sections."""
    data = {"train": [{"kind": "file", "path": "x"}]}
    return Config.model_validate({"data": data, **sections})


def small_plan(
    config: Config,
    run_dir: Path | str = "r",
    *,
    micro_batch: int = 1,
    accumulation: int = 1,
    **fields: Any,
) -> Plan:
    """Return a plan for one process on the CPU; `fields` are laid over its fields."""
    batch = BatchPlan(
        global_samples=micro_batch * accumulation,
        micro_batch=micro_batch,
        accumulation=accumulation,
        eval_micro_batch=micro_batch,
    )
    values: dict[str, Any] = {
        "mesh": Mesh(),
        "engine": "native",
        "device": "cpu",
        "backend": "gloo",
        "precision": "fp32",
        "batch": batch,
        "lr": 1e-2,
        "steps": 3,
        "data": None,
        "model_path": None,
        "predicted": Predicted(),
    }
    return Plan(config=config, run_dir=str(run_dir), **{**values, **fields})


def resolve_plan(
    config_file: Path, *overrides: str, world_size: int | None = None, **options: Any
) -> Plan:
    """Return the plan that a run with this config file has, without lines of progress."""
    request = Request(load(config_file, list(overrides)), world_size)
    return make_plan(request, on_progress=lambda *_: None, **options)


def with_section(layout: Any, section: str, **values: Any) -> Any:
    """Return a layout or plan whose config has other values in one section."""
    changed = getattr(layout.config, section).model_copy(update=values)
    config = layout.config.model_copy(update={section: changed})
    return layout.model_copy(update={"config": config})

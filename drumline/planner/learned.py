"""Measured runs of this machine, from which later plans for it learn.

`drumline plan --check RUN --learn` keeps the factors between what a run measured and what was predicted.
Later plans for the same devices are multiplied by the geometric mean of these factors, within
FEWEST_TIMES and MOST_TIMES. `--no-learn` plans without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from drumline.config.section import Frozen
from drumline.errors import UserError
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import cache_dir
from drumline.plan.plan import Plan
from drumline.planner.search.correction import Factors, factors_of, mean_factors
from drumline.system.files import write_whole
from drumline.telemetry.plan_accuracy import Measurement

# The newest runs of each kind of device that are kept.
MOST_RUNS = 20
# A single strange run must not make plans useless.
FEWEST_TIMES = 0.5
MOST_TIMES = 2.0


class LearnedRun(Frozen):
    """A measured run. `run`: its folder. `devices`: what it ran on, see `devices_of`."""

    run: str
    devices: str
    factors: Factors


RUNS = TypeAdapter(list[LearnedRun])


def learned_file() -> Path:
    """Return the file that has the runs."""
    return cache_dir() / "learned.json"


def devices_of(cluster: Cluster) -> str:
    """Return the name under which runs of a machine are kept: `2 × cpu`."""
    return f"{cluster.per_node} × {cluster.device.name}"


def read_learned(devices: str) -> list[LearnedRun]:
    """Return the runs that were measured on such devices, the oldest first.

    Raises UserError for a file that is damaged.
    """
    return [run for run in _read_all() if run.devices == devices]


def learn(run: Path, plan: Plan, measured: Measurement, cluster: Cluster) -> LearnedRun:
    """Keep what a run measured, in place of what is kept of the same run, and return it.

    Of each kind of devices the newest MOST_RUNS runs stay. Raises UserError for a file that is damaged.

    Args:
        run: The run's folder.
        plan: Its plan, with an estimate.
        measured: What it measured.
        cluster: The devices that the run used.
    """
    assert plan.predicted.estimate is not None
    new = LearnedRun(
        run=str(run.absolute()),
        devices=devices_of(cluster),
        factors=factors_of(plan.predicted.estimate, measured),
    )
    kept = [known for known in _read_all() if known.run != new.run] + [new]
    alike = [known for known in kept if known.devices == new.devices]
    dropped = {known.run for known in alike[:-MOST_RUNS]}
    kept = [known for known in kept if known.run not in dropped]
    path = learned_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [known.model_dump() for known in kept]
    write_whole(path, json.dumps(content, indent=1))
    return new


def factors_of_runs(runs: Sequence[LearnedRun]) -> Factors:
    """Return the mean of each factor over some runs, within FEWEST_TIMES and MOST_TIMES."""
    mean = mean_factors(run.factors for run in runs)
    bounded = {}
    for name, value in mean:
        bounded[name] = min(MOST_TIMES, max(FEWEST_TIMES, value))
    return Factors(**bounded)


def _read_all() -> list[LearnedRun]:
    """Return all runs in the file, the oldest first; none without a file."""
    path = learned_file()
    if not path.exists():
        return []
    try:
        return RUNS.validate_json(path.read_bytes())
    except (ValidationError, OSError):
        raise UserError(
            "it is no file of measured runs", where=str(path), fix="delete it, or use --no-learn"
        ) from None

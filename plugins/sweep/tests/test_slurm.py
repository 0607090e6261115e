"""A sweep whose trials are jobs of a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from drumline.launch.slurm.queue import job_of
from tests.harness import write_config
from tests.slurm.cluster import require, slurm
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


def jobs_of(folder: Path) -> dict[str, str | None]:
    """Return trial → its job."""
    jobs = {}
    for file in folder.glob("*/plan.json"):
        trial = file.parent
        jobs[trial.name] = job_of(trial)
    return jobs


def test_each_trial_is_a_job_and_ended_ones_are_not_submitted_again(tmp_path: Path) -> None:
    require()
    model = tiny_model_dir(tmp_path / "model")
    config = write_config(tmp_path, model, eval={"every": 2})
    folder = tmp_path / "sweep"
    command = [
        sys.executable,
        "-m",
        "drumline",
        "sweep",
        config,
        "optimizer.lr=1e-3,1e-2",
        "launch.nodes=1",
        "--on",
        "slurm",
        "--to",
        folder,
    ]
    with slurm(tmp_path / "slurm") as cluster:
        first = cluster.call(*command, timeout=300)
        assert first.returncode == 0, first.stderr
        results = json.loads((folder / "results.json").read_text())
        assert len(results) == 2
        for result in results:
            assert result["state"] == "finished"
            assert result["value"]
        jobs = jobs_of(folder)
        assert len(set(jobs.values())) == 2
        for job in jobs.values():
            assert cluster.job(job)["JobState"] == "COMPLETED"

        again = cluster.call(*command, timeout=100)
        assert again.returncode == 0
        assert jobs_of(folder) == jobs

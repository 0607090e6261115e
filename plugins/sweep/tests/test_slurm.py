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


def test_each_trial_is_a_job_and_ended_ones_are_not_submitted_again(tmp_path: Path) -> None:
    require()
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), eval={"every": 2})
    folder, options = tmp_path / "sweep", ("--on", "slurm", "--to", tmp_path / "sweep")
    command = (
        sys.executable,
        "-m",
        "drumline",
        "sweep",
        config,
        "optimizer.lr=1e-3,1e-2",
        "launch.nodes=1",
        *options,
    )
    with slurm(tmp_path / "slurm") as cluster:
        first = cluster.call(*command, timeout=300)
        assert first.returncode == 0, first.stderr
        results = json.loads((folder / "results.json").read_text())
        assert [each["state"] for each in results] == ["finished", "finished"] and all(
            each["value"] for each in results
        )
        jobs = {
            path.name: job_of(path) for path in folder.iterdir() if (path / "plan.json").exists()
        }
        assert len({*jobs.values()}) == 2 and all(
            cluster.job(job)["JobState"] == "COMPLETED" for job in jobs.values()
        )
        again = cluster.call(*command, timeout=100)
        assert again.returncode == 0 and {name: job_of(folder / name) for name in jobs} == jobs

"""A bench whose runs are jobs of a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness import write_config
from tests.slurm.cluster import require, slurm
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


def test_bench_runs_on_one_node_and_on_two(tmp_path: Path) -> None:
    require()
    config = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), launch={"kind": "slurm", "preflight": False}
    )
    options = (
        "--nodes",
        "1,2",
        "--nproc",
        "1",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--to",
        tmp_path / "bench",
    )
    with slurm(tmp_path / "slurm") as cluster:
        done = cluster.call(
            sys.executable, "-m", "drumline", "bench", config, *options, timeout=300
        )
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    said = (done.stdout, done.stderr, rows)
    assert done.returncode == 0, said
    assert [len(row["rounds"]) for row in rows] == [1, 1], said

"""ZeRO-3 in ways that cannot share a process with the parity rows: weights and optimizer on a disk (libaio), ZeRO++'s second copy."""

from __future__ import annotations

import ctypes.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.engine.strategies.zero.machine import compile_helper
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT
from tests.harness import events, same_weights, write_config
from tests.tiny import tiny_model_dir

TOLERANCE = 1e-5
needs_aio = pytest.mark.skipif(
    ctypes.util.find_library("aio") is None, reason="needs libaio (apt-get install libaio-dev)"
)


@pytest.fixture(scope="session")
def helper() -> None:
    """DeepSpeed's helper, compiled ahead."""
    compile_helper(lambda *_: None)


def plan(root: Path, name: str, strategy: Any, world_size: int) -> Path:
    place = root / name
    place.mkdir()
    path = write_config(
        place,
        root / "model",
        rows=60,
        data={"packing": False},
        strategy=strategy,
        optimizer={"lr": 1e-4, "weight_decay": 0.1},
        batch={"global_samples": 8, "micro_batch": 2},
        checkpoint={"every": 2, "asynchronous": False, "export": "none"},
        eval={"at_start": False},
    )
    request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=world_size)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def same(root: Path, name: str, reference: str) -> None:
    """The steps that a run took, and what it came to, as in the reference."""
    mine = events(root / name / "run", "step")
    expected = events(root / reference / "run", "step")[-len(mine) :]
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in mine] == pytest.approx([e[key] for e in expected], rel=TOLERANCE), (
            name,
            key,
        )
    same_weights(root / name / "run", root / reference / "run", TOLERANCE)


@needs_aio
@pytest.mark.full
@pytest.mark.timeout(1800)  # the first time a helper is compiled: up to ten minutes on two cores
@pytest.mark.usefixtures("helper")
def test_on_a_disk(tmp_path: Path) -> None:
    # Wide enough for matrices that DeepSpeed thinks worth a transfer: 1 MiB a rank.
    tiny_model_dir(tmp_path / "model", hidden=512)
    disk = tmp_path / "disk"
    disk.mkdir()
    on_disk = {"kind": "nvme", "path": str(disk)}
    strategy = {"kind": "zero3", "offload_optimizer": on_disk, "offload_parameters": on_disk}
    run_plans([plan(tmp_path, "alone", "single", 1)], 1)
    run_plans([plan(tmp_path, "nvme", strategy, 2)], 2)
    swapped = [path for path in disk.rglob("*.swp") if path.stat().st_size >= 2**20]
    assert len(swapped) > 10, "weights and moments lie on the disk"
    same(tmp_path, "nvme", "alone")
    resumed = plan(tmp_path, "resumed", strategy, 2)
    stopped = tmp_path / "alone" / "run" / "checkpoints" / "step-00000002"
    shutil.copytree(stopped, resumed.parent / "checkpoints" / stopped.name)
    run_plans([resumed], 2)
    same(tmp_path, "resumed", "alone")


def test_a_second_copy_within_each_host(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "model")
    run_plans([plan(tmp_path, "alone", "single", 1)], 1)
    run_plans([plan(tmp_path, "hpz", {**CUT, "zeropp": {"hierarchical_partition": 2}}, 4)], 4)
    same(tmp_path, "hpz", "alone")

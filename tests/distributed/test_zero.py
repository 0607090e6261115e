"""ZeRO-3 in ways that cannot share a process with the parity rows: weights and optimizer on a disk
(libaio), ZeRO++'s second copy."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from typing import Any

import pytest

from drumline.engine.strategies.zero.machine import compile_helper
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT
from tests.distributed.setups import (
    SHORT,
    copy_checkpoint,
    plan_in,
    same_steps,
)
from tests.harness import same_weights
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
    return plan_in(
        root,
        name,
        world_size,
        root / "model",
        strategy=strategy,
        optimizer={"lr": 1e-4, "weight_decay": 0.1},
        **SHORT,
    )


def same(root: Path, name: str, skip: int = 0) -> None:
    """The steps that a run took, and what it came to, as in the run of one process after its first
    `skip` steps."""
    run = root / name / "run"
    reference = root / "alone" / "run"
    same_steps(run, reference, TOLERANCE, skip)
    same_weights(run, reference, TOLERANCE)


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
    same(tmp_path, "nvme")
    resumed = plan(tmp_path, "resumed", strategy, 2)
    copy_checkpoint(tmp_path / "alone" / "run", resumed)
    run_plans([resumed], 2)
    same(tmp_path, "resumed", skip=2)


@pytest.mark.full
def test_a_second_copy_within_each_host(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "model")
    run_plans([plan(tmp_path, "alone", "single", 1)], 1)
    strategy = {**CUT, "zeropp": {"hierarchical_partition": 2}}
    run_plans([plan(tmp_path, "hpz", strategy, 4)], 4)
    same(tmp_path, "hpz")

"""Qwen3-VL of 2B and 8B parameters, whole: what is planned for it, and what torch hands out.

Rows have images. As in test_sizes.py, nobody fills the weights and kernels compute nothing, so a
model of 8B needs 3 GB of host memory. Layers, widths, images, allocations and launches are real.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

import drumline as drumline_package
from drumline.config.load import load
from drumline.plan.plan import Plan
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.fake_gpu.ledger_file import LedgerFile
from tests.fake_gpu.running import NEEDS_STAND_IN, drumline, machine, run_ranks
from tests.fake_gpu.startup import COMPUTE_UP_TO
from tests.fake_gpu.vision_runs import write_vision_run
from tests.harness import Sections, column

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
SETTINGS = {COMPUTE_UP_TO: 65536, "FAKE_GPU_FILL": 0}
# State is planned to the byte. The rest is a formula: what blocks keep is counted by operator, and what
# the tower keeps is estimated from the sides of its layers. The tower is at most a tenth of a peak
# here, and an estimate of it that is wrong by a half would be 5% of the peak.
WITHIN = 0.05
LORA: Sections = {"adapter": {"kind": "lora", "r": 16}}
RECOMPUTED: Sections = {"memory": {"activation_checkpointing": "full"}}
SELECTIVE: Sections = {"memory": {"activation_checkpointing": "selective"}}
FROZEN_TOWER = ["vision"]


@dataclass(frozen=True)
class Wanted:
    """The best plan of rows of 2,048 tokens; `best` is empty if nothing fits."""

    model: str
    cluster: str
    adapter: str
    best: str
    verdict: str = "fits"


PLANS = [
    Wanted("qwen3-vl-2b", "1x4090", "none", "fsdp2 offload"),
    Wanted("qwen3-vl-2b", "1x4090", "lora", "single"),
    Wanted("qwen3-vl-2b", "1xh100-80g", "none", "single"),
    Wanted("qwen3-vl-2b", "1xh100-80g", "lora", "single"),
    Wanted("qwen3-vl-2b", "8xh100-80g", "none", "fsdp2"),
    Wanted("qwen3-vl-2b", "8xh100-80g", "lora", "ddp"),
    Wanted("qwen3-vl-8b", "1x4090", "none", "", ""),
    Wanted("qwen3-vl-8b", "1x4090", "lora", "zero3 offload", "tight"),
    Wanted("qwen3-vl-8b", "1xh100-80g", "none", "fsdp2 offload", "tight"),
    Wanted("qwen3-vl-8b", "1xh100-80g", "lora", "single"),
    Wanted("qwen3-vl-8b", "8xh100-80g", "none", "fsdp2"),
    Wanted("qwen3-vl-8b", "8xh100-80g", "lora", "ddp"),
]


@pytest.mark.parametrize("wanted", PLANS, ids=lambda w: f"{w.model} {w.cluster} {w.adapter}")
def test_real_sizes_are_planned_without_the_hub(wanted: Wanted) -> None:
    plans = drumline_package.plan(
        model=wanted.model,
        cluster=wanted.cluster,
        adapter=wanted.adapter,
        algorithm="sft",
        length=2048,
    )
    if not wanted.best:
        assert not plans.ranked
        reasons = [refused.reason for refused in plans.refused]
        assert any("> 25.3 GB" in reason for reason in reasons), reasons
        return
    assert plans.best.name == wanted.best
    assert plans.best.verdict == wanted.verdict


@dataclass(frozen=True, eq=False)
class VisionRun:
    """A run of two steps of two micro-batches on each data rank."""

    name: str
    model: str
    sections: Sections = field(default_factory=dict)
    world_size: int = 1


# By `drumline train`: the checkpoint at the end has adapters alone, and fits on the disk of a test.
TRAINED = [
    VisionRun("2B lora", "qwen3-vl-2b", LORA),
    VisionRun("8B lora", "qwen3-vl-8b", LORA),
    VisionRun("8B lora, full checkpointing", "qwen3-vl-8b", {**LORA, **RECOMPUTED}),
]
# By the same training loop without the checkpoint, which would have 13 GB and more.
STEPPED = [
    VisionRun("2B full", "qwen3-vl-2b"),
    VisionRun("2B full, full checkpointing", "qwen3-vl-2b", RECOMPUTED),
    VisionRun("2B full, selective checkpointing", "qwen3-vl-2b", SELECTIVE),
    VisionRun("2B full, frozen tower", "qwen3-vl-2b", {"model": {"freeze": FROZEN_TOWER}}),
    VisionRun(
        "2B full, bf16 weights", "qwen3-vl-2b", {"precision": {"kind": "bf16", "master": "bf16"}}
    ),
    VisionRun(
        "8B full, fsdp2 4, selective checkpointing",
        "qwen3-vl-8b",
        {**SELECTIVE, "strategy": "fsdp2", "batch": {"global_samples": 16, "micro_batch": 2}},
        world_size=4,
    ),
]


@NEEDS_STAND_IN
@pytest.mark.parametrize("run", TRAINED, ids=lambda run: run.name)
def test_a_run_of_the_command_line_peaks_as_planned(run: VisionRun, tmp_path: Path) -> None:
    path = write_vision_run(tmp_path / "files", run.model, run.sections)
    trained = drumline("train", path, timeout=500, **SETTINGS)
    assert trained.code == 0, trained.out

    run_dir = tmp_path / "files/run"
    steps = column(run_dir, "memory_bytes")
    assert len(steps) == 2
    assert_near_plan(run_dir / "plan.json", max(max(ranks) for ranks in steps))


@NEEDS_STAND_IN
@pytest.mark.parametrize("run", STEPPED, ids=lambda run: run.name)
def test_steps_peak_as_planned(run: VisionRun, tmp_path: Path) -> None:
    path = write_vision_run(tmp_path / "files", run.model, run.sections)
    request = Request(load(path, []), run.world_size, machine=machine(run.world_size))
    plan = make_plan(request, on_progress=lambda *_: None).measurement_plan()
    plan_path, _ = claim_run_dir(plan, request)
    failed = run_ranks("tests.fake_gpu.ranks", [plan_path], run.world_size, 500, **SETTINGS)
    assert not failed, failed

    peaks = [LedgerFile(plan_path.parent, rank).peak for rank in range(run.world_size)]
    assert_near_plan(plan_path, max(peaks))


def assert_near_plan(plan_path: Path, peak: int) -> None:
    """Compare the most bytes of tensors that existed at once with the plan's."""
    estimate = Plan.load(plan_path).predicted.estimate
    assert estimate is not None
    planned = estimate.memory
    print(f"planned {planned.peak / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB")
    assert planned.peak == pytest.approx(peak, rel=WITHIN), planned.phases

"""Models of real size: the most bytes that torch's own allocator hands out, against the plan's.

The allocator asks the stand-in for memory that nobody touches, kernels compute nothing and weights
are left empty, so an 8B model needs no GPU and little memory. What real kernels take for themselves
(cuBLAS's and attention's workspaces) is not in it, nor is what NCCL takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_runs import ready
from drumline.models.shapes import find
from drumline.plan.plan import Plan
from tests.fake_gpu.ledger_file import LedgerFile
from tests.fake_gpu.running import NEEDS_STAND_IN, machine, run_ranks
from tests.fake_gpu.startup import COMPUTE_UP_TO
from tests.harness import Sections

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200), NEEDS_STAND_IN]
WITHIN = 0.05
# Small tensors have their numbers, which a rank acts on; large ones are neither computed nor copied,
# so their memory stays untouched.
SETTINGS = {COMPUTE_UP_TO: 65536, "FAKE_GPU_FILL": 0}
FULL = {"memory": {"activation_checkpointing": "full"}}
SELECTIVE = {"memory": {"activation_checkpointing": "selective"}}
LORA = {"adapter": {"kind": "lora", "r": 16}}


@dataclass(frozen=True, eq=False)
class Size:
    """Two micro-batches a step on each data rank. `model`: a name of models.shapes."""

    name: str
    model: str
    length: int
    micro_batch: int
    world_size: int = 1
    strategy: Any = "single"
    data_ranks: int = 1
    sections: Sections = field(default_factory=dict)


SIZES = [
    Size("135M", "smollm2-135m", 1024, 8),
    Size("1B", "llama-3.2-1b", 2048, 4),
    Size("1B, selective checkpointing", "llama-3.2-1b", 2048, 4, sections=SELECTIVE),
    Size("3B, full checkpointing", "llama-3.2-3b", 2048, 2, sections=FULL),
    Size("8B, lora, full checkpointing", "llama-3.1-8b", 4096, 2, sections={**LORA, **FULL}),
    Size("1B, ddp 2", "llama-3.2-1b", 2048, 2, 2, "ddp", 2),
    Size("1B, fsdp2 2", "llama-3.2-1b", 2048, 2, 2, "fsdp2", 2),
    Size("3B, tp 2", "llama-3.2-3b", 2048, 2, 2, "tp", 1, FULL),
    Size("8B, fsdp2 4, full checkpointing", "llama-3.1-8b", 4096, 1, 4, "fsdp2", 4, FULL),
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_the_allocator_hands_out_what_is_planned(size: Size, tmp_path: Path) -> None:
    shape = find(size.model)
    assert shape is not None
    samples = 2 * size.micro_batch * size.data_ranks
    sections = {
        "strategy": size.strategy,
        "precision": "bf16",
        "batch": {"micro_batch": size.micro_batch, "global_samples": samples},
        "run": {"device": "cuda", "steps": 3},
        "health": {"on_nan": "skip"},
        **size.sections,
    }
    plan = ready(
        tmp_path / "run",
        dict(shape.values),
        size.length,
        size.world_size,
        sections,
        machine=machine(size.world_size),
        saves=False,
    )
    failed = run_ranks("tests.fake_gpu.ranks", [plan], size.world_size, 900, **SETTINGS)
    assert not failed, failed

    estimate = Plan.load(plan).predicted.estimate
    assert estimate is not None
    peaks = [LedgerFile(plan.parent, rank).peak for rank in range(size.world_size)]
    planned = estimate.memory
    assert planned.peak == pytest.approx(max(peaks), rel=WITHIN), planned.phases

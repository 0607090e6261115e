"""The rows: what is trained over the stand-in and held against the CPU.

`numbers` are sections of the YAML that change what is learned; the CPU trains with them in one
process, in fp32. `sections` are those of the GPU run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.harness import LETTERS

STEPS = 6
LOGGED_EVERY = 3
SAVED_STEP = 3
# Neither logged, nor after a logged one, whose numbers were read then.
QUIET_STEP = 4

FP32 = 1e-5
# As tests/distributed/rows.py holds low precision near fp32.
LOW = 3e-3

Sections = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Row:
    """One run. `tolerance`: of its losses, relative to the CPU's."""

    name: str
    world_size: int
    sections: Sections = field(default_factory=dict)
    numbers: Sections = field(default_factory=dict)
    tolerance: float = FP32
    layers: int = 2
    architecture: str = "llama"  # or one of tests.tiny.ARCHITECTURES
    # The CPU trains with the same strategy on as many processes: what it learns hangs on them.
    is_held_against_ranks: bool = False
    continues: str = ""  # the name of the row whose checkpoint of the middle it goes on from


PACKED: Sections = {"data": {"packing": True, "max_length": 96}, "rows": 120}
LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
ROLLOUT: Sections = {
    "rewards": [LETTERS],
    "generator": {"kind": "hf", "max_new_tokens": 6, "batch": 16},
    "loss_chunk": 32,
}


def in_precision(name: str, precision: str, row: Row) -> Row:
    """Return `row` by another name, in a precision and with the tolerance of that precision."""
    is_low = precision != "fp32"
    tolerance = max(LOW, row.tolerance) if is_low else row.tolerance
    sections = {**row.sections, "precision": precision}
    return replace(row, name=name, sections=sections, tolerance=tolerance)


def spread(name: str, world_size: int, strategy: Any, **more: Any) -> Row:
    return Row(name, world_size, {"strategy": strategy}, **more)


STRATEGIES = [
    spread("one device", 1, "single"),
    spread("ddp 2", 2, "ddp"),
    spread("fsdp2 2", 2, "fsdp2"),
    spread("tp 2", 2, "tp"),
    spread("cp 2", 2, "cp"),
    spread("pp 2", 2, "pp", layers=4),
]
BY_NAME = {row.name: row for row in STRATEGIES}
SAVED: Sections = {"checkpoint": {"every": SAVED_STEP}}
ROWS = [
    in_precision(f"{row.name}, {precision}", precision, row)
    for row in STRATEGIES
    for precision in ("fp32", "bf16")
]
for row in ROWS:
    if row.sections["precision"] == "fp32":
        row.sections.update(SAVED)
# Why a row fails today; strict, so that it is taken out with the defect.
DEFECTS: dict[str, str] = {}
assert len({row.name for row in ROWS}) == len(ROWS), "two rows have one name"

"""What a rank wrote of its ledger, and the part of it that is committed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_gpu.kinds import kind_of


@dataclass(frozen=True)
class LedgerFile:
    launches_by_step: dict[int, Counter[str]]
    waits_by_step: dict[int, Counter[str]]  # of the host for the device; "what | where"
    peak: int  # bytes that the allocator had handed out at most

    @classmethod
    def read(cls, path: Path) -> LedgerFile:
        values = json.loads(path.read_text())
        launches: dict[int, Counter[str]] = {}
        for step, kernels in values["launches"].items():
            counts = launches.setdefault(int(step), Counter())
            for kernel, number in kernels.items():
                counts[kind_of(kernel)] += number
        waits: dict[int, Counter[str]] = {}
        for step, what, where, number in values["waits"]:
            waits.setdefault(step, Counter())[f"{what} | {where}"] += number
        return cls(launches, waits, values["peak"])

    def counts(self, step: int) -> dict[str, Any]:
        """Return what is committed of a step."""
        return {
            "launches": dict(sorted(self.launches_by_step.get(step, Counter()).items())),
            "waits": dict(sorted(self.waits_by_step.get(step, Counter()).items())),
        }

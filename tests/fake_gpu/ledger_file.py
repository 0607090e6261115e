"""What a rank wrote of its ledger, and the part of it that is committed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.fake_gpu.kinds import kind_of


def ledger_path(folder: Path, rank: int) -> Path:
    return folder / f"ledger-{rank}.json"


class LedgerFile:
    """What the ledger of a rank says, by step: the kinds of its kernels, and where the host waited."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        values = json.loads(ledger_path(folder, rank).read_text())

        launches: dict[int, Counter[str]] = defaultdict(Counter)
        for step, kernel, count in values["launches"]:
            launches[step][kind_of(kernel)] += count
        self.launches = dict(launches)

        waits: dict[int, Counter[str]] = defaultdict(Counter)
        for step, what, where, count in values["waits"]:
            waits[step][f"{what} | {where}"] += count
        self.waits = dict(waits)

        # The most bytes that the allocator had handed out.
        self.peak: int = values["peak"]

    def counts(self, step: int) -> dict[str, dict[str, int]]:
        """Return what is committed of a step."""
        launches = self.launches[step]
        waits = self.waits.get(step, {})
        return {"launches": dict(sorted(launches.items())), "waits": dict(sorted(waits.items()))}

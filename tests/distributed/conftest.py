"""`--parity-results FILE`: what the parity test measured, as JSON, for `scripts/strategy_docs.py`."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import commit
from drumline.bench.verify import Difference
from tests.distributed.rows import PAIRS, STEPS, Case, Row

Record = Callable[[Row, Case, Difference], None]


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Takes down how far a row lay from the reference in a case."""
    measured: dict[str, dict[str, dict[str, object]]] = {}

    def record(row: Row, case: Case, apart: Difference) -> None:
        measured.setdefault(row.name, {})[case.name] = asdict(apart)

    yield record
    path: Path | None = request.config.getoption("--parity-results")
    if path is not None and measured:
        with path.open("a+") as file:  # each worker adds what it measured
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            rows = json.loads(file.read() or '{"rows": {}}')["rows"]
            for name, cases in measured.items():
                rows.setdefault(name, {}).update(cases)
            results = {**_facts(), "rows": in_order(rows)}
            file.truncate(0)
            file.write(json.dumps(results, indent=1) + "\n")


def in_order(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Lay rows and their cases in the order of the tests."""
    ordered: dict[str, dict[str, Any]] = {}
    for row, case in PAIRS:
        cases = rows.get(row.name, {})
        if case.name in cases:
            ordered.setdefault(row.name, {})[case.name] = cases[case.name]
    return ordered


def _facts() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "command": "python -m pytest tests/distributed/test_parity.py --full -n 2 --dist loadfile --parity-results FILE",
        "commit": commit(),
        "steps": STEPS,
        "hardware": f"{os.cpu_count()} CPU cores, gloo",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }

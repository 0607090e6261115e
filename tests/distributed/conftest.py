"""`--parity-results FILE`: what the parity test measured, as JSON, for `scripts/strategy_docs.py`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from drumline.bench.difference import Difference
from tests.distributed.rows import Case, Row

Record = Callable[[Row, Case, Difference], None]


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Takes down how far a row lay from the reference in a case."""
    measured: dict[str, dict[str, dict[str, object]]] = {}

    def record(row: Row, case: Case, apart: Difference) -> None:
        measured.setdefault(row.name, {})[case.name] = asdict(apart)

    yield record
    path: Path | None = request.config.getoption("--parity-results")
    if path is not None:
        import torch
        import transformers

        versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
        command = "python -m pytest tests/distributed/test_parity.py --full --parity-results FILE"
        path.write_text(
            json.dumps({"command": command, "hardware": f"{os.cpu_count()} CPU cores, gloo", **versions, "rows": measured}, indent=1) + "\n"
        )

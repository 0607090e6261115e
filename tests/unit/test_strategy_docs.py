"""docs/reference/strategies.md says what the rules say now, and has a measured row for each strategy of the parity test."""

from __future__ import annotations

import importlib.util
import json

from drumline.bench.verify import Difference
from tests.distributed.rows import PAIRS, TOLERANCE
from tests.harness import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "parity-cpu.json"


def test_the_page_is_what_rules_and_results_make() -> None:
    spec = importlib.util.spec_from_file_location(
        "strategy_docs", ROOT / "scripts" / "strategy_docs.py"
    )
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    measured = json.loads(RESULTS.read_text())
    for language, path in script.PAGES.items():
        assert path.read_text() == script.page(measured, language), "run scripts/strategy_docs.py"
    for row, case in PAIRS:
        apart = measured["rows"][row.name][case.name]
        assert Difference(**apart).largest <= TOLERANCE, (row.name, case.name)

"""docs/strategies.md from the rules and from what the parity test measured: `python scripts/strategy_docs.py`.

First `python -m pytest tests/distributed/test_parity.py --full -n 2 --dist loadfile --parity-results benchmarks/results/parity-cpu.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumline.core.matrix import as_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "parity-cpu.json"
PAGE = ROOT / "docs" / "strategies.md"


def page(measured: dict[str, Any]) -> str:
    """The whole page, from the rules and the results of a parity run."""
    rows = measured["rows"]
    cases = list(dict.fromkeys(case for cases in rows.values() for case in cases))
    lines = [
        "<!-- made by scripts/strategy_docs.py: do not edit -->",
        "# Strategies",
        "",
        "## What goes with what",
        "On GPUs; `drumline strategies --device cpu` prints the same for a machine without. A number is a reason below: such a run is",
        "refused before any process starts.",
        "",
        as_markdown("cuda"),
        "",
        "## What was proved",
        "Largest relative difference from one process with the same global batch in fp32: losses, gradient norms,",
        f"weights and optimizer moments. {measured['hardware']}, torch {measured['torch']}, transformers {measured['transformers']},"
        f" {measured['steps']} steps, commit {measured['commit']}.",
        f"`{measured['command']}`",
        "",
        "| strategy | " + " | ".join(cases) + " |",
        "|---|" + "---|" * len(cases),
    ]
    for name, by_case in rows.items():
        lines.append(f"| {name} | " + " | ".join(_largest(by_case.get(case)) for case in cases) + " |")
    return "\n".join(lines) + "\n"


def _largest(apart: dict[str, Any] | None) -> str:
    if apart is None:
        return ""
    return f"{max(apart[key] or 0.0 for key in ('loss', 'grad_norm', 'weights', 'moments')):.1e}"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    print(f"wrote {PAGE}")

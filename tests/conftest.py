"""Options of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-results", type=Path, default=None, help="write what the parity test measured to this JSON file")
    parser.addoption("--full", action="store_true", help="also the tests marked `full`: what `make test-full` runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full` a test that is marked so is left out."""
    if config.getoption("--full"):
        return
    out = [item for item in items if item.get_closest_marker("full")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]

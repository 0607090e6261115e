"""Options of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-results", type=Path, default=None, help="write what the parity test measured to this JSON file")

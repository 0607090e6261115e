"""Runs of the command line on the GPU, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import column, losses, run_drumline


def train(path: Path, run: Path, *options: object) -> Path:
    """Train the config at `path` into the folder `run`, and return it. The run has to end well."""
    run_drumline("train", path, f"run.dir={run}", *options)
    return run


def same_losses(run: Path, reference: Path, tolerance: float) -> None:
    """Every loss of a run is that of the reference, to `tolerance` of it."""
    assert losses(run) == pytest.approx(losses(reference), rel=tolerance)


def memory_of_ranks(run: Path) -> list[int]:
    """Return the most bytes that each rank had allocated, as the last step has it."""
    last: list[int] = column(run, "memory_bytes")[-1]
    return last

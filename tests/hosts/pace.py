"""A callback that slows a run down while a file is there, so that a test can do something
meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SLOW_SECONDS = 0.3


class Pace:
    """The file is `slow`, beside the run folder; it may hold the seconds of a step."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None

    def on_start(self, event: dict[str, Any]) -> None:
        self.run_dir = Path(event["run_dir"])

    def on_step(self, event: dict[str, Any]) -> None:
        assert self.run_dir is not None
        slow = self.run_dir.parent / "slow"
        if slow.exists():
            time.sleep(float(slow.read_text() or SLOW_SECONDS))

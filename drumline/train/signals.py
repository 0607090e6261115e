"""Being asked to stop: a handler that only sets a flag, for the loop to find between two steps."""

from __future__ import annotations

from types import FrameType

from drumline.launch.asked import Signals


class StopFlag(Signals):
    """While it is entered, SIGTERM, SIGUSR1 and SIGINT set `requested` instead of ending the process."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = number

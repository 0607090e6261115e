"""For tests with real connections on loopback: free ports, and waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

from drumline.launch.environment import listen

MOST_SECONDS = 30.0


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens at. All are held until the last one is found, so they differ."""
    listeners = [listen(None, "127.0.0.1") for _ in range(number)]
    ports = []
    for listener in listeners:
        ports.append(listener.getsockname()[1])
        listener.close()
    return ports


def until(condition: Callable[[], object], seconds: float = MOST_SECONDS) -> None:
    """Wait for a condition. Raises AssertionError if it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)

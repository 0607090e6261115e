"""Following events.jsonl while somebody else writes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PERIOD_SECONDS = 0.2


class Tail:
    """Hands each whole line that is appended from now on to `on_event`; what is left is handed over at the end."""

    def __init__(self, path: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.path, self.on_event = path, on_event
        self._offset = path.stat().st_size if path.exists() else 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="events", daemon=True)

    def __enter__(self) -> Tail:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._read()

    def _follow(self) -> None:
        while not self._done.wait(PERIOD_SECONDS):
            self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the next line is whole again
            self.on_event(event)

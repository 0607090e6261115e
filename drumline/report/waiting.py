"""What ranks do between steps, for how long, and how long it took the last time: the ETA of loading, compiling, saving, exporting."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.core.files import write_whole
from drumline.telemetry import events

# Phases of a rank's heartbeat that a person waits for. `done`: rank 0 exports.
LABELS = {
    "startup": "loading the model",
    "compile": "compiling",
    "eval": "evaluating",
    "save": "saving a checkpoint",
    "rollout": "sampling",
    "done": "exporting",
}
MOST_KINDS = 200  # of runs that are remembered


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Waits:
    """`ranks`: what each does now, as `launchers.stages.stages` has it. `memory`: the file of what runs of a kind took; None: forget."""

    def __init__(
        self, ranks: Callable[[], list[dict[str, Any]]] = list, memory: Path | None = None
    ) -> None:
        self.ranks, self.memory, self.kind = ranks, memory, ""
        self.last: dict[str, float] = {}  # phase → seconds

    def note(self, event: events.Event) -> None:
        """Learn from an event how long a phase took."""
        if isinstance(event, events.RunStart):
            self.kind = f"{event.parameters} {event.strategy} {event.world_size} {event.device}"
            self.last = {**self._read().get(self.kind, {}), **self.last}
        elif isinstance(event, events.Started):
            self.last["startup"] = sum(
                seconds
                for part, seconds in event.seconds.items()
                if part not in ("imports and plan", "first step")
            )
            self.last["compile"] = event.seconds.get("first step", 0.0)
        elif isinstance(event, events.Eval | events.Save | events.Export):
            self.last[{"eval": "eval", "save": "save"}.get(event.kind, "done")] = event.seconds

    def keep(self) -> None:
        """For the next run of this kind, if the disk takes it."""
        if self.memory is not None and self.kind:
            kinds = {
                **{kind: known for kind, known in self._read().items() if kind != self.kind},
                self.kind: self.last,
            }
            with suppress(OSError):
                self.memory.parent.mkdir(parents=True, exist_ok=True)
                write_whole(
                    self.memory, json.dumps(dict([*kinds.items()][-MOST_KINDS:])), shared=True
                )

    def _read(self) -> dict[str, dict[str, float]]:
        with suppress(OSError, ValueError):
            found = json.loads(self.memory.read_text()) if self.memory is not None else {}
            return {
                kind: known
                for kind, known in found.items()
                if all(type(each) is float for each in known.values())
            }
        return {}

    def line(self) -> str | None:
        """What the rank does that has been at it for longest; None while steps go on, or where that is not known."""
        waits = [each for each in self.ranks() if each["phase"] in LABELS]
        if not waits:
            return None
        one = max(waits, key=lambda each: each["seconds"])
        before = self.last.get(one["phase"])
        left = (
            "no ETA: it is the first of its kind"
            if before is None
            else f"ETA {duration(before - one['seconds'])}, as last time"
        )
        if before is not None and one["seconds"] > before:
            left = f"the last one took {duration(before)}"
        return f"{LABELS[one['phase']]} · {duration(one['seconds'])} · {left}"

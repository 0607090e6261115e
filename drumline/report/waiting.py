"""What ranks do between steps, for how long, and how long it took the last time: the ETA of loading, compiling, saving, exporting."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from drumline.system.files import write_whole
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
# The phase of an event that a rank writes at the end of it.
PHASE_OF_EVENT = {"eval": "eval", "save": "save", "export": "done"}
NOT_STARTUP = ("imports and plan", "first step")  # parts of a start that are not loading
MOST_KINDS = 200  # of runs that are remembered


def duration(seconds: float) -> str:
    """Return seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


class Waits:
    """How long the phases between steps take, learned from this run and from earlier ones of its kind.

    `ranks`: returns what each rank does now, as `launch.stages.stages` does. `memory`: the file
    that keeps the durations of earlier runs; None: nothing is kept.
    """

    def __init__(
        self, ranks: Callable[[], list[dict[str, Any]]] = list, memory: Path | None = None
    ) -> None:
        self.ranks = ranks
        self.memory = memory
        self.kind = ""  # runs of one kind take about as long
        self.last: dict[str, float] = {}  # phase → seconds

    def note(self, event: events.Event) -> None:
        """Learn from an event how long a phase took."""
        if isinstance(event, events.RunStart):
            self.kind = f"{event.parameters} {event.strategy} {event.world_size} {event.device}"
            earlier = self._read().get(self.kind, {})
            self.last = {**earlier, **self.last}
        elif isinstance(event, events.Started):
            self.last["startup"] = _seconds_of_loading(event)
            self.last["compile"] = event.seconds.get("first step", 0.0)
        elif isinstance(event, events.Eval | events.Save | events.Export):
            phase = PHASE_OF_EVENT[event.kind]
            self.last[phase] = event.seconds

    def keep(self) -> None:
        """Keep the durations for the next run of this kind, if the disk can be written."""
        if self.memory is None or not self.kind:
            return
        kinds = self._read()
        # The newest kind is the last one, so that the oldest are dropped.
        kinds.pop(self.kind, None)
        kinds[self.kind] = self.last
        newest = list(kinds.items())[-MOST_KINDS:]
        with suppress(OSError):
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.memory, json.dumps(dict(newest)), shared=True)

    def _read(self) -> dict[str, dict[str, float]]:
        """Return the durations of earlier runs by kind; empty if there is no file, or a damaged one."""
        if self.memory is None:
            return {}
        kinds = {}
        with suppress(OSError, ValueError):
            for kind, seconds in json.loads(self.memory.read_text()).items():
                if all(type(each) is float for each in seconds.values()):
                    kinds[kind] = seconds
        return kinds

    def line(self) -> str | None:
        """Return what the rank does that has been at it for longest, and its ETA.

        None while steps go on, or if it is not known what ranks do.
        """
        waits = [rank for rank in self.ranks() if rank["phase"] in LABELS]
        if not waits:
            return None
        longest = max(waits, key=itemgetter("seconds"))
        phase = longest["phase"]
        seconds = longest["seconds"]
        before = self.last.get(phase)
        if before is None:
            left = "no ETA: it is the first of its kind"
        elif seconds > before:
            left = f"the last one took {duration(before)}"
        else:
            remaining = duration(before - seconds)
            left = f"ETA {remaining}, as last time"
        label = LABELS[phase]
        so_far = duration(seconds)
        return f"{label} · {so_far} · {left}"


def _seconds_of_loading(event: events.Started) -> float:
    """Return the seconds of a start that went into loading the model."""
    total = 0.0
    for part, seconds in event.seconds.items():
        if part not in NOT_STARTUP:
            total += seconds
    return total

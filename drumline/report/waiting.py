"""What ranks do between steps, and when it will be done.

Loading, compiling, evaluating, saving and exporting have no steps to count. Their ETA is how long
they took the last time, in this run or in an earlier one of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from drumline.system.files import write_whole
from drumline.telemetry import events

# Phases of a rank's heartbeat that a person waits for. In `done` steps are over and rank 0 exports.
LABELS = {
    "startup": "loading the model",
    "compile": "compiling",
    "eval": "evaluating",
    "save": "saving a checkpoint",
    "rollout": "sampling",
    "done": "exporting",
}
# Kind of event → the phase that ends when the event is written.
PHASE_OF_EVENT = {"eval": "eval", "save": "save", "export": "done"}
# Parts of a start that are not loading. The first step counts as compiling.
NOT_STARTUP = ("imports and plan", "first step")
# Kinds of runs whose durations are remembered.
MOST_KINDS = 200


def duration(seconds: float) -> str:
    """Return seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


class PhaseDurations:
    """Knows how long the phases between steps took, and gives an ETA of the present one.

    It is learned from this run and from earlier ones of its kind.
    """

    def __init__(
        self,
        read_rank_phases: Callable[[], list[dict[str, Any]]] = list,
        history_file: Path | None = None,
    ) -> None:
        """Know nothing yet; the events of the run come to `note`.

        Args:
            read_rank_phases: Returns what each rank does now, as
                `launch.rank_phases.rank_phases` does.
            history_file: JSON file with the durations of earlier runs; None keeps nothing.
        """
        self.read_rank_phases = read_rank_phases
        self.history_file = history_file
        # Runs of one kind take about as long. Empty until the run has started.
        self.kind = ""
        # Phase → seconds that it took the last time.
        self.last_seconds: dict[str, float] = {}

    def note(self, event: events.Event) -> None:
        """Learn from an event how long a phase took."""
        if isinstance(event, events.RunStart):
            self.kind = f"{event.parameters} {event.strategy} {event.world_size} {event.device}"
            earlier = self._read().get(self.kind, {})
            # What this run has measured itself counts for more.
            self.last_seconds = {**earlier, **self.last_seconds}
        elif isinstance(event, events.Started):
            self.last_seconds["startup"] = _seconds_of_loading(event)
            self.last_seconds["compile"] = event.seconds.get("first step", 0.0)
        elif isinstance(event, events.Eval | events.Save | events.Export):
            phase = PHASE_OF_EVENT[event.kind]
            self.last_seconds[phase] = event.seconds

    def save_history(self) -> None:
        """Keep the durations for the next run of this kind, if the disk can be written."""
        if self.history_file is None or not self.kind:
            return
        kinds = self._read()
        # The newest kind is the last one, so that the oldest are dropped.
        kinds.pop(self.kind, None)
        kinds[self.kind] = self.last_seconds
        newest = list(kinds.items())[-MOST_KINDS:]
        text = json.dumps(dict(newest))
        with suppress(OSError):
            self.history_file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.history_file, text, shared=True)

    def _read(self) -> dict[str, dict[str, float]]:
        """Return the durations of earlier runs by kind; empty without a file, or if it is damaged."""
        if self.history_file is None:
            return {}
        kinds = {}
        with suppress(OSError, ValueError):
            content = json.loads(self.history_file.read_text())
            for kind, seconds in content.items():
                # Of a file that something else has changed, only what is whole is used.
                are_floats = all(type(each) is float for each in seconds.values())
                if are_floats:
                    kinds[kind] = seconds
        return kinds

    def line(self) -> str | None:
        """Return a line on the rank that has been in its phase for longest, with its ETA.

        None while steps go on, or if it is not known what ranks do.
        """
        waiting = [rank for rank in self.read_rank_phases() if rank["phase"] in LABELS]
        if not waiting:
            return None
        longest = max(waiting, key=itemgetter("seconds"))
        phase = longest["phase"]
        seconds = longest["seconds"]
        last_seconds = self.last_seconds.get(phase)
        if last_seconds is None:
            left = "no ETA: it is the first of its kind"
        elif seconds > last_seconds:
            # It takes longer than before, so when it ends cannot be said.
            left = f"the last one took {duration(last_seconds)}"
        else:
            remaining = duration(last_seconds - seconds)
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

"""Callbacks that a user might write, for test_python.py: one that notes, one on every rank, one
that raises."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch

Event = dict[str, Any]


class Noting:
    """Appends what it is told, and draws random numbers besides."""

    name = "noted"

    def _note(self, hook: str, event: Event) -> None:
        random.random(), torch.rand(3), torch.manual_seed(7)
        line = json.dumps([hook, event.get("step"), event.get("loss")])
        with (Path(os.environ["NOTES"]) / f"{self.name}-{os.environ.get('RANK', '0')}").open(
            "a"
        ) as file:
            file.write(line + "\n")

    def on_start(self, event: Event) -> None:
        self._note("start", event)

    def on_step(self, event: Event) -> None:
        self._note("step", event)

    def on_eval(self, event: Event) -> None:
        self._note("eval", event)

    def on_save(self, event: Event) -> None:
        self._note("save", event)

    def on_end(self, event: Event) -> None:
        self._note("end", event)


class Everywhere(Noting):
    name, every_rank = "everywhere", True


class Raising:
    def on_step(self, event: Event) -> None:
        raise ValueError(f"no plot of step {event['step']}\nat all")

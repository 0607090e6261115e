"""Callbacks of the user's own, `run.callbacks`: classes whose methods get the events of a run, and cannot change a number of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drumline.core.by_name import find_object
from drumline.core.redact import plain, redact
from drumline.errors import ConfigError
from drumline.foreign import first_line
from drumline.telemetry.events import Event

# Kind of event → the method that gets it as a dictionary, as it stands in events.jsonl.
HOOKS = {"run_start": "on_start", "step": "on_step", "eval": "on_eval", "save": "on_save", "run_end": "on_end"}


def find(paths: Sequence[str], base_dir: Path) -> list[Any]:
    """An instance of each class. Raises ConfigError for what is no class with one of the methods, or cannot be made."""
    made = []
    for path in paths:
        cls = find_object(path, base_dir, "run.callbacks")
        if not isinstance(cls, type) or not any(hasattr(cls, name) for name in HOOKS.values()):
            fix = f"write a class with one of {', '.join(HOOKS.values())}"
            raise ConfigError(f"{path} is no callback", where="run.callbacks", fix=fix)
        try:
            made.append(cls())
        except Exception as error:
            raise ConfigError(f"{path}() raised {type(error).__name__}: {first_line(error)}", where="run.callbacks") from error
    return made


class Callbacks:
    """Those of one rank: all on rank 0, on the others those whose class has `every_rank = True`. One that raises is named once and not
    called again; the run goes on."""

    def __init__(self, paths: Sequence[str], base_dir: Path, rank: int) -> None:
        found = zip(paths, find(paths, base_dir), strict=True)
        self.rank = rank
        self.called = {path: callback for path, callback in found if rank == 0 or getattr(callback, "every_rank", False)}

    def event(self, event: Event) -> None:
        hook = HOOKS.get(event.kind)
        if hook is None:
            return
        for path, callback in [*self.called.items()]:
            try:
                getattr(callback, hook, lambda values: None)(plain(event.values()))
            except Exception as error:  # noqa: BLE001 - a user's own code may raise anything, and none of it is worth the run
                del self.called[path]
                line = redact(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                print(f"warning: callback {path}.{hook} raised {line}; it is not called again, the run goes on", file=sys.stderr)

"""events.jsonl: one JSON object a line, appended and flushed at once. It is the truth of a run; displays and trackers only repeat it."""

from __future__ import annotations

import errno
import json
import math
import re
import time
from pathlib import Path
from typing import Any

# kind → the fields that each such event has, besides `t` (unix seconds) and `kind`.
KINDS: dict[str, tuple[str, ...]] = {
    "run_start": ("world_size", "steps", "parameters", "strategy", "device", "run_dir", "resumed_from", "plan_line"),
    "step": (
        "step", "loss", "lr", "grad_norm", "tokens", "samples", "tokens_per_s", "samples_per_s", "mfu",
        "seconds", "data_s", "compute_s", "comm_s", "memory_bytes", "epoch",
    ),
    "eval": ("step", "loss", "samples", "seconds"),
    "save": ("step", "path", "seconds", "bytes", "blocked_seconds", "error"),
    "restore": ("step", "path", "seconds", "skipped"),
    "nonfinite": ("step", "policy", "loss", "grad_norm", "sample_ids"),
    "fault": ("attempt", "rank", "signal", "exitcode", "error", "log", "step", "action"),
    "preempt": ("step", "signal"),
    "export": ("path", "seconds", "max_logit_difference"),
    "run_end": ("status", "exit_code", "step", "goodput"),
}  # fmt: skip

SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$", re.IGNORECASE)


class EventLog:
    """Appends events to a file. A run that was killed in the middle of a line goes on after it on a new one.

    A full disk costs no event and stops no run: what could not be written waits in memory for the next one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            torn = size > 0 and file.read(1) != b"\n"
        self._file = path.open("ab", buffering=0)
        self._waiting = b"\n" if torn else b""

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write one event and return it. Values that JSON lacks are written as null (NaN) or as strings (inf)."""
        missing = set(KINDS[kind]) - set(fields)
        assert not missing, f"event {kind} lacks {missing}"
        event: dict[str, Any] = _plain({"t": time.time(), "kind": kind, **fields})
        self._waiting += json.dumps(event, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        self._write()
        return event

    def _write(self) -> None:
        while self._waiting:
            try:
                written = self._file.write(self._waiting)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                return
            self._waiting = self._waiting[written or 0 :]


def _plain(value: Any) -> Any:
    """JSON's own types; secrets redacted by the name of their key."""
    if isinstance(value, dict):
        return {str(k): "[redacted]" if isinstance(v, str) and SECRET.search(str(k)) else _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole events of a file, in order; a line torn by a kill is passed over."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and "kind" in event:
            events.append(event)
    return events


def series(events: list[dict[str, Any]], field: str, kind: str = "step") -> dict[int, Any]:
    """Step → value, the last word on each step: one that was done again after a restart counts once."""
    return {e["step"]: e[field] for e in events if e["kind"] == kind and field in e}

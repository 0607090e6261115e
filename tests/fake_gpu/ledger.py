"""What the stand-in saw of this process: launches by step and kernel, and where the host waited.

The counting is in `native/ledger.cpp`; this file tells it when a step begins, and finds the line of
the project that asked the host to wait.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTSIDE = -1  # of any step
FRAMES = 2  # of the project, that a wait is reported with
# Between an operator and who called it.
DISPATCH = (
    "fake_gpu/compute.py",
    "fake_gpu/ledger.py",
    "torch/_ops.py",
    "torch/_compile.py",
    "eval_frame.py",
)
WaitHook = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Ledger:
    """The one of this process."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)  # the stand-in is preloaded
        self.waits: Counter[tuple[int, str, str]] = Counter()  # step, what, where
        self.step = OUTSIDE
        self._hook = WaitHook(self._take_wait)  # kept: C calls it

    def start(self) -> None:
        self.library.standin_set_wait_hook(self._hook)
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self.clear)

    def stop(self) -> None:
        """Waits of the end of the process come too late for Python."""
        self.library.standin_set_wait_hook(WaitHook())

    def clear(self) -> None:
        self.waits.clear()
        self.begin_step(OUTSIDE)
        self.library.standin_clear()

    def begin_step(self, step: int) -> None:
        """Count what comes from here on for this step."""
        self.step = step
        self.library.standin_begin_step(step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that this thread asks of the device."""
        self.library.standin_pause()
        try:
            yield
        finally:
            self.library.standin_resume()

    def limit_moves(self, most: int) -> None:
        """Let copies and messages of more bytes than `most` move nothing from here on."""
        self.library.standin_set_largest_move(ctypes.c_size_t(most))

    def report_wait(self, what: str) -> None:
        self.library.standin_report_wait(what.encode())

    def count_launch(self, kernel: str) -> None:
        self.library.standin_count_launch(kernel.encode())

    def launches(self) -> list[tuple[int, str, int]]:
        """Return (step, kernel, how often it was launched) of all that was launched so far."""
        found = []
        with tempfile.NamedTemporaryFile("r", suffix=".tsv") as file:
            self.library.standin_write_launches(file.name.encode())
            for line in file:
                step, count, kernel = line.rstrip("\n").split("\t")
                found.append((int(step), kernel, int(count)))
        return found

    def write(self, path: Path, peak: int) -> None:
        """Write what was seen so far as JSON. `peak`: the most bytes that the allocator gave out."""
        waits = [(*key, count) for key, count in sorted(self.waits.items())]
        seen = {"launches": self.launches(), "waits": waits, "peak": peak}
        path.write_text(json.dumps(seen))

    def _take_wait(self, what: bytes) -> None:
        self.waits[self.step, what.decode(), _place()] += 1


def _place() -> str:
    """Return the innermost functions of the project that led here, or of whoever did."""
    frame: Any = sys._getframe(2)
    outer = ""
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        file = frame.f_code.co_filename
        _, package, inner = file.rpartition("/drumline/")
        if package:
            found.append(f"{inner}:{frame.f_code.co_name}")
        elif not outer and not file.endswith(DISPATCH):
            outer = f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return " < ".join(found) or outer


LEDGER = Ledger()

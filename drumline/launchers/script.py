"""`drumline launch mine.py`: a script of the user's own as the ranks of one machine, by the agent that `drumline train` has."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

from drumline.core.process import tied
from drumline.core.signals import LauncherSignals
from drumline.errors import NotSaved, UserError
from drumline.hardware.detect import detect
from drumline.launchers.environment import listen
from drumline.launchers.local import exit_code, next_attempt
from drumline.launchers.postmortem import report, root_cause
from drumline.launchers.restarts import Restarts
from drumline.telemetry.events import following

ATTEMPT = "DRUMLINE_ATTEMPT"  # what a session reads: above 0 it goes on from its newest checkpoint
GRACE_SECONDS = 60.0


def launch(script: Path, arguments: list[str], nproc: int | None, max_restarts: int) -> int:
    """Run `nproc` ranks of a script (None: one a GPU, or one) to the end and return the exit code. What rank 0 prints is shown; the logs of
    all are in runs/NAME/logs. A start after a dead rank goes on from the newest checkpoint. Raises UserError where there is no script."""
    if not script.is_file():
        raise UserError("there is no such script", where=str(script), fix="name a Python file")
    nproc = nproc or max(1, len(detect().devices))
    run_dir = Path("runs") / script.stem
    from drumline.launchers.agent import Agent

    restarts = Restarts(max_restarts)
    rank = tied(str(script.absolute()), *arguments)
    with LauncherSignals() as signals:
        for start in range(max_restarts + 1):
            os.environ[ATTEMPT] = str(start)
            logs = run_dir / "logs" / f"attempt-{next_attempt(run_dir)}"
            with _shown(logs / "rank-0.out", sys.stdout), _shown(logs / "rank-0.log", sys.stderr):
                ends = Agent(rank, nproc, listen(None), logs, signals, GRACE_SECONDS).attempt()
            code = exit_code(ends, signals.number)
            if code is not None:
                return NotSaved.exit_code if code == NotSaved.rank_code else code
            cause = root_cause(ends)
            # How far it was is the script's own affair: each start counts.
            reason = "asked to stop" if signals.number else restarts.decide(-1, start, cause.rank, cause.message)
            print(f"\n{report(cause, ends)}\n", file=sys.stderr)
            first = f"error: rank {cause.rank} failed: {cause.message.splitlines()[0]}"
            if reason is not None:
                print(f"{first} — {reason}; see {cause.log}", file=sys.stderr)
                return 1
            print(f"{first}\nstarting again ({restarts.left} restarts left)", file=sys.stderr)
    return 1


def _shown(path: Path, stream: TextIO) -> AbstractContextManager[None]:
    """Within, what is appended to `path` is copied to `stream`."""
    return following(path, lambda piece: print(piece.decode(errors="replace"), end="", file=stream, flush=True))

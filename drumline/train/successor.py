"""The launcher that goes on with a run whose own has gone: an agent of another host starts it, with what that one had it know on standard
input (`launchers.hosts.takeover`)."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drumline.core.plan import Plan
from drumline.core.redact import redacted_streams
from drumline.errors import DrumlineError
from drumline.launchers.hosts.gathered import succeeding
from drumline.launchers.lease import Lease
from drumline.launchers.local import furthest_step, newest_or
from drumline.launchers.ssh.spec import SSHLauncher
from drumline.report.page import at_end
from drumline.telemetry.events import EventLog, Takeover


def take_over(known: dict[str, Any]) -> int:
    """Have the run folder, wait for the agents that are left, and launch. Raises EnvironmentFault where another host has it."""
    path, run_dir = Path(known["plan"]), Path(known["run_dir"])
    launcher = Plan.load(path).config.launch
    assert isinstance(launcher, SSHLauncher)
    with ExitStack() as stack:
        hosts = stack.enter_context(succeeding(launcher, known))
        stack.enter_context(
            Lease(
                run_dir,
                hosts.place,
                known["token"] if known["shared"] else None,
                tuple(known["frozen"]),
            )
        )
        (run_dir / "logs").mkdir(exist_ok=True)
        with (run_dir / "logs" / f"launcher-{known['name']}.log").open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        why = (
            "the lease of the run folder"
            if known["shared"]
            else f"votes of a majority, term {known['term']}"
        )
        print(
            f"note: host {known['name']} goes on with the run; its launcher has gone: {known['host']}",
            file=sys.stderr,
        )
        event = Takeover(
            host=known["name"], from_=known["host"], why=why, step=max(furthest_step(run_dir), 0)
        )
        EventLog(run_dir / "events.jsonl").emit(event)
        from drumline.train.replan import Replanner

        plan = Plan.load(path)
        hosts.await_agents()
        resume = newest_or(known["resume"], run_dir, plan.config.checkpoint.apart)
        code = launcher.start(plan, path, resume, lambda event: None, Replanner(plan, path), hosts)
    at_end(plan)
    return code


def main() -> int:
    try:
        return take_over(json.loads(sys.stdin.readline() or sys.exit(DrumlineError.exit_code)))
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    with redacted_streams():
        sys.exit(main())

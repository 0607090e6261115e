"""The process of a launcher that goes on with a run whose own launcher has gone.

The agent of another host starts it (rules T2 and T4). The agent writes what the lost launcher had
told it to this process's standard input (`drumline_hosts.takeover`).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drumline.config.resume import Resume
from drumline.errors import DrumlineError
from drumline.launch.lease import Lease
from drumline.launch.local import furthest_step, resume_of_restart
from drumline.plan.plan import Plan
from drumline.report.page import write_final_page
from drumline.system.redact import redacted_streams
from drumline.telemetry.events import EventLog, Takeover
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.gathered import register_successor
from drumline_hosts.ssh.spec import SSHLauncher

# File descriptors.
STDOUT = 1
STDERR = 2


def take_over(known: dict[str, Any]) -> int:
    """Take the run folder, wait for the remaining agents, launch, and return the exit code.

    Args:
        known: What the lost launcher had told the agent.

    Raises:
        EnvironmentFault: Another host has the folder.
    """
    path = Path(known["plan"])
    run_dir = Path(known["run_dir"])
    launcher = Plan.load(path).config.launch
    assert isinstance(launcher, SSHLauncher)
    if known["shared"]:
        token = known["token"]
        why = "the lease of the run folder"
    else:
        token = None
        why = f"votes of a majority, term {known['term']}"
    with ExitStack() as stack:
        made = launcher.make_hosts(known)
        assert isinstance(made, ElasticHosts)
        hosts = stack.enter_context(register_successor(launcher, made))
        stack.enter_context(Lease(run_dir, hosts.place, token, tuple(known["frozen"])))
        _redirect_output(run_dir / "logs" / f"launcher-{known['name']}.log")
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
        first = Resume.parse(known["resume"])
        resume = resume_of_restart(first, run_dir, plan.config.checkpoint.allows_separate_folders)
        code = launcher.start(
            plan, path, str(resume), lambda event: None, Replanner(plan, path), hosts
        )
    write_final_page(plan)
    return code


def _redirect_output(path: Path) -> None:
    """Write standard output and standard error of this process to a file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), STDOUT)
        os.dup2(log.fileno(), STDERR)


def main() -> int:
    """Take a run over as standard input says, and return the exit code."""
    line = sys.stdin.readline()
    if not line:
        # The agent has gone, too.
        return DrumlineError.exit_code
    try:
        return take_over(json.loads(line))
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    with redacted_streams():
        sys.exit(main())

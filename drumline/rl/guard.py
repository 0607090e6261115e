"""The process between a rank and its rewards: `python -m drumline.rl.guard PARENT FD WORKER`.

    rank ── guard ── rewards ── whatever a reward starts

WORKER is the module whose `main` serves the socket FD: `drumline.rl.reward_worker`, or
`drumline.rl.environment_worker` for environments, of which the same holds as of rewards.

It kills the processes that the rewards leave behind, and runs no code of the user's. On Linux it is a
subreaper: a daemon whose parents have ended becomes its child. So the daemon is found and killed,
however the rewards and the rank end. On other systems only processes whose parents still run are found.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time

import psutil

from drumline.system.process import adopt_orphans, die_with_parent, fork


def main() -> None:
    """Run the rewards as a child, kill what they leave behind, and exit with their exit code or signal."""
    parent = int(sys.argv[1])
    fd = int(sys.argv[2])
    worker = sys.argv[3]
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    adopt_orphans()
    die_with_parent(parent, signal.SIGTERM)
    child = fork()
    if child == 0:
        importlib.import_module(worker).main(fd)
        sys.exit(0)
    os.close(fd)
    try:
        pid = 0
        status = 0
        # Orphans may end before the child does.
        while pid != child:
            pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
    finally:
        kill_descendants()
    if code < 0:
        _end_by_signal(-code)
    sys.exit(code)


def _end_by_signal(number: int) -> None:
    """End this process by the signal that ended the rewards.

    It writes no core dump, which would show this process and not the rewards.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _exit_on_signal(number: int, frame: object) -> None:
    """Exit after killing all descendants: the parent is done with this process, or dead."""
    # The kernel sends the signal again for each of the parent's threads.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_descendants()
    os._exit(0)


def kill_descendants() -> None:
    """Kill all descendants, until there are none."""
    this_process = psutil.Process()
    family = this_process.children(recursive=True)
    while family:
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        try:
            # A killed child stays among the children until it is waited for.
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)
        family = this_process.children(recursive=True)


if __name__ == "__main__":
    main()

"""The process between a rank and its rewards: `python -m drumline.rl.guard PARENT FD`.

    rank ── guard ── rewards ── whatever a reward starts

It ends what the rewards leave behind, and runs nothing of a user's. On Linux it is a subreaper: a
daemon whose parents have ended becomes its child. So it is found and killed, however the rewards end
and however the rank does. Elsewhere only processes that still have their parents are found.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

import psutil

from drumline.system.process import adopt_orphans, die_with_parent, fork


def main() -> None:
    """Run the rewards as a child, kill the processes that they leave behind, and end as they ended."""
    parent = int(sys.argv[1])
    fd = int(sys.argv[2])
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    adopt_orphans()
    die_with_parent(parent, signal.SIGTERM)
    child = fork()
    if child == 0:
        from drumline.rl.reward_worker import main as serve

        serve(fd)
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

    It leaves no core, which would show nothing.
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

"""The process between a rank and its rewards: `python -m drumline.rl.guard PARENT FD`. It ends what the rewards leave behind.

    rank ── guard ── rewards ── whatever a reward starts

It runs nothing of a user's. On Linux it is a subreaper: a daemon whose parents have ended becomes its child, so it is found and killed,
however the rewards end and however the rank does. Elsewhere only what still has its parents is found.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

import psutil

from drumline.core.process import adopt_orphans, die_with_parent, fork


def main() -> None:
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, _leave)
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
        pid = status = 0
        while pid != child:  # orphans that end before are let go
            pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
    finally:
        end_family()
    if code < 0:  # end as the rewards did; a core of this process would show nothing
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _leave(number: int, frame: object) -> None:
    """The parent is done with it, or dead; the kernel sends the signal again for each of its threads."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_family()
    os._exit(0)


def end_family() -> None:
    """Kill all descendants, until there are none."""
    while family := psutil.Process().children(recursive=True):
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main()

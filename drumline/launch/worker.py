"""The first lines of a rank: tie its life to the launcher's, then become its module.

    python -m drumline.launch.worker PARENT_PID MODULE ARGUMENTS...

Only the standard library here: torch takes seconds to import, and a launcher that is killed meanwhile may leave no rank behind.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent `parent` (process id) dies, however it dies.

    On Linux by the kernel, which means the thread that started this process; the launcher starts ranks from the thread that then waits for
    them. Elsewhere, as on macOS, by a thread that looks every second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

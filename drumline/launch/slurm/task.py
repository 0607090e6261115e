"""Run one rank as a task of srun: `python -m drumline.launch.slurm.task LOGS MODULE ARGUMENTS...`.

The task runs the module as a rank, forwards signals to it, and writes how it ended to
LOGS/rank-R.end, since srun reports only the largest exit code of all ranks. This module does not
import torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from drumline.hardware.detect import Groups, usable_cores
from drumline.launch.tasks import task_variables
from drumline.system.files import write_whole
from drumline.system.process import Process, start_command, tied_arguments


def main(logs: Path, module: str, *arguments: str) -> int:
    """Run the module as a rank, write how it ended, and return the exit code of the task."""
    env = {**os.environ, **task_variables(os.environ)}
    rank = env.get("RANK", "0")
    threads = env.get("OMP_NUM_THREADS") or str(
        max(1, usable_cores() // int(env.get("LOCAL_WORLD_SIZE", "1")))
    )
    env |= {"TORCHELASTIC_ERROR_FILE": str(logs / f"rank-{rank}.json"), "OMP_NUM_THREADS": threads}
    groups = Groups.from_this_process()
    kills = groups.oom_kill_count()
    process: Process | None = None
    early_signal = 0  # number of a signal that came before the rank had started

    def forward_signal(number: int, frame: FrameType | None) -> None:
        nonlocal early_signal
        early_signal = number
        if process is not None:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward_signal)
    # The rank is in a session of its own, so it gets a signal to the task's group only once.
    process = start_command([sys.executable, *tied_arguments(module, *arguments)], env)
    if early_signal:
        process.send_signal(early_signal)
    code = process.wait()
    host = env.get("SLURMD_NODENAME") or socket.gethostname()
    noted = {
        "exitcode": code,
        "host": host,
        "time": time.time(),
        "kills": [kills, groups.oom_kill_count()],
    }
    write_whole(logs / f"rank-{rank}.end", json.dumps(noted))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

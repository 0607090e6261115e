"""One task of the job's step: `python -m drumline.launch.slurm.task LOGS MODULE ARGUMENTS...`.

It runs the module as a rank, hands signals on to it, and notes how it ended: srun tells only the
largest exit code. No torch here."""

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
from drumline.system.process import Process, start_command, tied


def main(logs: Path, module: str, *arguments: str) -> int:
    env = {**os.environ, **task_variables(os.environ)}
    rank = env.get("RANK", "0")
    threads = env.get("OMP_NUM_THREADS") or str(
        max(1, usable_cores() // int(env.get("LOCAL_WORLD_SIZE", "1")))
    )
    env |= {"TORCHELASTIC_ERROR_FILE": str(logs / f"rank-{rank}.json"), "OMP_NUM_THREADS": threads}
    groups = Groups.of_this_process()
    kills = groups.oom_kills()
    process: Process | None = None
    before = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal before
        before = number
        if process is not None:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, hand_on)
    # A session of its own: a signal to the task's group comes once.
    process = start_command([sys.executable, *tied(module, *arguments)], env)
    if before:
        process.send_signal(before)
    code = process.wait()
    host = env.get("SLURMD_NODENAME") or socket.gethostname()
    noted = {
        "exitcode": code,
        "host": host,
        "time": time.time(),
        "kills": [kills, groups.oom_kills()],
    }
    write_whole(logs / f"rank-{rank}.end", json.dumps(noted))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

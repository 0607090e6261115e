"""The batch script of a run. No torch here."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.errors import ConfigError

if TYPE_CHECKING:
    from drumline.launchers.slurm.spec import SlurmLauncher

SCRIPT = "job.sh"  # in the run folder
WARN_SECONDS = 60  # before the ranks must have saved; Slurm may be a minute late, or early


def require_one_line(plan_path: Path) -> None:
    """Raises ConfigError for a run folder that would not stay on its line of the script."""
    if not (run_dir := str(plan_path.absolute().parent)).isprintable():
        fix = "choose another with run.dir=…"
        raise ConfigError(
            f"{run_dir!r} would not stay on its line of the batch script", where="run.dir", fix=fix
        )


def script(options: SlurmLauncher, plan_path: Path, resume: str | None) -> str:
    """What sbatch gets. It begins one process, which starts the ranks by srun and looks after them. Raises ConfigError."""
    require_one_line(plan_path)
    run_dir = plan_path.absolute().parent
    quoted = str(run_dir).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    lines = {
        "job-name": f"drumline-{''.join(c if c.isalnum() or c in '-_.' else '-' for c in run_dir.name)}",
        "nodes": options.nodes,
        "ntasks-per-node": options.ranks_of_node,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "gpus-per-node": options.gpus,
        "gres": options.gres,
        "cpus-per-task": options.cpus,
        "constraint": options.constraint,
        "output": f'"{quoted}/logs/job-%j.log"',
        "open-mode": "append",
        "signal": f"B:USR1@{math.ceil(options.grace_seconds) + WARN_SECONDS}",
    }
    command = [
        sys.executable,
        "-m",
        "drumline.train.slurm_job",
        str(plan_path),
        *(["--resume", resume] if resume else []),
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {options.nodes * options.ranks_of_node} ranks of Drumline; `drumline follow`, `logs` and `stop` take {run_dir}",
            *(f"#SBATCH --{name}={value}" for name, value in lines.items() if value is not None),
            f"#SBATCH --{'requeue' if options.requeue else 'no-requeue'}",
            *(f"#SBATCH {option}" for option in options.extra),
            "",
            f"cd {shlex.quote(str(Path.cwd()))}",
            f"exec {shlex.join(command)}",
            "",
        ]
    )

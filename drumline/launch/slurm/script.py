"""Write the batch script of a run. This module does not import torch."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from drumline.errors import ConfigError
from drumline.launch.slurm.options import SlurmOptions

SCRIPT = "job.sh"  # in the run folder
# Slurm may send a signal a minute late, or early, so it is asked to send it earlier by this much.
WARN_SECONDS = 60


def require_one_line(plan_path: Path) -> None:
    """Raise ConfigError for a run folder that would not stay on its line of the script."""
    run_dir = str(plan_path.absolute().parent)
    if not run_dir.isprintable():
        what = f"{run_dir!r} would not stay on its line of the batch script"
        raise ConfigError(what, where="run.dir", fix="choose another with run.dir=…")


def script(options: SlurmOptions, plan_path: Path, resume: str | None) -> str:
    """Return the script for sbatch. It runs one process, which starts the ranks by srun and watches over them.

    Raises ConfigError for a run folder that would not stay on its line.
    """
    require_one_line(plan_path)
    run_dir = plan_path.absolute().parent
    ranks = options.nodes * options.ranks_of_node
    lines = [
        "#!/bin/bash",
        f"# {ranks} ranks of Drumline; `drumline follow`, `logs` and `stop` take {run_dir}",
    ]
    for name, value in _directives(options, run_dir).items():
        if value is not None:
            lines.append(f"#SBATCH --{name}={value}")
    if options.requeue:
        lines.append("#SBATCH --requeue")
    else:
        lines.append("#SBATCH --no-requeue")
    for option in options.extra:
        lines.append(f"#SBATCH {option}")
    command = [sys.executable, "-m", "drumline.train.slurm_job", str(plan_path)]
    if resume:
        command += ["--resume", resume]
    lines += ["", f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)}", ""]
    return "\n".join(lines)


def _directives(options: SlurmOptions, run_dir: Path) -> dict[str, object]:
    """Return the value of each directive of sbatch; None for one that is not set."""
    job_name = "".join(_plain_character(character) for character in run_dir.name)
    # In the name of a file sbatch reads backslashes, quotes and percent signs.
    quoted_dir = str(run_dir).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    warn_seconds = math.ceil(options.grace_seconds) + WARN_SECONDS
    return {
        "job-name": f"drumline-{job_name}",
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
        "output": f'"{quoted_dir}/logs/job-%j.log"',
        "open-mode": "append",
        "signal": f"B:USR1@{warn_seconds}",
    }


def _plain_character(character: str) -> str:
    if character.isalnum() or character in "-_.":
        return character
    return "-"

"""Write the batch script of a run. This module does not import torch."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from drumline.errors import ConfigError
from drumline.launch.slurm.options import SlurmOptions
from drumline.system.templates import render_text

SCRIPT = "job.sh"  # in the run folder
# Slurm may send a signal a minute late, or early, so it is asked to send it earlier by this much.
WARN_SECONDS = 60


def require_one_line(plan_path: Path) -> None:
    """Check that the path of the run folder fits on one line of the batch script.

    Raises:
        ConfigError: It has a line break or another character that cannot be printed.
    """
    run_dir = str(plan_path.absolute().parent)
    if not run_dir.isprintable():
        what = f"{run_dir!r} would not stay on its line of the batch script"
        raise ConfigError(what, where="run.dir", fix="choose another with run.dir=…")


def script(options: SlurmOptions, plan_path: Path, resume: str | None) -> str:
    """Return the batch script of a run, for sbatch.

    The script runs one process (`train.slurm_job`), which starts the ranks by srun and watches
    them.

    Raises:
        ConfigError: The path of the run folder does not fit on one line.
    """
    require_one_line(plan_path)
    run_dir = plan_path.absolute().parent
    job_name = "".join(_plain_character(character) for character in run_dir.name)
    # Backslashes, quotes and percent signs have a meaning for sbatch in file names.
    quoted_dir = str(run_dir).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    command = [sys.executable, "-m", "drumline.train.slurm_job", str(plan_path)]
    if resume:
        command += ["--resume", resume]
    return render_text(
        "launch/slurm/job.sh.jinja",
        options=options,
        run_dir=run_dir,
        job_name=job_name,
        quoted_dir=quoted_dir,
        warn_seconds=math.ceil(options.grace_seconds) + WARN_SECONDS,
        working_dir=shlex.quote(str(Path.cwd())),
        command=shlex.join(command),
    )


def _plain_character(character: str) -> str:
    if character.isalnum() or character in "-_.":
        return character
    return "-"

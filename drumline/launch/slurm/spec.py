"""The launcher `slurm`, which submits a run as a batch job and follows it.

This module does not import torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from drumline.config.config import Config
from drumline.config.launcher import Reached
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Device, Machine, detect
from drumline.launch.slurm.options import SlurmOptions
from drumline.launch.slurm.queue import follow, submit
from drumline.launch.slurm.script import script
from drumline.launch.tasks import address, expand_hosts, tasks_of_nodes
from drumline.plan.out_of_memory import Replans
from drumline.plan.plan import Plan
from drumline.system.process import run_command


class SlurmLauncher(SlurmOptions):
    """Submits the run as a batch job of Slurm and follows it until it ends.

    The job is requeued, and the run goes on, when its time is up or another job takes its nodes.
    """

    is_lease_remote: ClassVar[bool] = True

    kind: Literal["slurm"] = "slurm"

    def machine(self, config: Config) -> Machine:
        """Return a node of the job, with the GPUs of `cluster` or else with those of this host.

        Raises:
            EnvironmentFault: Neither says which GPUs a node has.
        """
        here = detect()
        number = self.gpus_of_node
        if number == 0 or config.run.device == "cpu":
            return here.without_devices()
        if config.cluster is not None:
            device = config.cluster.spec()
            if device is not None:
                host_memory = here.memory_bytes
                if config.cluster.host_memory_gb is not None:
                    host_memory = int(config.cluster.host_memory_gb * 10**9)
                devices = [Device(device.name, device.memory_bytes)] * number
                return Machine(devices, here.cores, host_memory, "cuda", "bf16" in device.flops)
        if not here.devices:
            what = f"this host has no GPU, so it is not known what the {number} GPUs of a node are"
            fix = f"set them, such as cluster: {self.nodes}x{number}xh100-80g; `drumline plan --devices` prints the names"
            raise EnvironmentFault(what, where="cluster", fix=fix)
        return replace(here, devices=here.devices[:1] * number)

    def early(self, config: Config, plan_path: Path) -> AbstractContextManager[Any]:
        """Check that a job can be submitted. No process is started before the plan.

        Raises:
            EnvironmentFault: A job of the run is in the queue already.
            ConfigError: The path of the run folder does not fit on one line of the script.
        """
        from drumline.launch.slurm.queue import require_no_job
        from drumline.launch.slurm.script import require_one_line

        require_one_line(plan_path)
        require_no_job(plan_path.parent)
        return nullcontext()

    def reach(self) -> Mapping[str, Reached]:
        """Return how to run a module on each node of the present job, by a step of srun.

        The mapping is empty outside of a job.
        """
        nodes = []
        if "SLURM_JOB_ID" in os.environ:
            nodes = expand_hosts(os.environ.get("SLURM_JOB_NODELIST", ""))
        cores = tasks_of_nodes(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return {
            node: Reached(address(node), partial(_run, node, count))
            for node, count in zip(nodes, cores, strict=True)
        }

    def require(self) -> None:
        """Check that jobs can be submitted on this host.

        Raises:
            EnvironmentFault: There is no sbatch.
        """
        if shutil.which("sbatch") is None:
            raise EnvironmentFault(
                "there is no sbatch on this host",
                where="launch.kind",
                fix="submit from a login host of the cluster",
            )

    def submission(self, plan: Plan, plan_path: Path, resume: str | None) -> str:
        """Return the batch script."""
        return script(self, plan_path, resume)

    def start(
        self,
        plan: Plan,
        plan_path: Path,
        resume: str | None,
        on_event: Callable[[Any], None],
        on_oom: Replans,
        early: Any,
    ) -> int:
        """Submit the job, and follow it to its end unless `detach` is set; return the exit code."""
        job = submit(self, plan_path, resume)
        if self.detach:
            return 0
        return follow(plan_path.parent, job, on_event)


def _run(
    node: str, cores: int, module: str, question: str, seconds: float
) -> tuple[int | None, str, str]:
    """Run a module on one node; return its exit code (None: out of time), output and errors."""
    step_options = [
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cores}",
    ]
    try:
        return run_command(
            ["srun", *step_options, "--mpi=none", "--unbuffered", sys.executable, "-m", module],
            question,
            seconds,
        )
    except OSError as error:
        return 1, "", f"srun: {error.strerror}"

"""A run as a job of Slurm. No torch here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from drumline.config.cluster import MOST_NODES
from drumline.config.launcher import LauncherSpec, Reached, Replans
from drumline.errors import EnvironmentFault
from drumline.foreign import first_line
from drumline.hardware.detect import Device, Machine, detect
from drumline.launch.tasks import address, expand, tasks_of_nodes
from drumline.plan.plan import Plan
from drumline.system.process import run_command

if TYPE_CHECKING:
    from drumline.config.config import Config

# What the script says itself, or what a run cannot be: an array is several jobs, which would share one run folder.
OWN = {
    "array": "a run is one job; submit one `drumline train` for each, with a run.dir of its own",
    "signal": "set launch.grace_seconds",
    "output": "its output is in RUN/logs",
    "requeue": "set launch.requeue",
    "no-requeue": "set launch.requeue",
    "ntasks-per-node": "set launch.nproc",
    "ntasks": "set launch.nodes and launch.nproc",
    "wrap": "the script is Drumline's",
    "wait": "`drumline train` follows the job; --detach does not",
    **{
        name: f"set launch.{name}"
        for name in ("nodes", "partition", "account", "qos", "time", "gres", "constraint")
    },
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
        "set launch.gpus, of each node",
    ),
    "cpus-per-task": "set launch.cpus",
    "clusters": "submit on a login host of that cluster: this one's would be asked for the job",
}
SHORT = {"a": "array", "o": "output", "n": "ntasks", "N": "nodes", "p": "partition", "A": "account", "q": "qos", "t": "time",
         "C": "constraint", "c": "cpus-per-task", "W": "wait", "G": "gpus", "M": "clusters"}  # fmt: skip
FLAGS = "HOQVhksv"  # short options without a value: another one may follow in the same word


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} would not stay on its line of the script")
    return text


def _option(text: str) -> str:
    """One option, its value perhaps a word of its own: sbatch takes all that stand on a line, and the beginning of a name for the name."""
    try:
        option, *value = shlex.split(_one_line(text)) or [""]
    except ValueError as error:
        raise ValueError(f"{text!r}: {first_line(error)}") from None
    name = re.match(r"--([\w-]+)|-(\w)", option)
    if name is None:
        raise ValueError(f"{text!r} is no option of sbatch: write --name=value")
    if (
        len(value) > 1
        or (value and value[0].startswith("-"))
        or (name[2] and name[2] in FLAGS and len(option) > 2)
    ):
        raise ValueError(f"{text!r} is more than one option: write each by itself")
    known = (
        SHORT.get(name[2], "")
        if name[2]
        else next((own for own in sorted(OWN) if own.startswith(name[1])), "")
    )
    if known:
        raise ValueError(f"--{known} cannot stand here: {OWN[known]}")
    return text


Name = Annotated[str, Field(pattern=r"^[^\s'\"\\#]+$")]


class SlurmLauncher(LauncherSpec):
    """A batch job of Slurm, followed until it ends. It is requeued, and goes on, when its time is up or another job takes its nodes."""

    elsewhere: ClassVar[bool] = True

    kind: Literal["slurm"] = "slurm"
    nodes: int = Field(1, gt=0, le=MOST_NODES, description="Nodes of the job.")
    nproc: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="Ranks of each node; null: one per GPU of gpus or gres, or 1.",
    )
    partition: Name | None = Field(None, description="Partition; null: the cluster's default.")
    account: Name | None = Field(None, description="Account that is charged; null: your default.")
    qos: Name | None = Field(None, description="Quality of service; null: your default.")
    time: (
        Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")]
        | Annotated[int, Field(gt=0, le=10**7)]
        | None
    ) = Field(
        None,
        description="Time limit: minutes, 8:00:00, or 1-12:00:00 with days; null: the partition's default.",
    )
    gpus: int | None = Field(
        None, gt=0, le=4096, description="GPUs of each node; null: as gres says, or none."
    )
    gres: Name | None = Field(
        None, description="Generic resources of each node, such as gpu:a100:8."
    )
    cpus: int | None = Field(
        None, gt=0, le=4096, description="Cores of each rank; null: the cluster's default."
    )
    constraint: Name | None = Field(None, description="Features that the nodes must have.")
    extra: tuple[Annotated[str, AfterValidator(_option)], ...] = Field(
        (),
        description="More options of sbatch, a line of the script each, such as --exclusive or --mem=0.",
    )
    requeue: bool = Field(
        True,
        description="Save and go back into the queue before the time limit, and after preemption.",
    )
    preflight: bool = Field(
        True,
        description="Before a job of several nodes begins: compare versions, names, ports, clocks and disks, and make one all-reduce.",
    )
    detach: bool = Field(False, description="Submit, and do not wait for the end.")

    @property
    def gpus_of_node(self) -> int:
        """The GPUs of a node that the job requests, by `gpus` or else by `gres`."""
        if self.gpus:
            return self.gpus
        number = 0
        for part in (self.gres or "").split(","):
            # gpu, gpu:8 or gpu:a100:8, each perhaps with a list in brackets.
            fields = part.partition("(")[0].split(":")
            if fields[0] != "gpu":
                continue
            if fields[-1].isdecimal():
                number += int(fields[-1])
            else:
                number += 1
        return number

    @property
    def ranks_of_node(self) -> int:
        return self.nproc or self.gpus_of_node or 1

    @property
    def number_of_hosts(self) -> int:
        return self.nodes

    def host_ranks(self) -> tuple[int, ...]:
        return (self.ranks_of_node,) * self.nodes

    def machine(self, config: Config) -> Machine:
        """Return a node of the job. Its GPUs are those of `cluster`, or else like this host's."""
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
        """Check that a job can be submitted; nothing has to be started early.

        Raises EnvironmentFault if a job of the run is in the queue, and ConfigError for a run folder that no script can name.
        """
        from drumline.launch.slurm.queue import require_no_job
        from drumline.launch.slurm.script import require_one_line

        require_one_line(plan_path)
        require_no_job(plan_path.parent)
        return nullcontext()

    def reach(self) -> Mapping[str, Reached]:
        """Return how to run a module on each node of the present job: by a step of srun. There are no nodes outside of a job."""
        nodes = []
        if "SLURM_JOB_ID" in os.environ:
            nodes = expand(os.environ.get("SLURM_JOB_NODELIST", ""))
        cores = tasks_of_nodes(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return {
            node: Reached(address(node), partial(_run, node, count))
            for node, count in zip(nodes, cores, strict=True)
        }

    def require(self) -> None:
        if shutil.which("sbatch") is None:
            raise EnvironmentFault(
                "there is no sbatch on this host",
                where="launch.kind",
                fix="submit from a login host of the cluster",
            )

    def submission(self, plan: Plan, plan_path: Path, resume: str | None) -> str:
        from drumline.launch.slurm.script import script

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
        from drumline.launch.slurm.queue import follow, submit

        job = submit(self, plan_path, resume)
        if self.detach:
            return 0
        return follow(plan_path.parent, job, on_event)


def _run(
    node: str, cores: int, module: str, question: str, seconds: float
) -> tuple[int | None, str, str]:
    place = [
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cores}",
    ]
    try:
        return run_command(
            ["srun", *place, "--mpi=none", "--unbuffered", sys.executable, "-m", module],
            question,
            seconds,
        )
    except OSError as error:
        return 1, "", f"srun: {error.strerror}"

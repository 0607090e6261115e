"""The options of a Slurm job: the section `launch` with kind slurm. No torch here."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from drumline.config.cluster import MOST_NODES
from drumline.config.launcher import LauncherSpec
from drumline.foreign import first_line

if TYPE_CHECKING:
    pass

# What the script says itself, or what a run cannot be: an array is several jobs, which would share
# one run folder.
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


class SlurmOptions(LauncherSpec):
    """What a batch script is made of."""

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

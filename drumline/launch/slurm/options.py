"""The keys of the section `launch` with kind slurm: the options of a batch job.

This module does not import torch.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import AfterValidator, Field

from drumline.config.cluster import MOST_NODES
from drumline.config.launcher import LauncherSpec
from drumline.foreign import first_line

# Options of sbatch that `extra` must not have, and what to do instead. The script sets most of them
# itself. A job array cannot be a run: its jobs would share one run folder.
OPTIONS_OF_DRUMLINE = {
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
LONG_NAMES = {"a": "array", "o": "output", "n": "ntasks", "N": "nodes", "p": "partition", "A": "account", "q": "qos", "t": "time",
         "C": "constraint", "c": "cpus-per-task", "W": "wait", "G": "gpus", "M": "clusters"}  # fmt: skip
SHORT_FLAGS = "HOQVhksv"  # short options without a value, which may be joined as in -QH


def _one_line(text: str) -> str:
    """Return `text` if it has no line break or other unprintable character.

    Raises:
        ValueError: It has one.
    """
    if not text.isprintable():
        raise ValueError(f"{text!r} would not stay on its line of the script")
    return text


def _option(text: str) -> str:
    """Return `text` if it is one option of sbatch that `extra` may have.

    The value may be a separate word. Sbatch would accept several options on a line, and abbreviated
    names.

    Raises:
        ValueError: It is no option, more than one, or one of OPTIONS_OF_DRUMLINE.
    """
    try:
        option, *value = shlex.split(_one_line(text)) or [""]
    except ValueError as error:
        raise ValueError(f"{text!r}: {first_line(error)}") from None
    name = re.match(r"--([\w-]+)|-(\w)", option)
    if name is None:
        raise ValueError(f"{text!r} is no option of sbatch: write --name=value")
    is_value_an_option = bool(value) and value[0].startswith("-")
    has_joined_flags = bool(name[2]) and name[2] in SHORT_FLAGS and len(option) > 2
    if len(value) > 1 or is_value_an_option or has_joined_flags:
        raise ValueError(f"{text!r} is more than one option: write each by itself")
    refused = _refused_option(name[1], name[2])
    if refused:
        raise ValueError(f"--{refused} cannot stand here: {OPTIONS_OF_DRUMLINE[refused]}")
    return text


def _refused_option(long_name: str | None, letter: str | None) -> str:
    """Return the name in OPTIONS_OF_DRUMLINE that an option stands for; empty if it is none."""
    if letter:
        return LONG_NAMES.get(letter, "")
    for name in sorted(OPTIONS_OF_DRUMLINE):
        if long_name and name.startswith(long_name):
            return name
    return ""


Name = Annotated[str, Field(pattern=r"^[^\s'\"\\#]+$")]


class SlurmOptions(LauncherSpec):
    """The keys from which a batch script is written."""

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
        """Number of GPUs of a node that the job requests, by `gpus` or else by `gres`."""
        if self.gpus:
            return self.gpus
        number = 0
        for part in (self.gres or "").split(","):
            # gpu, gpu:8 or gpu:a100:8, each optionally followed by a list in brackets.
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
        """Number of ranks of each node."""
        return self.nproc or self.gpus_of_node or 1

    @property
    def number_of_hosts(self) -> int:
        return self.nodes

    def host_ranks(self) -> tuple[int, ...]:
        return (self.ranks_of_node,) * self.nodes

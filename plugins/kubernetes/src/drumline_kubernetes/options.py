"""The keys of the section `launch` with kind kubernetes. This module does not import torch."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from drumline.config.launcher import LauncherSpec
from drumline.config.section import Section
from drumline.system.redact import SECRET

# The name of an object.
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Quantity = Annotated[
    str,
    Field(
        coerce_numbers_to_str=True, pattern=r"^[0-9]{1,12}(\.[0-9]{1,6})?(m|k|[KMGTPE]i|[MGTPE])?$"
    ),
]
Text = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^\S+$")]
Folder = Annotated[str, StringConstraints(max_length=512, pattern=r"^/[^\s:]*$")]


class Volume(Section):
    claim: Name = Field(
        description="The PersistentVolumeClaim. Several nodes need one that all may write to (ReadWriteMany)."
    )
    path: Folder = Field(description="Where it is mounted in the container.")
    read_only: bool = Field(
        False, description="Mount it read-only: data and models may be, the run folder may not."
    )


class Toleration(Section):
    key: Text | None = Field(None, description="Key of the taint; null: every taint.")
    value: Text | None = Field(None, description="Value of the taint; null: any.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Its effect; null: all effects."
    )


class SecretKey(Section):
    secret: Name = Field(description="The Secret that has the value.")
    key: Text | None = Field(
        None, description="The key in that Secret; null: the variable's own name."
    )


class KubernetesOptions(LauncherSpec):
    """The keys from which the objects of a run are made."""

    image: Text = Field(
        description="The container's image. drumline and drumline-kubernetes must be installed in it, and `python` be its interpreter."
    )
    namespace: Name = Field("default", description="The namespace in which the objects are made.")
    context: Text | None = Field(
        None,
        description="A context of the kubeconfig; null: its current one, or that of the pod this runs in.",
    )
    workload: Literal["auto", "TrainJob", "JobSet", "Job"] = Field(
        "auto", description="What is made; auto: the first of these that the cluster knows."
    )
    runtime: Name = Field("torch-distributed", description="The runtime of a TrainJob.")
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime", description="The kind of `runtime`."
    )
    nodes: int = Field(
        1,
        gt=0,
        le=4096,
        description="Pods, each on a node of its own where it takes all GPUs of one.",
    )
    gpus: int = Field(
        0,
        ge=0,
        le=64,
        description="GPUs of each pod, and its processes unless nproc says another number.",
    )
    gpu_resource: Text = Field(
        "nvidia.com/gpu", description="The resource name of the cluster's GPUs."
    )
    cpu: Quantity | None = Field(None, description="Cores of each pod: 16, 500m.")
    memory: Quantity | None = Field(
        None, description="Memory of each pod, requested and its limit: 64Gi."
    )
    shm: Quantity | None = Field(
        "8Gi",
        description="/dev/shm of each pod, which data workers and NCCL use. It counts as memory.",
    )
    node_selector: dict[Text, str] = Field({}, description="Labels that the nodes have.")
    tolerations: list[Toleration] = Field([], description="Taints of nodes that the pods tolerate.")
    volumes: list[Volume] = Field(
        [], description="Claims to mount. The run folder must lie on one of them."
    )
    workdir: Folder = Field(
        "/workspace",
        description="Where the config lies in the container, and its relative paths begin.",
    )
    env: dict[Variable, str] = Field(
        {}, description="Variables of the container, such as NCCL_DEBUG. No secrets."
    )
    secrets: dict[Variable, SecretKey] = Field(
        {}, description="Variables whose values come from Secrets of the cluster."
    )
    service_account: Name | None = Field(
        None, description="The pods' service account; null: the namespace's default."
    )
    image_pull_secrets: list[Name] = Field([], description="Secrets to pull the image with.")
    detach: bool = Field(False, description="Submit, and do not wait for the end.")

    @field_validator("env")
    @classmethod
    def _no_secret(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if SECRET.search(name):
                raise ValueError(
                    f"{name} would stand in the manifest for all to read: name a Secret of the cluster under launch.secrets"
                )
        return env

    @model_validator(mode="after")
    def _paths_differ(self) -> Self:
        paths = [volume.path for volume in self.volumes]
        if len(set(paths)) < len(paths):
            raise ValueError("two of launch.volumes have the same path")
        return self

    @property
    def processes_per_node(self) -> int:
        return self.nproc or max(1, self.gpus)

    def host_ranks(self) -> tuple[int, ...]:
        return (self.processes_per_node,) * self.nodes

    def volume_of(self, path: str) -> Volume | None:
        """Return the volume that a folder of the container lies on; None if it lies on none."""
        parts = PurePosixPath(path)
        there = [volume for volume in self.volumes if parts.is_relative_to(volume.path)]
        return max(there, key=lambda volume: len(volume.path), default=None)

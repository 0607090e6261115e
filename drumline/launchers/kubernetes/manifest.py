"""What is submitted: a TrainJob, JobSet or Job with its config and, for a Job, the service by which pods find each other. Dictionaries as
the API has them, each made into an object of its own library, which knows the fields.

TrainJob: https://www.kubeflow.org/docs/components/trainer; JobSet: https://jobset.sigs.k8s.io/docs; Job:
https://kubernetes.io/docs/concepts/workloads/controllers/job (indexed, with a pod failure policy).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from drumline.errors import DrumlineError, EnvironmentFault

if TYPE_CHECKING:
    from drumline.launchers.kubernetes.spec import KubernetesLauncher

CONTAINER = "node"  # Kubeflow's name for it; its torch runtime has it, too
PORT = 29500
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
APIS = {
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Job": "batch/v1",
}
RUN_LABEL = "drumline/run"


@dataclass(frozen=True)
class Submission:
    """A run under its name in the cluster. `config`: the text of its YAML; `path`: where the container has that; `command`: the
    container's."""

    launch: KubernetesLauncher
    name: str
    config: str
    path: PurePosixPath
    command: tuple[str, ...]

    def objects(self, workload: str) -> list[dict[str, Any]]:
        """The workload, then what belongs to it."""
        made = {"TrainJob": self._train_job, "JobSet": self._job_set, "Job": self._job}[workload]()
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(),
            "data": {self.path.name: self.config},
        }
        return [
            checked(each)
            for each in (made, config, *([self._service()] if workload == "Job" else []))
        ]

    def _metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "namespace": self.launch.namespace,
            "labels": {RUN_LABEL: self.name},
        }

    def _top(self, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": APIS[kind], "kind": kind, "metadata": self._metadata(), "spec": spec}

    def _train_job(self) -> dict[str, Any]:
        """Its runtime makes a JobSet of it, with the variables by which processes meet; what it has no key for is a patch of the pods."""
        launch, pod = self.launch, self._pod()
        container = pod.pop("containers")[0]
        del pod["restartPolicy"]
        pod["containers"] = [{"name": CONTAINER, "volumeMounts": container["volumeMounts"]}]
        patch = {"template": {"spec": {"template": {"spec": pod}}}, "name": CONTAINER}
        trainer = {
            "image": launch.image,
            "command": list(self.command),
            "env": container["env"],
            "numNodes": launch.nodes,
            "numProcPerNode": launch.processes_per_node,
            "resourcesPerNode": container["resources"],
        }
        spec = {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": launch.runtime_kind,
                "name": launch.runtime,
            },
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "drumline.launcher/kubernetes",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        }
        return self._top("TrainJob", spec)

    def _job_set(self) -> dict[str, Any]:
        """One replicated Job. When a pod fails, it starts all of them again."""
        first = f"{self.name}-{CONTAINER}-0-0.{self.name}"
        job = {
            "metadata": {"labels": {RUN_LABEL: self.name}},
            "spec": self._job_spec(first, restarts=0),
        }
        spec = {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": self.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": self.launch.max_restarts},
            "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": job}],
        }
        return self._top("JobSet", spec)

    def _job(self) -> dict[str, Any]:
        """When a pod fails, so do those that wait for it: each start takes as many failures as there are pods."""
        spec = self._job_spec(
            f"{self.name}-0.{self.name}", restarts=self.launch.max_restarts * self.launch.nodes
        )
        spec["template"]["spec"]["subdomain"] = self.name
        return self._top("Job", spec)

    def _job_spec(self, first: str, restarts: int) -> dict[str, Any]:
        """`first`: the host name of the first pod."""
        pod = self._pod()
        pod["containers"][0]["env"] += [
            {"name": "PET_NNODES", "value": str(self.launch.nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(self.launch.processes_per_node)},
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            {"name": "PET_MASTER_ADDR", "value": first},
            {"name": "PET_MASTER_PORT", "value": str(PORT)},
        ]
        return {
            "completions": self.launch.nodes,
            "parallelism": self.launch.nodes,
            "completionMode": "Indexed",
            "backoffLimit": restarts,
            "podReplacementPolicy": "Failed",  # not while the old one still saves
            # A node that is drained or lost is no failure of the run.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
            "template": {"metadata": {"labels": {RUN_LABEL: self.name}}, "spec": pod},
        }

    def _pod(self) -> dict[str, Any]:
        launch = self.launch
        mounts = [
            {
                "name": "config",
                "mountPath": str(self.path),
                "subPath": self.path.name,
                "readOnly": True,
            },
            *(
                {"name": f"claim-{i}", "mountPath": v.path, "readOnly": v.read_only}
                for i, v in enumerate(launch.volumes)
            ),
        ]
        volumes: list[dict[str, Any]] = [
            {"name": "config", "configMap": {"name": self.name}},
            *(
                {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": v.claim}}
                for i, v in enumerate(launch.volumes)
            ),
        ]
        if launch.shm:
            mounts.append({"name": "shm", "mountPath": "/dev/shm"})
            volumes.append(
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": launch.shm}}
            )
        container = {
            "name": CONTAINER,
            "image": launch.image,
            "command": list(self.command),
            "env": self._env(),
            "resources": self._resources(),
            "volumeMounts": mounts,
        }
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(launch.grace_seconds)
            + 30,  # for torchrun to kill first
            "containers": [container],
            "volumes": volumes,
            "nodeSelector": launch.node_selector,
            "tolerations": [
                {
                    "operator": "Exists" if t.value is None else "Equal",
                    **t.model_dump(exclude_none=True),
                }
                for t in launch.tolerations
            ],
            "serviceAccountName": launch.service_account,
            "imagePullSecrets": [{"name": name} for name in launch.image_pull_secrets],
        }
        return {key: value for key, value in pod.items() if value}

    def _env(self) -> list[dict[str, Any]]:
        secrets = {
            name: {"secretKeyRef": {"name": where.secret, "key": where.key or name}}
            for name, where in self.launch.secrets.items()
        }
        return [
            # By it torchrun's ranks know their run when pods start again.
            {
                "name": "PET_RDZV_ID",
                "value": self.name,
            },
            {"name": "PET_MAX_RESTARTS", "value": "0"},  # pods start again, and not what is in them
            # Torchrun of torch 2.13; before it: 30.
            {
                "name": "PET_SHUTDOWN_TIMEOUT",
                "value": str(int(self.launch.grace_seconds)),
            },
            *({"name": name, "value": value} for name, value in self.launch.env.items()),
            *({"name": name, "valueFrom": source} for name, source in secrets.items()),
        ]

    def _resources(self) -> dict[str, Any]:
        launch = self.launch
        wanted = {
            "cpu": launch.cpu,
            "memory": launch.memory,
            launch.gpu_resource: str(launch.gpus) if launch.gpus else None,
        }
        requests = {name: amount for name, amount in wanted.items() if amount}
        # Cores are not limited: a process that is throttled holds up the others.
        return {
            "requests": requests,
            "limits": {name: amount for name, amount in requests.items() if name != "cpu"},
        }

    def _service(self) -> dict[str, Any]:
        """It gives the pods of a Job names, also before they are ready."""
        selector = {"batch.kubernetes.io/job-name": self.name}
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(), "spec": spec}


def checked(manifest: dict[str, Any]) -> dict[str, Any]:
    """The same manifest, of which the models of its library know every field. They drop unknown ones without a word, so that a slip would
    be noticed in the cluster, if at all. Raises DrumlineError with the place of the first one, EnvironmentFault without the library."""
    kind = manifest["kind"]
    try:
        if kind in ("TrainJob", "JobSet"):
            from kubeflow_trainer_api import models

            known: Any = {
                "TrainJob": models.TrainerV1alpha1TrainJob,
                "JobSet": models.JobsetV1alpha2JobSet,
            }[kind]
            kept = known.from_dict(manifest).to_dict()
        else:
            from kubernetes import client

            api: Any = client.ApiClient()
            model = getattr(client, f"V1{kind}")
            if hasattr(model, "from_dict"):
                made = model.from_dict(manifest)
            else:  # before version 37 the API's client makes objects, out of an answer of a server
                made = api.deserialize(SimpleNamespace(data=json.dumps(manifest)), f"V1{kind}")
            kept = api.sanitize_for_serialization(made)
    except ImportError:
        raise missing() from None
    if lost := _lost(manifest, kept, kind):
        raise DrumlineError(f"a {kind} has no field {lost}", where="manifest")
    return manifest


def missing() -> EnvironmentFault:
    what = "the packages kubernetes and kubeflow-trainer-api are missing"
    return EnvironmentFault(
        what, where="launch.kind", fix="pip install kubernetes kubeflow-trainer-api"
    )


def _lost(given: Any, kept: Any, place: str) -> str | None:
    """The place of the first thing that is not there any more."""
    if isinstance(given, dict):
        for key, value in given.items():
            if value in ({}, []):
                continue
            if not isinstance(kept, dict) or key not in kept:
                return f"{place}.{key}"
            if lost := _lost(value, kept[key], f"{place}.{key}"):
                return lost
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(kept) != len(given):
            return place
        return next(
            (
                lost
                for i, pair in enumerate(zip(given, kept, strict=True))
                if (lost := _lost(*pair, f"{place}[{i}]"))
            ),
            None,
        )
    return None

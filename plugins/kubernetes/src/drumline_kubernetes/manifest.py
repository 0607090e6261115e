"""Make the objects that are submitted: a TrainJob, JobSet or Job, its config, and a Job's service.

They are dictionaries in the form of the API. Each is also made into an object of its own library,
which knows the fields.

TrainJob: https://www.kubeflow.org/docs/components/trainer; JobSet: https://jobset.sigs.k8s.io/docs;
Job: https://kubernetes.io/docs/concepts/workloads/controllers/job (indexed, with a pod failure
policy).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from drumline.errors import DrumlineError
from drumline.foreign import require_package
from drumline_kubernetes.options import KubernetesOptions

CONTAINER = "node"  # the name that Kubeflow and its torch runtime use
PORT = 29500
KILL_SECONDS = 30  # that torchrun may take to kill its ranks after their grace time
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
APIS = {
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Job": "batch/v1",
}
RUN_LABEL = "drumline/run"


@dataclass(frozen=True)
class Submission:
    """A run to submit.

    Attributes:
        name: Its name in the cluster.
        config: Text of its YAML.
        path: Path of that file in the container.
        command: Command of the container.
    """

    launch: KubernetesOptions
    name: str
    config: str
    path: PurePosixPath
    command: tuple[str, ...]

    def objects(self, workload: str) -> list[dict[str, Any]]:
        """Return the workload (TrainJob, JobSet or Job), then the objects that belong to it."""
        if workload == "TrainJob":
            made = [self._train_job(), self._config_map()]
        elif workload == "JobSet":
            made = [self._job_set(), self._config_map()]
        else:
            made = [self._job(), self._config_map(), self._service()]
        return [require_known_fields(each) for each in made]

    def _config_map(self) -> dict[str, Any]:
        """Return the ConfigMap that has the text of the config."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(),
            "data": {self.path.name: self.config},
        }

    def _metadata(self) -> dict[str, Any]:
        """Return the metadata of each object: its name, its namespace and a label with its run."""
        return {
            "name": self.name,
            "namespace": self.launch.namespace,
            "labels": {RUN_LABEL: self.name},
        }

    def _workload(self, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Return a workload of a kind."""
        return {
            "apiVersion": APIS[kind],
            "kind": kind,
            "metadata": self._metadata(),
            "spec": spec,
        }

    def _train_job(self) -> dict[str, Any]:
        """Return a TrainJob. Its runtime makes a JobSet of it, with the variables of torchrun.

        What a TrainJob has no key for is a patch of the pods.
        """
        launch = self.launch
        pod = self._pod()
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
        runtime = {
            "apiGroup": "trainer.kubeflow.org",
            "kind": launch.runtime_kind,
            "name": launch.runtime,
        }
        patched = {"template": {"spec": {"replicatedJobs": [patch]}}}
        patches = {
            "manager": "drumline.launcher/kubernetes",
            "trainingRuntimeSpec": patched,
        }
        spec = {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": [patches]}
        return self._workload("TrainJob", spec)

    def _job_set(self) -> dict[str, Any]:
        """Return a JobSet of one replicated Job. When a pod fails, it starts all of them again."""
        first = f"{self.name}-{CONTAINER}-0-0.{self.name}"
        labels = {RUN_LABEL: self.name}
        job = {
            "metadata": {"labels": labels},
            "spec": self._job_spec(first, restarts=0),
        }
        network = {
            "enableDNSHostnames": True,
            "subdomain": self.name,
            "publishNotReadyAddresses": True,
        }
        replicated = {"name": CONTAINER, "replicas": 1, "template": job}
        spec = {
            "network": network,
            "failurePolicy": {"maxRestarts": self.launch.max_restarts},
            "replicatedJobs": [replicated],
        }
        return self._workload("JobSet", spec)

    def _job(self) -> dict[str, Any]:
        """Return a Job.

        When a pod fails, the pods that wait for it fail as well, so each start takes as many
        failures as there are pods.
        """
        restarts = self.launch.max_restarts * self.launch.nodes
        spec = self._job_spec(f"{self.name}-0.{self.name}", restarts)
        spec["template"]["spec"]["subdomain"] = self.name
        return self._workload("Job", spec)

    def _job_spec(self, first: str, restarts: int) -> dict[str, Any]:
        """Return the spec of a Job.

        Args:
            first: Host name of the first pod.
            restarts: Number of failures of pods that the Job tolerates.
        """
        nodes = self.launch.nodes
        processes = self.launch.processes_per_node
        pod = self._pod()
        variables = pod["containers"][0]["env"]
        variables.append({"name": "PET_NNODES", "value": str(nodes)})
        variables.append({"name": "PET_NPROC_PER_NODE", "value": str(processes)})
        index = {"fieldRef": {"fieldPath": INDEX}}
        variables.append({"name": "PET_NODE_RANK", "valueFrom": index})
        variables.append({"name": "PET_MASTER_ADDR", "value": first})
        variables.append({"name": "PET_MASTER_PORT", "value": str(PORT)})
        # A node that is drained or lost is no failure of the run.
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rule = {"action": "Ignore", "onPodConditions": [disrupted]}
        labels = {RUN_LABEL: self.name}
        return {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": restarts,
            # A new pod must not start while the old one still saves.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": [rule]},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }

    def _pod(self) -> dict[str, Any]:
        """Return the spec of a pod of one container, without keys that have no value."""
        launch = self.launch
        container = {
            "name": CONTAINER,
            "image": launch.image,
            "command": list(self.command),
            "env": self._env(),
            "resources": self._resources(),
            "volumeMounts": self._mounts(),
        }
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(launch.grace_seconds) + KILL_SECONDS,
            "containers": [container],
            "volumes": self._volumes(),
            "nodeSelector": launch.node_selector,
            "tolerations": self._tolerations(),
            "serviceAccountName": launch.service_account,
            "imagePullSecrets": [{"name": name} for name in launch.image_pull_secrets],
        }
        return {key: value for key, value in pod.items() if value}

    def _mounts(self) -> list[dict[str, Any]]:
        """Return the mount of each volume in the container."""
        config = {
            "name": "config",
            "mountPath": str(self.path),
            "subPath": self.path.name,
            "readOnly": True,
        }
        mounts: list[dict[str, Any]] = [config]
        for number, volume in enumerate(self.launch.volumes):
            name = f"claim-{number}"
            mounts.append({"name": name, "mountPath": volume.path, "readOnly": volume.read_only})
        if self.launch.shm:
            mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        return mounts

    def _volumes(self) -> list[dict[str, Any]]:
        """Return the volumes of a pod: the config, the claims and the shared memory."""
        volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": self.name}}]
        for number, volume in enumerate(self.launch.volumes):
            claim = {"claimName": volume.claim}
            volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": claim})
        if self.launch.shm:
            memory = {"medium": "Memory", "sizeLimit": self.launch.shm}
            volumes.append({"name": "shm", "emptyDir": memory})
        return volumes

    def _tolerations(self) -> list[dict[str, Any]]:
        """Return the taints that a pod tolerates."""
        tolerations = []
        for each in self.launch.tolerations:
            if each.value is None:
                operator = "Exists"
            else:
                operator = "Equal"
            tolerations.append({"operator": operator, **each.model_dump(exclude_none=True)})
        return tolerations

    def _env(self) -> list[dict[str, Any]]:
        """Return the variables of the container: of torchrun, of the YAML, and of secrets."""
        launch = self.launch
        values = {
            # Torchrun's ranks recognise their run by it when pods start again.
            "PET_RDZV_ID": self.name,
            # Pods are started again, and not processes within them.
            "PET_MAX_RESTARTS": "0",
            # Torchrun reads it from torch 2.13 on; before, it waits 30 s.
            "PET_SHUTDOWN_TIMEOUT": str(int(launch.grace_seconds)),
            **launch.env,
        }
        variables: list[dict[str, Any]] = []
        for name, value in values.items():
            variables.append({"name": name, "value": value})
        for name, source in launch.secrets.items():
            reference = {"name": source.secret, "key": source.key or name}
            variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
        return variables

    def _resources(self) -> dict[str, Any]:
        """Return what a pod requests, and what it may use at most."""
        launch = self.launch
        requests: dict[str, Any] = {}
        if launch.cpu:
            requests["cpu"] = launch.cpu
        if launch.memory:
            requests["memory"] = launch.memory
        if launch.gpus:
            requests[launch.gpu_resource] = str(launch.gpus)
        # Cores are not limited: a process that is throttled holds up the others.
        limits = {name: amount for name, amount in requests.items() if name != "cpu"}
        return {"requests": requests, "limits": limits}

    def _service(self) -> dict[str, Any]:
        """Return the service that gives the pods of a Job names, also before they are ready."""
        selector = {"batch.kubernetes.io/job-name": self.name}
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(),
            "spec": spec,
        }


def require_known_fields(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the same manifest, after a check that its library knows every field.

    The models of the libraries drop unknown fields silently, so that a slip would be noticed in the
    cluster, if at all. Raises DrumlineError with the place of the first unknown field, and
    EnvironmentFault if a library is missing.
    """
    kind = manifest["kind"]
    if kind in ("TrainJob", "JobSet"):
        kept = _kept_by_kubeflow(manifest)
    else:
        kept = _kept_by_kubernetes(manifest)
    lost = _first_lost(manifest, kept, kind)
    if lost:
        raise DrumlineError(f"a {kind} has no field {lost}", where="manifest")
    return manifest


def _kept_by_kubeflow(manifest: dict[str, Any]) -> Any:
    """Return what Kubeflow's models keep of a TrainJob or a JobSet."""
    require_package("kubeflow_trainer_api", "launch.kind")
    from kubeflow_trainer_api import models

    if manifest["kind"] == "TrainJob":
        model: Any = models.TrainerV1alpha1TrainJob
    else:
        model = models.JobsetV1alpha2JobSet
    return model.from_dict(manifest).to_dict()


def _kept_by_kubernetes(manifest: dict[str, Any]) -> Any:
    """Return what the models of Kubernetes keep of a manifest."""
    require_package("kubernetes", "launch.kind")
    from kubernetes import client

    kind = manifest["kind"]
    api: Any = client.ApiClient()
    model = getattr(client, f"V1{kind}")
    if hasattr(model, "from_dict"):
        made = model.from_dict(manifest)
    else:
        # Before version 37 the API's client makes objects, out of an answer of a server.
        made = api.deserialize(SimpleNamespace(data=json.dumps(manifest)), f"V1{kind}")
    return api.sanitize_for_serialization(made)


def _first_lost(given: Any, kept: Any, place: str) -> str | None:
    """Return the place of the first field of `given` that is not in `kept`; None if all are."""
    if isinstance(given, dict):
        return _first_lost_in_object(given, kept, place)
    if isinstance(given, list):
        return _first_lost_in_list(given, kept, place)
    return None


def _first_lost_in_list(given: list[Any], kept: Any, place: str) -> str | None:
    """Do the same as `_first_lost` for a list. A list of another length is lost as a whole."""
    if not isinstance(kept, list) or len(kept) != len(given):
        return place
    for number, value in enumerate(given):
        lost = _first_lost(value, kept[number], f"{place}[{number}]")
        if lost:
            return lost
    return None


def _first_lost_in_object(given: dict[str, Any], kept: Any, place: str) -> str | None:
    """Do the same as `_first_lost` for an object. The models leave out empty values."""
    for key, value in given.items():
        if value in ({}, []):
            continue
        if not isinstance(kept, dict) or key not in kept:
            return f"{place}.{key}"
        lost = _first_lost(value, kept[key], f"{place}.{key}")
        if lost:
            return lost
    return None

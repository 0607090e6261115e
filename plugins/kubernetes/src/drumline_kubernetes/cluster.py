"""The API server, by the official client: what the cluster knows, objects made and removed, pods, events and logs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

from drumline.errors import EnvironmentFault
from drumline.foreign import first_line
from drumline_kubernetes.manifest import APIS, CONTAINER, missing
from drumline.system.redact import redact

if TYPE_CHECKING:
    from drumline_kubernetes.spec import KubernetesLauncher

ANSWER_SECONDS = 30.0  # the most that one request may take
GONE = 404


class Unreachable(EnvironmentFault):
    """Nothing answers, or not now: it may later."""


class Refused(EnvironmentFault):
    """The server's own words. `status`: HTTP's."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(
            what,
            where="Kubernetes",
            fix="see `kubectl auth can-i`, quotas and the names in launch"
            if status != GONE
            else None,
        )
        self.status = status


class Cluster:
    """One namespace of it."""

    def __init__(self, api: Any, launch: KubernetesLauncher) -> None:
        from kubernetes import client

        self.core: Any = client.CoreV1Api(api)
        self.custom: Any = client.CustomObjectsApi(api)
        self.groups: Any = client.ApisApi(api)
        self.launch, self.namespace = launch, launch.namespace

    @classmethod
    def connect(cls, launch: KubernetesLauncher) -> Cluster:
        """By the kubeconfig, or in a pod by its service account. Raises EnvironmentFault where there is neither."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise missing() from None
        try:
            return cls(
                config.new_client_from_config(os.environ.get("KUBECONFIG"), launch.context), launch
            )
        except (OSError, yaml.YAMLError) as error:
            fix = "set KUBECONFIG to a file that you may read"
            raise EnvironmentFault(
                f"the kubeconfig cannot be read: {first_line(error)}",
                where="launch.context",
                fix=fix,
            ) from None
        except config.ConfigException as error:
            try:
                inside = client.Configuration()
                config.load_incluster_config(client_configuration=inside)
                return cls(client.ApiClient(inside), launch)
            except config.ConfigException:
                fix = "set KUBECONFIG, or launch.context to one of `kubectl config get-contexts`"
                raise EnvironmentFault(
                    f"no cluster is known: {error}", where="launch.context", fix=fix
                ) from None

    def workload(self) -> str:
        """The one of `launch.workload`; for auto the first that the cluster knows. Raises EnvironmentFault for one that it lacks."""
        there = {group.name for group in _answer(self.groups.get_api_versions).groups}
        known = [kind for kind, api in APIS.items() if api.partition("/")[0] in {*there, "batch"}]
        if self.launch.workload == "auto":
            return known[0]
        if self.launch.workload not in known:
            what = f"the cluster knows no {self.launch.workload}"
            raise EnvironmentFault(
                what,
                where="launch.workload",
                fix=f"use {' or '.join(known)}, or have its operator installed",
            )
        return self.launch.workload

    def create(self, objects: list[dict[str, Any]]) -> str:
        """Make the workload, and the rest as its property, so that what removes it removes all. Returns its uid."""
        workload, *rest = objects
        name = workload["metadata"]["name"]
        uid = str(
            _answer(
                self.custom.create_namespaced_custom_object,
                *self._of(workload["apiVersion"]),
                workload,
            )["metadata"]["uid"]
        )
        owner = {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": name,
            "uid": uid,
        }
        make = {
            "ConfigMap": self.core.create_namespaced_config_map,
            "Service": self.core.create_namespaced_service,
        }
        try:
            for each in rest:
                body = {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
                _answer(make[each["kind"]], self.namespace, body)
        except EnvironmentFault:
            self.delete(workload["apiVersion"], name)
            raise
        return uid

    def read(self, api: str, name: str) -> dict[str, Any]:
        """A workload as it is now."""
        found: dict[str, Any] = _answer(
            self.custom.get_namespaced_custom_object, *self._of(api), name
        )
        return found

    def delete(self, api: str, name: str) -> None:
        """Its pods get SIGTERM and have their grace time; it goes after them."""
        try:
            _answer(
                self.custom.delete_namespaced_custom_object,
                *self._of(api),
                name,
                body={"propagationPolicy": "Foreground"},
            )
        except Refused as refused:
            if refused.status != GONE:  # somebody else has
                raise

    def pods(self, api: str, name: str) -> list[Any]:
        label = (
            "batch.kubernetes.io/job-name"
            if api == APIS["Job"]
            else "jobset.sigs.k8s.io/jobset-name"
        )
        return list(
            _answer(
                self.core.list_namespaced_pod, self.namespace, label_selector=f"{label}={name}"
            ).items
        )

    def warnings(self, name: str) -> Iterator[Any]:
        """Events that are warnings, of the workload and of all that was made for it."""
        for event in _answer(
            self.core.list_namespaced_event, self.namespace, field_selector="type=Warning"
        ).items:
            if event.involved_object.name == name or str(event.involved_object.name).startswith(
                f"{name}-"
            ):
                yield event

    def log(self, pod: str, follow: bool = True) -> Iterator[bytes]:
        """What a pod prints, from its beginning, as it comes; to its end, or as far as it is."""
        with _faults():
            answer = self.core.read_namespaced_pod_log(
                pod, self.namespace, container=CONTAINER, follow=follow, _preload_content=False
            )
            yield from answer.stream(decode_content=True)

    def _of(self, api: str) -> tuple[str, str, str, str]:
        group, version = api.split("/")
        plural = {api: f"{kind.lower()}s" for kind, api in APIS.items()}[api]
        return group, version, self.namespace, plural


def _answer(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with _faults():
        return call(*arguments, **options, _request_timeout=ANSWER_SECONDS)


@contextmanager
def _faults() -> Iterator[None]:
    """Raises Refused and Unreachable for what the client raises."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ApiException, HTTPError) as error:
        what = (
            f"{error.status} {error.reason}: {_message(error.body)}"
            if isinstance(error, ApiException)
            else str(error)
        )
        if isinstance(error, ApiException) and not _passing(error.status):
            raise Refused(error.status, redact(what)) from None
        raise Unreachable(
            f"the API server does not answer: {redact(what)}",
            where="Kubernetes",
            fix="see `kubectl version`",
        ) from None


def _passing(status: int) -> bool:
    """Whether a server that restarts or is busy, or what stands before it, may answer so: 0 is TLS that breaks off."""
    return status in (0, 429) or status >= 500


def _message(body: Any) -> str:
    """The reason in an answer, which is a Status of JSON, if the server itself wrote it."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(body)[:200]

"""Talk to the API server by the official client: make, read and remove objects, read logs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from drumline.errors import EnvironmentFault
from drumline.foreign import first_line, require_package
from drumline.system.redact import redact
from drumline_kubernetes.manifest import APIS, CONTAINER
from drumline_kubernetes.options import KubernetesOptions

# How long one request may take.
ANSWER_SECONDS = 30.0
GONE = 404
# Characters that are shown of an answer that is no JSON.
MESSAGE_CHARACTERS = 200


class Unreachable(EnvironmentFault):
    """The server does not answer now. It may answer later."""


class Refused(EnvironmentFault):
    """The server refuses a request. The message has its own words, and `status` is that of HTTP."""

    def __init__(self, status: int, what: str) -> None:
        fix = None
        if status != GONE:
            fix = "see `kubectl auth can-i`, quotas and the names in launch"
        super().__init__(what, where="Kubernetes", fix=fix)
        self.status = status


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, api: Any, launch: KubernetesOptions) -> None:
        from kubernetes import client

        self.core: Any = client.CoreV1Api(api)
        self.custom: Any = client.CustomObjectsApi(api)
        self.groups: Any = client.ApisApi(api)
        self.launch = launch
        self.namespace = launch.namespace

    @classmethod
    def connect(cls, launch: KubernetesOptions) -> Cluster:
        """Return the cluster of the kubeconfig, or in a pod that of its service account.

        Raises:
            EnvironmentFault: There is neither, or the package kubernetes is missing.
        """
        require_package("kubernetes", "launch.kind")
        from kubernetes import config

        kubeconfig = os.environ.get("KUBECONFIG")
        try:
            api = config.new_client_from_config(kubeconfig, launch.context)
        except (OSError, yaml.YAMLError) as error:
            what = f"the kubeconfig cannot be read: {first_line(error)}"
            fix = "set KUBECONFIG to a file that you may read"
            raise EnvironmentFault(what, where="launch.context", fix=fix) from None
        except config.ConfigException as error:
            api = _client_in_pod(error)
        return cls(api, launch)

    def workload(self) -> str:
        """Return the kind of workload to make: `launch.workload`, or for auto the first known one.

        Raises:
            EnvironmentFault: The cluster does not know the kind.
        """
        answer = _answer(self.groups.get_api_versions)
        groups = {group.name for group in answer.groups}
        # Every cluster has Jobs, and does not list their group everywhere.
        groups.add("batch")
        known = [kind for kind, api in APIS.items() if _group_of(api) in groups]
        wanted: str = self.launch.workload
        if wanted == "auto":
            return known[0]
        if wanted not in known:
            what = f"the cluster knows no {wanted}"
            fix = f"use {' or '.join(known)}, or have its operator installed"
            raise EnvironmentFault(what, where="launch.workload", fix=fix)
        return wanted

    def create(self, objects: list[dict[str, Any]]) -> str:
        """Make the workload and then the objects that it owns, and return the workload's uid.

        The workload is the first of `objects`. Its removal removes all objects that it owns.
        """
        workload, *owned = objects
        api = workload["apiVersion"]
        name = workload["metadata"]["name"]
        make = self.custom.create_namespaced_custom_object
        made = _answer(make, *self._resource(api), workload)
        uid = str(made["metadata"]["uid"])
        owner = {"apiVersion": api, "kind": workload["kind"], "name": name, "uid": uid}
        try:
            for each in owned:
                self._create_owned(each, owner)
        except EnvironmentFault:
            self.delete(api, name)
            raise
        return uid

    def _create_owned(self, body: dict[str, Any], owner: dict[str, Any]) -> None:
        """Make a ConfigMap or a Service that goes with its owner."""
        if body["kind"] == "ConfigMap":
            make = self.core.create_namespaced_config_map
        else:
            make = self.core.create_namespaced_service
        metadata = {**body["metadata"], "ownerReferences": [owner]}
        _answer(make, self.namespace, {**body, "metadata": metadata})

    def read(self, api: str, name: str) -> dict[str, Any]:
        """Return a workload as it is now."""
        read = self.custom.get_namespaced_custom_object
        found: dict[str, Any] = _answer(read, *self._resource(api), name)
        return found

    def delete(self, api: str, name: str) -> None:
        """Remove a workload. Its pods get SIGTERM and their grace time, and it goes after them."""
        delete = self.custom.delete_namespaced_custom_object
        body = {"propagationPolicy": "Foreground"}
        try:
            _answer(delete, *self._resource(api), name, body=body)
        except Refused as refused:
            # If it is gone, somebody else has removed it.
            if refused.status != GONE:
                raise

    def pods(self, api: str, name: str) -> list[Any]:
        """Return the pods of a workload."""
        if api == APIS["Job"]:
            label = "batch.kubernetes.io/job-name"
        else:
            label = "jobset.sigs.k8s.io/jobset-name"
        selector = f"{label}={name}"
        answer = _answer(self.core.list_namespaced_pod, self.namespace, label_selector=selector)
        return list(answer.items)

    def warnings(self, name: str) -> Iterator[Any]:
        """Yield the events that are warnings, of the workload and of all that was made for it."""
        selector = "type=Warning"
        answer = _answer(self.core.list_namespaced_event, self.namespace, field_selector=selector)
        for event in answer.items:
            involved = str(event.involved_object.name)
            if involved == name or involved.startswith(f"{name}-"):
                yield event

    def log(self, pod: str, follow: bool = True) -> Iterator[bytes]:
        """Yield what a pod has printed and, if `follow`, what it prints until its end."""
        with _translate_errors():
            answer = self.core.read_namespaced_pod_log(
                pod, self.namespace, container=CONTAINER, follow=follow, _preload_content=False
            )
            yield from answer.stream(decode_content=True)

    def _resource(self, api: str) -> tuple[str, str, str, str]:
        """Return the group, version, namespace and plural that the client needs for an API."""
        group, version = api.split("/")
        (kind,) = [kind for kind, known in APIS.items() if known == api]
        return group, version, self.namespace, f"{kind.lower()}s"


def _client_in_pod(no_kubeconfig: Exception) -> Any:
    """Return a client with the service account of this pod. Raises EnvironmentFault without one."""
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        what = f"no cluster is known: {no_kubeconfig}"
        fix = "set KUBECONFIG, or launch.context to one of `kubectl config get-contexts`"
        raise EnvironmentFault(what, where="launch.context", fix=fix) from None
    return client.ApiClient(configuration)


def _group_of(api: str) -> str:
    """Return the group of an API: `batch` of `batch/v1`."""
    return api.partition("/")[0]


def _answer(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the answer of the server to a request. Raises Refused and Unreachable."""
    with _translate_errors():
        return call(*arguments, **options, _request_timeout=ANSWER_SECONDS)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Within the block, raise Refused or Unreachable in place of the client's errors."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        what = redact(f"{error.status} {error.reason}: {_message(error.body)}")
        if _is_passing(error.status):
            raise _unreachable(what) from None
        raise Refused(error.status, what) from None
    except HTTPError as error:
        raise _unreachable(redact(str(error))) from None


def _unreachable(why: str) -> Unreachable:
    """Return the error of a server that does not answer, to be raised."""
    what = f"the API server does not answer: {why}"
    return Unreachable(what, where="Kubernetes", fix="see `kubectl version`")


def _is_passing(status: int) -> bool:
    """Return whether a request may succeed later, since the server or its proxy is busy or restarts.

    A status of 0 is a TLS connection that broke off.
    """
    return status in (0, 429) or status >= 500


def _message(body: Any) -> str:
    """Return the reason in an answer. It is JSON if the server wrote it, and not a proxy."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(body)[:MESSAGE_CHARACTERS]

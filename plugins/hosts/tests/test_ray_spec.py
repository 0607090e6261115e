"""What `launch.kind: ray` says before there is a cluster, and what it makes of Ray's own errors."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.config.launcher import LauncherSpec
from drumline.config.load import load_values
from drumline.config.registry import make
from drumline.errors import ConfigError, EnvironmentFault
from drumline_hosts.gathered import gather_hosts
from drumline_hosts.ray.start import _connect, reason
from tests.distributed.ranks import free_port

DATA = {"data": {"train": [{"kind": "file", "path": "rows.jsonl"}]}}


def launcher(**values: Any) -> Any:
    return make(LauncherSpec, "ray", **values)


def test_what_an_actor_takes_of_its_node() -> None:
    spec = launcher(nodes=3, gpus=4, cpus=8, resources={"accelerator_type:H100": 0.001})
    assert spec.bundle == {"CPU": 8, "GPU": 4, "accelerator_type:H100": 0.001}
    assert spec.host_ranks() == (4, 4, 4)
    assert spec.processes() == 12
    assert launcher(nodes=2, nproc=3).processes() == 6
    assert launcher().bundle == {"CPU": 1}


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="ray job submit"):
        load_values({**DATA, "launch": {"kind": "ray", "address": "ray://head:10001"}}, [])
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match="the package ray is missing — pip install ray"):
        gather_hosts(launcher())


def test_a_cluster_that_is_not_there() -> None:
    pytest.importorskip("ray", reason="the package ray is not installed")
    with pytest.raises(EnvironmentFault, match=r"no Ray cluster at 127.0.0.1:.*Connection refused"):
        gather_hosts(launcher(address=f"127.0.0.1:{free_port()}"))
    with pytest.raises(EnvironmentFault, match="'head' is no address"):
        gather_hosts(launcher(address="head"))


def test_a_node_that_takes_too_long_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception then."""

    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore lines.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with pytest.raises(EnvironmentFault, match="no Ray cluster: The current node timed out"):
        _connect(None)


DIED = (
    "The actor died unexpectedly before finishing this task. "
    "class_name: Node actor_id: 1 pid: 5 ip: 10.0.0.7"
)
NODE_DIED = f"{DIED} The actor died because its node has died. Node Id: abc"
WORKER_DIED = (
    f"{DIED} Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "(1) killed by the OOM killer due to high memory usage. (2) …"
)


def test_reasons() -> None:
    exceptions = pytest.importorskip("ray", reason="the package ray is not installed").exceptions
    assert reason(exceptions.ActorDiedError(None)) == "its actor died"
    node = exceptions.RayActorError(error_msg=NODE_DIED)
    assert reason(node) == "its node died: Ray has lost the actor on 10.0.0.7"
    worker = exceptions.RayActorError(error_msg=WORKER_DIED)
    assert reason(worker) == "its actor on 10.0.0.7 died (SYSTEM_ERROR)"
    low = exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    assert reason(low) == "the node ran out of memory, and Ray killed the actor"
    # No word of it may make the end of a rank look like another one's consequence.
    gone = exceptions.ActorUnavailableError(
        "RpcError: failed to connect to all addresses: Connection refused", None
    )
    assert reason(gone) == "its node died, or is cut off: Ray cannot reach the actor"

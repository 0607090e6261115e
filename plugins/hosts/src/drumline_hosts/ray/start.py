"""Run the agents of several hosts as actors of Ray.

In the cluster a placement group has a bundle of resources for each host. An actor in each bundle
runs the host's agent. This module does not import torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from drumline.errors import EnvironmentFault
from drumline.foreign import first_line, require_package
from drumline.system.network import require_interface
from drumline.system.process import Helper, tied_arguments, wait_for_exit
from drumline.system.redact import redact
from drumline_hosts.coordinator import AGENT, Hosts
from drumline_hosts.link import Message
from drumline_hosts.ray.options import RayOptions
from drumline_hosts.timing import (
    ANSWER_SECONDS,
    LEAVE_SECONDS,
    PLACE_SECONDS,
)


class Node:
    """An actor that runs the agent of a node. The agent dies with the actor."""

    agent: Helper | None = None
    failed: str | None = None

    def where(self) -> dict[str, str]:
        """Return the host name, the address and Ray's id of the node that this actor runs on."""
        import ray

        context = ray.get_runtime_context()
        return {
            "host": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "id": context.get_node_id(),
        }

    def start(self, settings: Message, workdir: str) -> None:
        """Start the agent, in place of one that was started before. `why_ended` says if that failed."""
        self.close(0.0)
        self.agent = None
        self.failed = None
        command = [sys.executable, *tied_arguments(AGENT)]
        try:
            self.agent = Helper(command, workdir, _print_line)
        except OSError as error:
            self.failed = f"its agent cannot start in {workdir}: {error.strerror} (launch.workdir)"
            return
        self.agent.tell(json.dumps(settings))

    def why_ended(self) -> str | None:
        """Return why the agent has ended; None if it runs or was not started yet."""
        if self.agent is None or self.agent.poll() is None:
            return self.failed
        return self.agent.last() or f"its agent ended with {self.agent.returncode}"

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Kill the agent if it does not end by itself within so many seconds."""
        if self.agent is not None:
            wait_for_exit(self.agent, seconds)
            self.agent.end()


def _print_line(line: str) -> None:
    print(redact(line), file=sys.stderr)


class Actors:
    """The agents of a run on Ray, by the names of their nodes."""

    def __init__(self, spec: RayOptions, group: Any) -> None:
        """Start an actor in each bundle of the placement group.

        Raises:
            EnvironmentFault: An actor cannot start.
        """
        self.spec = spec
        self.group = group
        actors = [self._actor(index) for index in range(spec.nodes)]
        found = _answers([actor.where.remote() for actor in actors], PLACE_SECONDS)
        self.names = _unique_names(found)
        self.actors: dict[str, Any] = dict(zip(self.names, actors, strict=True))
        self.ips = [each["ip"] for each in found]

    def _actor(self, index: int) -> Any:
        """Return a new actor in a bundle of the placement group."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self.spec
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options: dict[str, Any] = {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "resources": dict(spec.resources),
        }
        actor = ray.remote(Node).options(**options, scheduling_strategy=place, max_restarts=0)
        return actor.remote()

    def start(self, name: str, settings: Message) -> None:
        """Start an agent in its actor.

        If the actor has died it is a new one, on the node to which Ray has moved its bundle.
        """
        if self._failure(name) is not None:
            self.actors[name] = self._actor(self.names.index(name))
        self.actors[name].start.remote(settings, self.spec.workdir or str(Path.cwd()))

    def why_ended(self, name: str) -> str | None:
        """Return why an agent or its actor has ended; None if it may still run."""
        import ray

        try:
            return ray.get(self.actors[name].why_ended.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return reason(error)

    def _failure(self, name: str) -> str | None:
        """Return why an actor has died; None if it answers, or may only be busy."""
        import ray

        try:
            ray.get(self.actors[name].where.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return reason(error)
        return None

    def close(self) -> None:
        """End all agents and their actors, and give the bundles back to the cluster."""
        import ray

        closing = [actor.close.remote() for actor in self.actors.values()]
        ray.wait(closing, num_returns=len(closing), timeout=LEAVE_SECONDS)
        ray.util.remove_placement_group(self.group)
        ray.shutdown()


def _unique_names(found: list[dict[str, str]]) -> list[str]:
    """Return a name for each node: that of its host, with more if several nodes are on one host."""
    hosts = [each["host"] for each in found]
    names = []
    for each in found:
        host = each["host"]
        if hosts.count(host) == 1:
            names.append(host)
        else:
            # Ray's own name of the node tells them apart.
            names.append(f"{host}/{each['id'][:8]}")
    if len(set(names)) < len(names):
        return [f"{name}#{index}" for index, name in enumerate(names)]
    return names


def reason(error: Exception) -> str:
    """Return in one line why an actor died or cannot be reached, from Ray's long error.

    Ray's own message lists all possible causes.
    """
    import ray

    text = " ".join(str(error).split())
    place = re.search(r"\bip: (\S+)", text)
    on = ""
    if place is not None:
        on = f" on {place[1]}"
    is_out_of_memory = "running low on memory" in text or "memory pressure" in text
    if is_out_of_memory or isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"the node ran out of memory, and Ray killed the actor{on}"
    has_node_died = "node has died" in text or "node was terminated" in text
    if has_node_died or isinstance(error, ray.exceptions.NodeDiedError):
        return f"its node died: Ray has lost the actor{on}"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return f"its node died, or is cut off: Ray cannot reach the actor{on}"
    detail = re.search(r"Worker exit type: (\w+)", text)
    if detail is not None:
        return f"its actor{on} died ({detail[1]})"
    return f"its actor{on} died"


def make_hosts(spec: RayOptions) -> Hosts:
    """Return the nodes of a spec, without agents.

    Raises:
        EnvironmentFault: There is no such cluster, or it has no room.
    """
    actors = Actors(spec, _make_placement_group(spec))
    if spec.interface:
        address = require_interface(spec.interface)
    else:
        address = _own_ip()
    return Hosts(actors.names, actors, address, spec.port, spec.interface, actors.ips)


def require_head(address: str) -> None:
    """Check that a process listens at HOST:PORT. Ray itself would try for minutes.

    Raises:
        EnvironmentFault: It is no HOST:PORT, or nobody listens there.
    """
    host, _, port = address.rpartition(":")
    fix = "give HOST:PORT of its head, or auto on a node of it; to start one: ray start --head"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise EnvironmentFault(
            f"{address!r} is no address of a Ray cluster", where="launch.address", fix=fix
        )
    try:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise EnvironmentFault(
            f"no Ray cluster at {address}: {error.strerror or error}",
            where="launch.address",
            fix=fix,
        ) from None


def _make_placement_group(spec: RayOptions) -> Any:
    """Return the placement group, in the cluster of `spec.address`.

    Raises EnvironmentFault if there is no cluster, or no room in it.
    """
    require_package("ray", "launch.kind")
    import ray

    if spec.address not in (None, "auto"):
        require_head(spec.address)
    _connect(spec.address)
    group = ray.util.placement_group([spec.bundle] * spec.nodes, strategy=spec.placement)
    if not group.wait(PLACE_SECONDS):
        descriptions = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            resources = node["Resources"]
            amounts = [f"{name} {resources.get(name, 0):g}" for name in spec.bundle]
            descriptions.append(", ".join(amounts))
        ray.shutdown()
        what = f"the cluster has no room for {spec.nodes} × {spec.bundle} ({spec.placement}); its nodes have {'; '.join(descriptions)}"
        raise EnvironmentFault(
            what, where="launch.nodes", fix="ask for less, or use placement: PACK"
        )
    return group


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this host without an address.

    Raises EnvironmentFault if there is no cluster.
    """
    import ray

    # A Ray that starts here sends nothing to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    options: dict[str, Any]
    if address:
        options = {"address": address}
    else:
        options = {"address": "local", "include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # noqa: BLE001 - Ray's own if its node takes too long to start
        raise EnvironmentFault(
            f"no Ray cluster: {first_line(error)}",
            where="launch.address",
            fix="start one: ray start --head",
        ) from None
    finally:
        for number, handler in handlers.items():
            # Ray may have set a handler of its own.
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _own_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _answers(references: list[Any], seconds: float) -> list[Any]:
    """Return the answers of actors, which have `seconds` in all.

    Raises:
        EnvironmentFault: An actor cannot start.
    """
    import ray

    until = time.monotonic() + seconds
    answers = []
    try:
        for reference in references:
            remaining = max(1.0, until - time.monotonic())
            answers.append(ray.get(reference, timeout=remaining))
    except ray.exceptions.RayError as error:
        fix = "install drumline on all nodes, for the same Python"
        raise EnvironmentFault(
            f"an actor cannot start: {reason(error)}", where="launch.kind", fix=fix
        ) from None
    return answers

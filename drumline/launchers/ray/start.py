"""Ray's side of a run: a cluster, a placement group, and an actor in each bundle that holds the agent of its node. No torch here."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.core.network import require_interface
from drumline.core.process import Helper, exit_code, tied
from drumline.core.redact import redact
from drumline.errors import EnvironmentFault
from drumline.foreign import first_line, require_package
from drumline.launchers.hosts.coordinator import AGENT, LEAVE_SECONDS, Hosts
from drumline.launchers.hosts.link import Message

if TYPE_CHECKING:
    from drumline.launchers.ray.spec import RayLauncher

ANSWER_SECONDS = (
    5.0  # for an actor that is there; a node that is gone is noticed by the link to its agent
)
PLACE_SECONDS = 120.0  # for the placement group, and for what an actor imports


class Node:
    """In an actor: the agent of its node, which dies with it."""

    agent: Helper | None = None
    failed: str | None = None

    def where(self) -> dict[str, str]:
        import ray

        context = ray.get_runtime_context()
        return {
            "host": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "id": context.get_node_id(),
        }

    def start(self, settings: Message, workdir: str) -> None:
        self.close(0.0)
        self.agent = self.failed = None
        try:
            self.agent = Helper(
                [sys.executable, *tied(AGENT)],
                workdir,
                lambda line: print(redact(line), file=sys.stderr),
            )
        except OSError as error:
            self.failed = f"its agent cannot start in {workdir}: {error.strerror} (launch.workdir)"
            return
        self.agent.tell(json.dumps(settings))

    def ended(self) -> str | None:
        if self.agent is None or self.agent.poll() is None:
            return self.failed
        return self.agent.last() or f"its agent ended with {self.agent.returncode}"

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        if self.agent is not None:
            exit_code(self.agent, seconds)
            self.agent.end()


class Actors:
    """The agents of a RayLauncher, by the names of their nodes."""

    def __init__(self, spec: RayLauncher, group: Any) -> None:
        self.spec, self.group = spec, group
        actors = [self._actor(index) for index in range(spec.nodes)]
        found = _answers([actor.where.remote() for actor in actors], PLACE_SECONDS)
        hosts = [each["host"] for each in found]
        # Several may be of one host: then Ray's own name of the node tells them apart.
        unique = [
            name if hosts.count(name) == 1 else f"{name}/{each['id'][:8]}"
            for name, each in zip(hosts, found, strict=True)
        ]
        self.names = (
            unique
            if len(set(unique)) == len(unique)
            else [f"{name}#{index}" for index, name in enumerate(unique)]
        )
        self.actors: dict[str, Any] = dict(zip(self.names, actors, strict=True))
        self.ips = [each["ip"] for each in found]

    def _actor(self, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self.spec
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options: dict[str, Any] = {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "resources": dict(spec.resources),
        }
        return (
            ray.remote(Node).options(**options, scheduling_strategy=place, max_restarts=0).remote()
        )

    def start(self, name: str, settings: Message) -> None:
        """In the actor that is there, or where that has died in a new one, on the node that Ray has put its bundle on meanwhile."""
        if self._failure(name) is not None:
            self.actors[name] = self._actor(self.names.index(name))
        self.actors[name].start.remote(settings, self.spec.workdir or str(Path.cwd()))

    def ended(self, name: str) -> str | None:
        import ray

        try:
            return ray.get(self.actors[name].ended.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return reason(error)

    def _failure(self, name: str) -> str | None:
        """Why an actor is there no longer."""
        import ray

        try:
            ray.get(self.actors[name].where.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return reason(error)
        return None

    def close(self) -> None:
        import ray

        ray.wait(
            [actor.close.remote() for actor in self.actors.values()],
            num_returns=len(self.actors),
            timeout=LEAVE_SECONDS,
        )
        ray.util.remove_placement_group(self.group)
        ray.shutdown()


def reason(error: Exception) -> str:
    """What Ray says of an actor that it cannot reach or that died, in a line. Not in Ray's own words, which are a list of what may be."""
    import ray

    text = " ".join(str(error).split())
    found = re.search(r"\bip: (\S+)", text)
    on = f" on {found[1]}" if found else ""
    if (
        isinstance(error, ray.exceptions.OutOfMemoryError)
        or "running low on memory" in text
        or "memory pressure" in text
    ):
        return f"the node ran out of memory, and Ray killed the actor{on}"
    if (
        isinstance(error, ray.exceptions.NodeDiedError)
        or "node has died" in text
        or "node was terminated" in text
    ):
        return f"its node died: Ray has lost the actor{on}"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return f"its node died, or is cut off: Ray cannot reach the actor{on}"
    detail = re.search(r"Worker exit type: (\w+)", text)
    return f"its actor{on} died" + (f" ({detail[1]})" if detail else "")


def make_hosts(spec: RayLauncher) -> Hosts:
    """The nodes of a spec, without agents. Raises EnvironmentFault where they cannot be had."""
    actors = Actors(spec, _placed(spec))
    address = require_interface(spec.interface) if spec.interface else _own_ip()
    return Hosts(actors.names, actors, address, spec.port, spec.interface, actors.ips)


def require_head(address: str) -> None:
    """Raises EnvironmentFault where nobody listens at HOST:PORT; Ray itself would try for minutes."""
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


def _placed(spec: RayLauncher) -> Any:
    """The placement group, in the cluster of `spec.address`. Raises EnvironmentFault where there is no cluster, or no room in it."""
    require_package("ray", "launch.kind")
    import ray

    if spec.address not in (None, "auto"):
        require_head(spec.address)
    # Of a Ray that starts here: nothing is sent to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        options: Mapping[str, Any] = (
            {"address": spec.address}
            if spec.address
            else {"address": "local", "include_dashboard": False}
        )
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"no Ray cluster: {first_line(error)}",
            where="launch.address",
            fix="start one: ray start --head",
        ) from None
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:  # Ray has put its own in its place
                signal.signal(number, handler)
    group = ray.util.placement_group([spec.bundle] * spec.nodes, strategy=spec.placement)
    if not group.wait(PLACE_SECONDS):
        there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has = "; ".join(
            ", ".join(f"{name} {node.get(name, 0):g}" for name in spec.bundle) for node in there
        )
        ray.shutdown()
        what = f"the cluster has no room for {spec.nodes} × {spec.bundle} ({spec.placement}); its nodes have {has}"
        raise EnvironmentFault(
            what, where="launch.nodes", fix="ask for less, or use placement: PACK"
        )
    return group


def _own_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _answers(references: list[Any], seconds: float) -> list[Any]:
    import ray

    until = time.monotonic() + seconds
    try:
        return [ray.get(each, timeout=max(1.0, until - time.monotonic())) for each in references]
    except ray.exceptions.RayError as error:
        fix = "install drumline on all nodes, for the same Python"
        raise EnvironmentFault(
            f"an actor cannot start: {reason(error)}", where="launch.kind", fix=fix
        ) from None

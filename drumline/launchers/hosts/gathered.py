"""The hosts of a launcher's spec with an agent on each, gathered once; what all of them must have for a plan. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.core.files import digest
from drumline.core.plan import Plan
from drumline.errors import EnvironmentFault
from drumline.launchers import lease
from drumline.launchers.hosts.elastic import ElasticHosts
from drumline.launchers.hosts.facts import facts, require_same_versions
from drumline.launchers.hosts.link import Message

if TYPE_CHECKING:
    from drumline.launchers.hosts.coordinator import Hosts
    from drumline.launchers.hosts.spec import HostsLauncher
    from drumline.launchers.ssh.spec import SSHLauncher

_gathered: dict[str, Hosts] = {}  # by the spec, as JSON


def gathered(spec: HostsLauncher) -> Hosts:
    """Raises EnvironmentFault that names a host that cannot be had, or differs."""
    key = spec.model_dump_json()
    if key not in _gathered:
        hosts = _gathered[key] = spec.make_hosts()
        try:
            hosts.gather()
            require_same_versions(
                facts(), {name: hosts.remotes[name].facts for name in hosts.there()}
            )
        except BaseException:
            leave(spec)
            raise
    return _gathered[key]


@contextmanager
def succeeding(spec: SSHLauncher, known: Message) -> Iterator[ElasticHosts]:
    """The hosts of a launcher that follows another; their agents call by themselves. `known`: what the agent of its host knows."""
    hosts = _gathered[spec.model_dump_json()] = spec.make_hosts(known)
    assert isinstance(hosts, ElasticHosts)
    try:
        yield hosts
    finally:
        leave(spec)


def leave(spec: HostsLauncher) -> None:
    """Send the agents of a spec away."""
    hosts = _gathered.pop(spec.model_dump_json(), None)
    if hosts is not None:
        hosts.close()


def compare(plan: Plan, hosts: Hosts, only: str | None = None) -> None:
    """Raises EnvironmentFault where a host has another run folder, or other files of model or data. `only`: the one to look at. Hosts that
    come and go may have run folders of their own, where checkpoints do not lie on one disk alone."""
    run_dir = Path(plan.run_dir)
    roles = [role.model_path for role in plan.roles.values()]
    data = None if plan.config.plain else plan.data
    # Of a stream each host makes its own blocks.
    caches = [None if data.stream else data.train_cache, *data.eval_caches.values()] if data else []
    paths = sorted(
        {path for path in (plan.model_path, *roles, *caches) if path and Path(path).exists()}
    )
    own = {path: digest(Path(path)) for path in paths}
    apart = isinstance(hosts, ElasticHosts) and bool(hosts.own) and plan.config.checkpoint.apart
    order = {
        "do": "check",
        "lease": lease.token_of(run_dir),
        "run_dir": plan.run_dir,
        "paths": paths,
        "apart": apart,
    }
    agents = {name: remote.link for name, remote in hosts.remotes.items()}
    for name, answer in hosts.ask(order, "checked", only and [only]).items():
        if not answer["shared"] and not apart:
            what = f"host {name} does not have the run folder that this host writes to"
            fix = "put it on storage that all hosts mount at the same place, with run.dir=…"
            raise EnvironmentFault(what, where=str(run_dir.absolute()), fix=fix)
        if answer["mistake"]:
            raise EnvironmentFault(f"host {name}: {answer['mistake']}", where="launch.hosts")
        if isinstance(hosts, ElasticHosts):
            hosts.shared = hosts.shared and answer["shared"]
            hosts.compared[name] = agents[name]
        for path, theirs in answer["digests"].items():
            if theirs != own[path]:
                what = f"host {name} " + (
                    "does not have it" if theirs is None else "has other files there"
                )
                raise EnvironmentFault(
                    what,
                    where=path,
                    fix="copy this host's there, or put it on storage that all hosts mount",
                )

"""Connect the hosts of a launcher, once in a process, and check that they have what a plan needs.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.errors import EnvironmentFault
from drumline.launch import lease
from drumline.plan.plan import Plan
from drumline.system.files import digest
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.facts import facts, require_same_versions

if TYPE_CHECKING:
    from drumline_hosts.coordinator import Hosts
    from drumline_hosts.options import HostsOptions

_gathered: dict[str, Hosts] = {}  # by the spec, as JSON


def gather_hosts(spec: HostsOptions) -> Hosts:
    """Return the hosts of a spec with their agents; the first call starts the agents.

    Raises:
        EnvironmentFault: A host, which the message names, cannot be reached, or has other versions.
    """
    key = spec.model_dump_json()
    if key in _gathered:
        return _gathered[key]
    hosts = spec.make_hosts()
    _gathered[key] = hosts
    try:
        hosts.gather()
        there = {name: hosts.remotes[name].facts for name in hosts.connected_hosts()}
        require_same_versions(facts(), there)
    except BaseException:
        leave(spec)
        raise
    return hosts


@contextmanager
def register_successor(spec: HostsOptions, hosts: ElasticHosts) -> Iterator[ElasticHosts]:
    """Yield the hosts of a launcher that follows another; their agents connect by themselves."""
    _gathered[spec.model_dump_json()] = hosts
    try:
        yield hosts
    finally:
        leave(spec)


def leave(spec: HostsOptions) -> None:
    """End the agents of a spec's hosts, if `gather_hosts` has started them."""
    hosts = _gathered.pop(spec.model_dump_json(), None)
    if hosts is not None:
        hosts.close()


def compare(plan: Plan, hosts: Hosts, only: str | None = None) -> None:
    """Check that hosts have the run folder and the same files of model and data as this host.

    Hosts that come and go may have run folders of their own, if checkpoints do not lie on one disk
    alone.

    Args:
        plan: The plan of the run.
        hosts: The hosts, with their agents.
        only: The host to check; None for all.

    Raises:
        EnvironmentFault: A host differs.
    """
    run_dir = Path(plan.run_dir)
    own_digests = {path: digest(Path(path)) for path in _paths(plan)}
    may_be_apart = False
    if isinstance(hosts, ElasticHosts):
        may_be_apart = bool(hosts.own) and plan.config.checkpoint.allows_separate_folders
    order = {
        "do": "check",
        "lease": lease.token_of(run_dir),
        "run_dir": plan.run_dir,
        "paths": list(own_digests),
        "apart": may_be_apart,
    }
    names = None
    if only:
        names = [only]
    agents = {name: remote.link for name, remote in hosts.remotes.items()}
    for name, answer in hosts.ask(order, "checked", names).items():
        if not answer["shared"] and not may_be_apart:
            what = f"host {name} does not have the run folder that this host writes to"
            fix = "put it on storage that all hosts mount at the same place, with run.dir=…"
            raise EnvironmentFault(what, where=str(run_dir.absolute()), fix=fix)
        if answer["mistake"]:
            raise EnvironmentFault(f"host {name}: {answer['mistake']}", where="launch.hosts")
        if isinstance(hosts, ElasticHosts):
            hosts.shared = hosts.shared and answer["shared"]
            # With the agent that was asked: if it is lost meanwhile, the host is compared again.
            hosts.compared[name] = agents[name]
        _require_same_files(name, own_digests, answer["digests"])


def _paths(plan: Plan) -> list[str]:
    """Return the paths of the models and data of a plan that exist on this host."""
    paths = [plan.model_path]
    for role in plan.roles.values():
        paths.append(role.model_path)
    data = plan.data
    if data and not plan.config.has_own_module:
        # Of streamed data each host makes its own blocks.
        if not data.stream:
            paths.append(data.train_cache)
        paths += data.eval_caches.values()
    found = set()
    for path in paths:
        if path and Path(path).exists():
            found.add(path)
    return sorted(found)


def _require_same_files(
    name: str, own: Mapping[str, str | None], theirs: Mapping[str, str | None]
) -> None:
    """Raise EnvironmentFault if a host has other digests than this one."""
    for path, their_digest in theirs.items():
        if their_digest == own[path]:
            continue
        if their_digest is None:
            what = f"host {name} does not have it"
        else:
            what = f"host {name} has other files there"
        fix = "copy this host's there, or put it on storage that all hosts mount"
        raise EnvironmentFault(what, where=path, fix=fix)

"""Start the agents of all hosts by the system's ssh, and count the ranks of each host.

This module does not import torch.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from drumline.config.launcher import Reached
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Machine
from drumline.launch import lease
from drumline.launch.environment import listen
from drumline.plan.plan import Plan
from drumline.system.files import create_whole
from drumline.system.network import (
    addresses,
    forwarded_variables,
    is_here,
    is_loopback,
    require_interface,
    source_address,
)
from drumline.system.process import Helper, run_command, tied_arguments, wait_for_exit
from drumline.system.redact import redact
from drumline.telemetry.events import Save, Step
from drumline_hosts.coordinator import AGENT, Hosts
from drumline_hosts.elastic import ElasticHosts
from drumline_hosts.facts import facts, machine_of, require_same_versions
from drumline_hosts.gathered import compare, gather_hosts
from drumline_hosts.link import Message
from drumline_hosts.ssh.options import SSHOptions
from drumline_hosts.takeover import RUN_ID
from drumline_hosts.timing import (
    LEAVE_SECONDS,
)

# Ssh takes the first value of a setting and the last of a flag. The user's launch.options stand
# between FIRST and LAST, so they overrule everything but BatchMode. With these options ssh asks no
# question on a terminal, and ends when its host does not answer any more, as the link to the agent
# does.
FIRST = ("-o", "BatchMode=yes", "-T", "-x", "-a")
LAST = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")
PROXIES = {"proxyjump", "proxycommand"}
SSH_PORT = "22"


class SSH:
    """Start and end the agents of a run by ssh.

    The agent of this host is a child process, without ssh.
    """

    def __init__(self, spec: SSHOptions, here: set[str]) -> None:
        """`here`: the names of the spec that mean this host."""
        self.spec = spec
        self.here = here
        # Tells whether a host's agent is connected: only then its output is shown, because before
        # that it is the reason of an error.
        self.shown: Callable[[str], bool] = lambda name: False
        self._agents: dict[str, Helper] = {}
        self._starting = threading.Lock()
        self._closed = False

    def start(self, name: str, settings: Message) -> None:
        """Start the agent of a host, unless all agents have been sent away.

        Raises:
            EnvironmentFault: Ssh or Python cannot be run.
        """
        # Another thread starts agents of hosts that are missing, until all agents are sent away.
        with self._starting:
            if not self._closed:
                self._start(name, settings)

    def _start(self, name: str, settings: Message) -> None:
        if name in self._agents:
            self._agents.pop(name).end()
        if name in self.here:
            command = local_command(self.spec)
            folder = self.spec.workdir
        else:
            command = ssh_command(self.spec, name)
            folder = None
        try:
            agent = Helper(command, folder, partial(self._show, name))
        except OSError as error:
            what = f"{error.filename or command[0]}: {error.strerror}"
            raise EnvironmentFault(what, where="launch", fix="install it") from None
        agent.tell(json.dumps(settings))
        self._agents[name] = agent

    def _show(self, name: str, line: str) -> None:
        """Print a line of an agent, or of its ssh, with the host's name."""
        if self.shown(name):
            print(f"{name}: {redact(line)}", file=sys.stderr)

    def why_ended(self, name: str) -> str | None:
        """Return why an agent has ended; empty if none was started here, None while it runs."""
        agent = self._agents.get(name)
        if agent is None:
            return ""
        if agent.poll() is None:
            return None
        return redact(agent.last()) or f"its agent ended with {agent.returncode}"

    def close(self) -> None:
        """Wait until all agents have ended, and kill those that take too long."""
        with self._starting:
            self._closed = True
        # The time is for all agents together.
        until = time.monotonic() + LEAVE_SECONDS
        for agent in self._agents.values():
            remaining = max(0.0, until - time.monotonic())
            wait_for_exit(agent, remaining)
            agent.end()


def local_command(spec: SSHOptions) -> list[str]:
    """Return the command of this host's agent, which dies with the launcher."""
    return [spec.python or sys.executable, *tied_arguments(AGENT)]


def ssh_command(spec: SSHOptions, name: str, module: str = AGENT) -> list[str]:
    """Return the ssh command that runs a module on a host.

    Its last argument is a line for the shell of that host.
    """
    folder = spec.workdir or str(Path.cwd())
    python = spec.python or sys.executable
    command = shlex.join([python, "-u", "-m", module])
    # exec: no shell remains between ssh and the module.
    remote = f"cd {shlex.quote(folder)} && exec {command}"
    return ["ssh", *FIRST, *spec.options, *LAST, _bare_name(name), remote]


def _bare_name(name: str) -> str:
    """Return the name of a host without the brackets around an IPv6 address."""
    return name.replace("[", "").replace("]", "")


def make_hosts(spec: SSHOptions, known: Message | None = None) -> Hosts:
    """Return the hosts of a spec, without agents.

    Args:
        spec: The section `launch` of the config.
        known: What the agent of this host knows, if the launcher follows another one.

    Raises:
        EnvironmentFault: A name has no address.
    """
    if known:
        found: dict[str, list[str]] = known["addresses"]
        here = {known["name"]}
    else:
        targets = _targets(spec)
        found = {place: target.addresses for place, target in targets.items()}
        here = {place for place, target in targets.items() if target.here}
    peers = [each[0] for each in found.values() if each]
    ssh = SSH(spec, here)
    own_address = _own_address(spec, peers, all(found.values()))
    if known is None and spec.port is not None:
        # Fail now if the port is taken. Ranks take it later, after the data are prepared.
        listen(spec.port, own_address).close()
    arguments = (spec.places, ssh, own_address, spec.port, spec.interface, peers)
    if spec.nodes is None:
        hosts = Hosts(*arguments)
    else:
        own_places = [place for place in spec.places if place in here]
        own = own_places[0] if own_places else ""
        hosts = ElasticHosts(
            *arguments,
            least=spec.nodes.min,
            most=spec.nodes.max or len(spec.places),
            own=own,
            run={"addresses": found},
            known=known,
        )
    ssh.shown = lambda name: hosts.remotes[name].link is not None
    return hosts


def reach(spec: SSHOptions) -> dict[str, Reached]:
    """Return how `drumline doctor` can run a module on each host. No agent is needed.

    Raises:
        EnvironmentFault: A name has no address.
    """
    targets = _targets(spec)
    found = {place: next(iter(target.addresses), "") for place, target in targets.items()}
    peers = [address for address in found.values() if address]
    own = _own_address(spec, peers, all(found.values()))
    reached = {}
    for place in spec.places:
        is_local = targets[place].here
        if is_local:
            address = own
        else:
            address = found[place]
        reached[place] = Reached(address, partial(_run, spec, place, is_local))
    return reached


def _run(
    spec: SSHOptions, name: str, here: bool, module: str, question: str, seconds: float
) -> tuple[int | None, str, str]:
    """Run a module on a host, with a question on its standard input.

    Returns its exit code (None if it took longer than `seconds`), its output and its errors.
    """
    if here:
        command = [spec.python or sys.executable, "-m", module]
        folder = spec.workdir
    else:
        command = ssh_command(spec, name, module)
        folder = None
    try:
        return run_command(command, question, seconds, folder)
    except OSError as error:
        return 1, "", f"{error.filename or command[0]}: {error.strerror}"


def machines(spec: SSHOptions) -> Mapping[str, Machine]:
    """Return the machine of each connected host."""
    hosts = gather_hosts(spec)
    return {name: machine_of(hosts.remotes[name].facts) for name in hosts.connected_hosts()}


def counts(spec: SSHOptions) -> dict[str, int]:
    """Return the number of ranks of each host that takes part, the launcher's own host first."""
    hosts = gather_hosts(spec)
    there = machines(spec)
    if hosts.counts:
        return hosts.counts
    found = {}
    for host, place in zip(spec.hosts, spec.places, strict=True):
        if place in there:
            found[place] = spec.count(host, len(there[place].devices))
    own = getattr(hosts, "own", "")
    # The launcher's own host comes first; the sort keeps the order of all others.
    ordered = sorted(found, key=lambda place: place != own)
    if spec.nodes:
        ordered = ordered[: spec.nodes.max]
    hosts.counts = {place: found[place] for place in ordered}
    return hosts.counts


def set_elastic_run(
    spec: SSHOptions,
    plan: Plan,
    plan_path: Path,
    hosts: ElasticHosts,
    resize: Callable[[int], bool],
) -> None:
    """Tell hosts that come and go what they need to know of a run.

    Args:
        spec: The section `launch` of the config.
        plan: The plan of the run.
        plan_path: Its file.
        hosts: The hosts, whose functions and facts are set.
        resize: Changes the plan to so many ranks; returns False if there is no such plan.
    """
    by_place = dict(zip(spec.places, spec.hosts, strict=True))

    def require(name: str) -> None:
        there = {}
        for each in (*hosts.counts, name):
            if hosts.remotes[each].link is not None:
                there[each] = hosts.remotes[each].facts
        require_same_versions(facts(), there)
        compare(plan, hosts, name)

    def count_ranks(name: str) -> int:
        machine = machine_of(hosts.remotes[name].facts)
        return spec.count(by_place[name], len(machine.devices))

    hosts.size = count_ranks
    hosts.require = require
    hosts.resize = resize
    run_dir = Path(plan.run_dir)
    hosts.run["run_dir"] = plan.run_dir
    hosts.run["plan"] = str(plan_path)
    hosts.run["token"] = lease.token_of(run_dir)
    # An identifier that the run already has stays.
    create_whole(run_dir / RUN_ID, secrets.token_hex(8).encode())
    if plan.config.checkpoint.every_steps:
        hosts.joins_at = Save
    else:
        hosts.joins_at = Step


class Target(NamedTuple):
    """The machine that ssh would reach by a name."""

    # Empty if ssh reaches it through another host.
    addresses: list[str]
    # Whether it is this host, and this user.
    here: bool
    port: str = SSH_PORT


def _targets(spec: SSHOptions) -> dict[str, Target]:
    """Return the machine that ssh would reach by each name.

    Raises:
        EnvironmentFault: A name has no address, or two names are of one machine, whose devices
            would count twice.
    """
    targets = {place: _target(spec, place) for place in spec.places}
    machines: dict[tuple[str, str], str] = {}
    for host, (place, target) in zip(spec.hosts, targets.items(), strict=True):
        if host != place or not target.addresses:
            continue  # its number of ranks is given, or nobody knows the machine
        if target.here:
            machine = ("", target.port)
        else:
            machine = (target.addresses[0], target.port)
        first = machines.setdefault(machine, place)
        if first != place:
            fix = "write it once, or give each its number of devices, as in host:4"
            raise EnvironmentFault(
                f"{first} and {place} are one machine", where="launch.hosts", fix=fix
            )
    return targets


def _target(spec: SSHOptions, place: str) -> Target:
    """Return the machine that ssh would reach by a name.

    Raises:
        EnvironmentFault: The name has no address.
    """
    name = _bare_name(place)
    settings = _ssh_settings(spec, name)
    for proxy in PROXIES:
        if settings.get(proxy, "none") != "none":
            return Target([], False)
    found = addresses(settings.get("hostname", name))
    if not found:
        fix = "give a name that resolves, an IP address, or a Host of ~/.ssh/config"
        raise EnvironmentFault(f"the host {place!r} has no address", where="launch.hosts", fix=fix)
    port = settings.get("port", SSH_PORT)
    # Another port of loopback may be forwarded to a container, or to a machine elsewhere.
    is_forwarded = is_loopback(found[0]) and port != SSH_PORT
    if is_here(found[0]) and not is_forwarded:
        own_user = pwd.getpwuid(os.getuid()).pw_name
        here = settings.get("user") in (None, own_user)
    else:
        here = False
    return Target(found, here, port)


def _ssh_settings(spec: SSHOptions, name: str) -> dict[str, str]:
    """Return the settings that ssh would use for a name, as `ssh -G` prints them.

    Raises:
        EnvironmentFault: Ssh is missing, or refuses its options.
    """
    try:
        code, out, err = run_command(["ssh", "-G", *spec.options, name])
    except OSError as error:
        raise EnvironmentFault(
            f"ssh cannot start: {error.strerror}", where="launch", fix="install ssh"
        ) from None
    if code:
        lines = err.strip().splitlines() or ["ssh -G failed"]
        raise EnvironmentFault(lines[-1], where="launch.options", fix="fix the arguments of ssh")
    settings = {}
    for line in out.splitlines():
        key, space, value = line.partition(" ")
        if space:
            settings[key] = value
    return settings


def _own_address(spec: SSHOptions, peers: list[str], direct: bool) -> str:
    """Return the address at which this launcher listens.

    It is that of `launch.interface`, or the one from which this host reaches the others.

    Args:
        spec: The section `launch` of the config.
        peers: Addresses of the hosts.
        direct: False if some hosts are reached by a proxy; they are not among `peers`.

    Raises:
        EnvironmentFault: There is no such address, or there are several.
    """
    if spec.interface is not None:
        return require_interface(spec.interface)
    sources = set()
    for peer in peers:
        if is_here(peer):
            continue
        source = source_address(peer)
        if source is not None:
            sources.add(source)
    if len(sources) > 1:
        found = ", ".join(sorted(sources))
        what = f"the hosts are reached from several addresses of this one: {found}"
        raise EnvironmentFault(
            what, where="launch.hosts", fix="set launch.interface to the one that all of them reach"
        )
    if sources:
        own = sources.pop()
    else:
        local = [each for each in peers if is_here(each) and not is_loopback(each)]
        own = next(iter(local), "127.0.0.1")
    if is_loopback(own) and not direct:
        what = "which address of this host the others reach is not known: they go by a proxy"
        raise EnvironmentFault(
            what, where="launch.interface", fix="name the interface of this host that they reach"
        )
    return own


def submission(spec: SSHOptions, plan: Plan, plan_path: Path, resume: str | None) -> str:
    """Return for `--dry-run` the commands of each host's agent and ranks, as comment lines."""
    hosts = gather_hosts(spec)
    rank = [spec.python or sys.executable, "-m", "drumline.train.entry", str(plan_path)]
    if resume:
        rank += ["--resume", resume]
    lines = []
    first = 0
    for place, count in counts(spec).items():
        if place in getattr(hosts.starter, "here", ()):
            agent = local_command(spec)
        else:
            agent = ssh_command(spec, place)
        ranks = f"ranks {first} to {first + count - 1} of {plan.mesh.world_size}"
        lines.append(f"host {place}: {shlex.join(agent)}")
        lines.append(f"  {ranks}: {shlex.join(rank)}")
        first += count
    lines.append(f"ranks meet at {hosts.address}, port {spec.port or 'any free one'}")
    for name, value in forwarded_variables(os.environ).items():
        lines.append(f"environment {redact(f'{name}={value}')}")
    return "".join(f"# {line}\n" for line in lines)

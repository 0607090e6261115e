"""Starting the agents of all hosts by the system's ssh, and asking them what they have. No torch here."""

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
from typing import TYPE_CHECKING, NamedTuple

from drumline.core.files import create_whole
from drumline.core.launcher import Reached
from drumline.core.network import (
    addresses,
    handed_on,
    is_here,
    is_loopback,
    require_interface,
    source_address,
)
from drumline.core.plan import Plan
from drumline.core.process import Helper, exit_code, run_command, tied
from drumline.core.redact import redact
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Machine
from drumline.launchers import lease
from drumline.launchers.environment import listen
from drumline.launchers.hosts.coordinator import AGENT, LEAVE_SECONDS, Hosts
from drumline.launchers.hosts.elastic import ElasticHosts
from drumline.launchers.hosts.facts import facts, machine_of, require_same_versions
from drumline.launchers.hosts.gathered import compare, gathered
from drumline.launchers.hosts.link import Message
from drumline.launchers.hosts.takeover import RUN_ID
from drumline.telemetry.events import Save, Step

if TYPE_CHECKING:
    from drumline.launchers.ssh.spec import SSHLauncher

# No question on a terminal; and it ends when the host does not answer any more, as the link to the agent does. Of a setting ssh takes the
# first value, of a flag the last: launch.options stand between the two, and overrule all but BatchMode.
FIRST = ("-o", "BatchMode=yes", "-T", "-x", "-a")
LAST = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")
PROXIES = {"proxyjump", "proxycommand"}


class SSH:
    """The agents of an SSHLauncher. One of this host is a process of this one's own, without ssh."""

    def __init__(self, spec: SSHLauncher, here: set[str]) -> None:
        self.spec, self.here = spec, here
        # Whose agent's words are; before it is there they are the reason of an error.
        self.shown: Callable[[str], bool] = lambda name: False
        self._agents: dict[str, Helper] = {}
        self._starting, self._closed = threading.Lock(), False

    def start(self, name: str, settings: Message) -> None:
        with (
            self._starting
        ):  # another thread asks for hosts that are not there, until all are sent away
            if not self._closed:
                self._start(name, settings)

    def _start(self, name: str, settings: Message) -> None:
        if name in self._agents:
            self._agents.pop(name).end()
        here = name in self.here
        command = local_command(self.spec) if here else ssh_command(self.spec, name)
        try:
            agent = Helper(command, self.spec.workdir if here else None, partial(self._show, name))
        except OSError as error:
            raise EnvironmentFault(
                f"{error.filename or command[0]}: {error.strerror}",
                where="launch",
                fix="install it",
            ) from None
        agent.tell(json.dumps(settings))
        self._agents[name] = agent

    def _show(self, name: str, line: str) -> None:
        """What an agent or its ssh says, with the host's name."""
        if self.shown(name):
            print(f"{name}: {redact(line)}", file=sys.stderr)

    def ended(self, name: str) -> str | None:
        if (agent := self._agents.get(name)) is None:
            return ""
        return (
            None
            if agent.poll() is None
            else redact(agent.last()) or f"its agent ended with {agent.returncode}"
        )

    def close(self) -> None:
        with self._starting:
            self._closed = True
        until = time.monotonic() + LEAVE_SECONDS
        for agent in self._agents.values():
            exit_code(agent, max(0.0, until - time.monotonic()))
            agent.end()


def local_command(spec: SSHLauncher) -> list[str]:
    """The agent of this host, which dies with the launcher."""
    return [spec.python or sys.executable, *tied(AGENT)]


def ssh_command(spec: SSHLauncher, name: str, module: str = AGENT) -> list[str]:
    """ssh hands its last argument to a shell on the host."""
    folder, python = spec.workdir or str(Path.cwd()), spec.python or sys.executable
    remote = f"cd {shlex.quote(folder)} && exec {shlex.join([python, '-u', '-m', module])}"
    return ["ssh", *FIRST, *spec.options, *LAST, name.replace("[", "").replace("]", ""), remote]


def make_hosts(spec: SSHLauncher, known: Message | None = None) -> Hosts:
    """The hosts of a spec, without agents. `known`: of a launcher that follows another, what its host knows. Raises EnvironmentFault for a
    name without an address."""
    targets = {} if known else _targets(spec)
    found = (
        known["addresses"]
        if known
        else {place: target.addresses for place, target in targets.items()}
    )
    peers = [each[0] for each in found.values() if each]
    here = {known["name"]} if known else {place for place, target in targets.items() if target.here}
    ssh = SSH(spec, here)
    own_address = _own_address(spec, peers, all(found.values()))
    if known is None and spec.port is not None:
        listen(spec.port, own_address).close()  # ranks take it, after data are prepared
    given = (spec.places, ssh, own_address, spec.port, spec.interface, peers)
    if spec.nodes is None:
        hosts = Hosts(*given)
    else:
        own = next((place for place in spec.places if place in here), "")
        run = {"addresses": found}
        hosts = ElasticHosts(
            *given,
            least=spec.nodes.min,
            most=spec.nodes.max or len(spec.places),
            own=own,
            run=run,
            known=known,
        )
    ssh.shown = lambda name: hosts.remotes[name].link is not None
    return hosts


def reach(spec: SSHLauncher) -> dict[str, Reached]:
    """Each host, for `drumline doctor`: no agent is needed. Raises EnvironmentFault for a name without an address."""
    targets = _targets(spec)
    found = {place: next(iter(target.addresses), "") for place, target in targets.items()}
    here = {place for place, target in targets.items() if target.here}
    own = _own_address(
        spec, [address for address in found.values() if address], all(found.values())
    )
    return {
        place: Reached(
            own if place in here else found[place], partial(_run, spec, place, place in here)
        )
        for place in spec.places
    }


def _run(
    spec: SSHLauncher, name: str, here: bool, module: str, question: str, seconds: float
) -> tuple[int | None, str, str]:
    command = (
        [spec.python or sys.executable, "-m", module] if here else ssh_command(spec, name, module)
    )
    try:
        return run_command(command, question, seconds, spec.workdir if here else None)
    except OSError as error:
        return 1, "", f"{error.filename or command[0]}: {error.strerror}"


def machines(spec: SSHLauncher) -> Mapping[str, Machine]:
    """Host that is there → what it has."""
    hosts = gathered(spec)
    return {name: machine_of(hosts.remotes[name].facts) for name in hosts.there()}


def counts(spec: SSHLauncher) -> dict[str, int]:
    """Host that takes part → its ranks."""
    hosts, there = gathered(spec), machines(spec)
    if not hosts.counts:
        found = {
            place: spec.count(host, len(there[place].devices))
            for host, place in zip(spec.hosts, spec.places, strict=True)
            if place in there
        }
        most, own = spec.nodes.max if spec.nodes else None, getattr(hosts, "own", "")
        hosts.counts = dict(sorted(found.items(), key=lambda each: each[0] != own)[:most])
    return hosts.counts


def make_elastic(
    spec: SSHLauncher,
    plan: Plan,
    plan_path: Path,
    hosts: ElasticHosts,
    resize: Callable[[int], bool],
) -> None:
    """What hosts that come and go need to know of a run."""

    def require(name: str) -> None:
        there = {
            each: hosts.remotes[each].facts
            for each in (*hosts.counts, name)
            if hosts.remotes[each].link is not None
        }
        require_same_versions(facts(), there)
        compare(plan, hosts, name)

    by_place = dict(zip(spec.places, spec.hosts, strict=True))
    hosts.size = lambda name: spec.count(
        by_place[name], len(machine_of(hosts.remotes[name].facts).devices)
    )
    hosts.require, hosts.resize = require, resize
    hosts.run |= {
        "run_dir": plan.run_dir,
        "plan": str(plan_path),
        "token": lease.token_of(Path(plan.run_dir)),
    }
    # Where there is none yet.
    create_whole(Path(plan.run_dir) / RUN_ID, secrets.token_hex(8).encode())
    hosts.joins_at = Save if plan.config.checkpoint.steps else Step


class Target(NamedTuple):
    """What ssh means by a name. `addresses`: none where it goes by another host; `here`: it is this host, and this user."""

    addresses: list[str]
    here: bool
    port: str = "22"


def _targets(spec: SSHLauncher) -> dict[str, Target]:
    """Place → what ssh means by it. Raises EnvironmentFault for a name without an address, and for two names of one machine whose devices
    would count twice."""
    targets = {place: _target(spec, place) for place in spec.places}
    machines: dict[tuple[str, str], str] = {}
    for host, (place, target) in zip(spec.hosts, targets.items(), strict=True):
        if host != place or not target.addresses:
            continue  # its number of ranks is given, or nobody knows the machine
        first = machines.setdefault(
            ("" if target.here else target.addresses[0], target.port), place
        )
        if first != place:
            fix = "write it once, or give each its number of devices, as in host:4"
            raise EnvironmentFault(
                f"{first} and {place} are one machine", where="launch.hosts", fix=fix
            )
    return targets


def _target(spec: SSHLauncher, place: str) -> Target:
    """Raises EnvironmentFault for a name without an address."""
    name = place.replace("[", "").replace("]", "")
    try:
        code, out, err = run_command(["ssh", "-G", *spec.options, name])
    except OSError as error:
        raise EnvironmentFault(
            f"ssh cannot start: {error.strerror}", where="launch", fix="install ssh"
        ) from None
    if code:
        what = (err.strip().splitlines() or ["ssh -G failed"])[-1]
        raise EnvironmentFault(what, where="launch.options", fix="mend the arguments of ssh")
    known = dict(line.split(" ", 1) for line in out.splitlines() if " " in line)
    if any(known.get(proxy, "none") != "none" for proxy in PROXIES):
        return Target([], False)
    found = addresses(known.get("hostname", name))
    if not found:
        fix = "give a name that resolves, an IP address, or a Host of ~/.ssh/config"
        raise EnvironmentFault(f"the host {place!r} has no address", where="launch.hosts", fix=fix)
    # Another port of loopback may be forwarded to a container, or to a machine elsewhere.
    port = known.get("port", "22")
    forwarded = is_loopback(found[0]) and port != "22"
    here = (
        is_here(found[0])
        and not forwarded
        and known.get("user") in (None, pwd.getpwuid(os.getuid()).pw_name)
    )
    return Target(found, here, port)


def _own_address(spec: SSHLauncher, peers: list[str], direct: bool) -> str:
    """Where this launcher listens: the address of `launch.interface`, else the one that the hosts see; not `direct`: some go by a proxy,
    and are not among `peers`. Raises EnvironmentFault where there is none, or several."""
    if spec.interface is not None:
        return require_interface(spec.interface)
    sources = {source_address(each) for each in peers if not is_here(each)} - {None}
    if len(sources) > 1:
        what = f"the hosts are reached from several addresses of this one: {', '.join(sorted(map(str, sources)))}"
        raise EnvironmentFault(
            what, where="launch.hosts", fix="set launch.interface to the one that all of them reach"
        )
    here = next((each for each in peers if is_here(each) and not is_loopback(each)), "127.0.0.1")
    own = str(next(iter(sources), here))
    if is_loopback(own) and not direct:
        what = "which address of this host the others reach is not known: they go by a proxy"
        raise EnvironmentFault(
            what, where="launch.interface", fix="name the interface of this host that they reach"
        )
    return own


def submission(spec: SSHLauncher, plan: Plan, plan_path: Path, resume: str | None) -> str:
    """What would be run, for `--dry-run`: on each host its agent, and by that its ranks."""
    hosts, lines, first = gathered(spec), [], 0
    rank = [
        spec.python or sys.executable,
        "-m",
        "drumline.train.entry",
        str(plan_path),
        *(["--resume", resume] if resume else []),
    ]
    for place, count in counts(spec).items():
        here = place in getattr(hosts.starter, "here", ())
        lines.append(
            f"host {place}: {shlex.join(local_command(spec) if here else ssh_command(spec, place))}"
        )
        lines.append(
            f"  ranks {first} to {first + count - 1} of {plan.mesh.world_size}: {shlex.join(rank)}"
        )
        first += count
    lines.append(f"ranks meet at {hosts.address}, port {spec.port or 'any free one'}")
    lines += [
        f"environment {redact(f'{name}={value}')}" for name, value in handed_on(os.environ).items()
    ]
    return "".join(f"# {line}\n" for line in lines)

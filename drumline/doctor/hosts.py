"""All hosts of a run: the checks of each, what must be the same on all, and one all-reduce over all their ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from drumline.config.launcher import Reached
from drumline.doctor.check import Check, Host, differences, warn_if
from drumline.doctor.diagnose import advice
from drumline.doctor.host import Question
from drumline.doctor.ranks import LIMIT, End, Group, run
from drumline.errors import EnvironmentFault
from drumline.hardware.catalog import LINKS, by_driver, link
from drumline.hardware.cluster import Link
from drumline.hardware.detect import Machine
from drumline.system.output import plural

ALL = "all"
CLOCKS = 1.0  # seconds that hosts may differ: logs of several are read side by side
SLOW = 0.5  # of a link's usual rate: below it a pair is warned of
ANSWER_SECONDS = 10
# The doctor.host.LOOKS that are taken before a run of several hosts.
BEFORE_RUN = ("versions", "names", "ports", "interfaces", "run_folder")


def examined(reached: Mapping[str, Reached], question: Question) -> list[Host]:
    """Return the checks of each host, made there. A host that cannot be reached has one failed check.

    `reached`: name of a host → how to run modules there.
    """

    def examine_host(name: str) -> Host:
        peers = []
        for other_name, other in reached.items():
            if other_name != name and other.address:
                peers.append(other.address)
        own_question = json.dumps(asdict(replace(question, peers=tuple(peers))))
        code, output, error = reached[name].run("drumline.doctor.host", own_question, LIMIT)
        if code == 0:
            host = Host.of(json.loads(output.splitlines()[-1]))
            return replace(host, name=name)
        why = _last_line(error) or f"no answer within {LIMIT:.0f} s"
        fix = "the same folders and the same Drumline there, reached without a password"
        return Host(name, (Check("host", why, "fail", fix),), {})

    with ThreadPoolExecutor(len(reached)) as pool:
        return list(pool.map(examine_host, reached))


def _last_line(text: str) -> str:
    """Return the last line that is not blank; empty if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def compared(
    reached: Mapping[str, Reached],
    hosts: Sequence[Host],
    machine: Machine,
    inter: str,
    interface: str | None,
    bandwidth: bool = False,
) -> Host:
    """Return what differs between hosts, and an all-reduce over their ranks if all could be reached.

    `inter`: the link between hosts, by its name in the catalog. `interface`: of the network.
    `bandwidth`: also measure between pairs of ranks.
    """
    if any(host.ranks == 0 for host in hosts):
        return Host(ALL, differences([host for host in hosts if host.ranks]), {})
    first = hosts[0]
    host_of_rank: list[str] = []
    for host in hosts:
        host_of_rank += [host.name] * host.ranks
    device = "cuda" if all("GPUs" in host.facts for host in hosts) else "cpu"
    groups = []
    first_rank = 0
    for host in hosts:
        groups.append(
            Group(
                reached[first.name].address,
                first.port,
                first_rank,
                host.ranks,
                tuple(host_of_rank),
                device,
                bandwidth,
                interface,
            )
        )
        first_rank += host.ranks

    def run_ranks(place: int) -> list[End]:
        group = json.dumps(asdict(groups[place]))
        run_there = reached[hosts[place].name].run
        # The ranks end themselves after LIMIT; what they report takes a little longer.
        code, output, error = run_there("drumline.doctor.ranks", group, LIMIT + ANSWER_SECONDS)
        if code != 0:
            return [(code or 1, "", error)]
        ends_there: list[End] = []
        for end_code, end_output, end_error in json.loads(output.splitlines()[-1]):
            ends_there.append((end_code, end_output, end_error))
        return ends_there

    with ThreadPoolExecutor(len(hosts)) as pool:
        ends: list[End] = []
        for ends_of_host in pool.map(run_ranks, range(len(hosts))):
            ends += ends_of_host
    return Host(ALL, (*differences(hosts), *judged(ends, host_of_rank, machine, inter)), {})


def preflight(
    reached: Mapping[str, Reached], question: Question, machine: Machine, inter: str
) -> list[str]:
    """Check versions, names, ports, clocks, disks and one all-reduce before a run of several hosts.

    Returns a line for each warning. Raises EnvironmentFault with the first check that failed, and
    how to fix it.
    """
    hosts = examined(reached, replace(question, only=BEFORE_RUN))
    hosts.append(compared(reached, hosts, machine, inter, question.interface))
    warnings = []
    for host in hosts:
        for check in host.checks:
            if check.verdict == "fail":
                where = "preflight" if host.name == ALL else f"host {host.name}"
                raise EnvironmentFault(f"{check.name}: {check.found}", where=where, fix=check.fix)
            if check.verdict == "warn":
                warnings.append(f"{host.name}: {check.name}: {check.found} — {check.fix}")
    return warnings


def all_reduce(
    names: Sequence[str], machine: Machine, bandwidth: bool, inter: str, port: int
) -> tuple[Check, ...]:
    """Check an all-reduce over one rank for each of `names`, all on this machine."""
    if len(names) < 2:
        return (Check("all-reduce", "one GPU: nothing to reduce"),)
    group = Group("127.0.0.1", port, 0, len(names), tuple(names), machine.device, bandwidth)
    return judged(run(group), names, machine, inter)


def judged(
    ends: Sequence[End], hosts: Sequence[str], machine: Machine, inter: str
) -> tuple[Check, ...]:
    """Return the checks of an all-reduce by how its ranks ended. `hosts`: the host of each rank."""
    if any(code != 0 for code, _, _ in ends):
        return (_failed(ends, len(hosts)),)
    result = json.loads(ends[0][1].splitlines()[-1])  # a reduce.Result
    found = f"{plural(len(hosts), 'rank')}: {result['latency'] * 1e6:,.0f} µs, {result['bandwidth'] / 1e9:,.2f} GB/s of 16 MiB"
    checks = [Check("all-reduce", found)]
    if len(set(hosts)) > 1:
        apart = result["clocks"]
        fix = "have all hosts' clocks set by NTP (chrony)"
        checks.append(Check("clocks", f"{apart:.3f} s apart", warn_if(apart > CLOCKS), fix))
    for a, b, rate in result["pairs"]:
        checks.append(_pair(a, b, rate, hosts, machine, inter))
    return tuple(checks)


def _failed(ends: Sequence[End], number: int) -> Check:
    """Return the check of an all-reduce over `number` ranks that failed, with its likely cause."""
    late = []
    errors = []
    for rank, (code, _, error) in enumerate(ends):
        errors.append(error)
        if code is None:
            late.append(str(rank))
    text = "\n".join(errors)
    fix = "NCCL_DEBUG=INFO says more"
    cause = advice(text)
    if cause:
        found = cause.cause
        fix = cause.signature.fix
    elif late:
        found = f"rank {', '.join(late)} did not end within {LIMIT:.0f} s"
    else:
        found = _last_line(text) or "nothing"
    return Check("all-reduce", f"{plural(number, 'rank')}: {found}", "fail", fix)


def _pair(a: int, b: int, rate: float, hosts: Sequence[str], machine: Machine, inter: str) -> Check:
    """Check the bytes/s between two ranks against what their link usually reaches."""
    is_same_host = hosts[a] == hosts[b]
    usual = expected(machine, is_same_host, inter)
    usual_rate = usual.reached(2)
    where = f"rank {a} ↔ {b}" if is_same_host else f"{hosts[a]} ↔ {hosts[b]}"
    found = f"{rate / 1e9:,.2f} GB/s; {usual.name} usually reaches {usual_rate / 1e9:,.2f}"
    fix = "another link is used, or it is shared: see `nvidia-smi topo -m` and NCCL_DEBUG=INFO"
    return Check(where, found, warn_if(rate < SLOW * usual_rate), fix)


def expected(machine: Machine, same_host: bool, inter: str) -> Link:
    """Return the link between two ranks, by the catalog."""
    if not same_host:
        return link(inter) or LINKS["loopback"]
    if not machine.devices:
        return LINKS["loopback"]
    first = machine.devices[0]
    device = by_driver(first.name, first.memory_bytes)
    return LINKS[device.intra if device else "pcie4"]

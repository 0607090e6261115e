"""Check all hosts of a run: each by itself, against each other, and by an all-reduce over all of them.

A host is checked by a process on that host. This module sends it the question and reads its answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from drumline.config.launcher import Reached
from drumline.doctor.check import Check, HostReport, differences, warn_if
from drumline.doctor.diagnose import find_likely_cause
from drumline.doctor.host import Question
from drumline.doctor.ranks import LIMIT, End, RankGroup, run
from drumline.errors import EnvironmentFault
from drumline.hardware.catalog import LINKS, find_by_driver_name, find_link
from drumline.hardware.cluster import Link
from drumline.hardware.detect import Machine
from drumline.system.output import plural

# The name in tables of the checks that concern no single host.
ALL = "all"
# Seconds by which the clocks of hosts may differ. More would confuse a reader of several logs.
CLOCKS = 1.0
# The share of a link's usual rate below which a pair gets a warning.
SLOW = 0.5
# Seconds that a host may take to report how its ranks ended.
ANSWER_SECONDS = 10
# The `Question.only` of the preflight: the checks before each run on several hosts.
BEFORE_RUN = ("versions", "names", "ports", "interfaces", "run_folder")


def examine_hosts(reached: Mapping[str, Reached], question: Question) -> list[HostReport]:
    """Return the report of each host, in the order of `reached`.

    The report of a host that cannot be reached has one failed check and no ranks.

    Args:
        reached: Name of a host → its address, and how to run modules there.
        question: What to check; each host gets the addresses of the others as its peers.
    """

    def examine_host(name: str) -> HostReport:
        peers = []
        for other_name, other in reached.items():
            # A host behind a proxy has no address that others could resolve.
            if other_name != name and other.address:
                peers.append(other.address)
        own_question = replace(question, peers=tuple(peers))
        text = json.dumps(asdict(own_question))
        code, output, error = reached[name].run("drumline.doctor.host", text, LIMIT)
        answer = _last_line(output)
        if code == 0 and answer:
            host = HostReport.from_json(json.loads(answer))
            # The report has the host's own name, and the user knows it by the name in the config.
            return replace(host, name=name)
        why = _last_line(error)
        if not why and code is None:
            why = f"no answer within {LIMIT:.0f} s"
        elif not why:
            why = f"no answer, exit code {code}"
        fix = "the same folders and the same Drumline there, reached without a password"
        return HostReport(name, (Check("host", why, "fail", fix),), {})

    with ThreadPoolExecutor(len(reached)) as pool:
        return list(pool.map(examine_host, reached))


def _last_line(text: str) -> str:
    """Return the last line that is not blank; empty if there is none.

    In the output of a module it is the answer: a login shell may print other lines before it.
    """
    for line in reversed(text.splitlines()):
        if line.strip():
            return line
    return ""


def compare_hosts(
    reached: Mapping[str, Reached],
    hosts: Sequence[HostReport],
    machine: Machine,
    inter: str,
    interface: str | None,
    bandwidth: bool = False,
) -> HostReport:
    """Return the report named `all`: what differs between hosts, and an all-reduce over their ranks.

    The all-reduce is left out if a host could not be reached, since the other ranks would only
    wait.

    Args:
        reached: Name of a host → its address, and how to run modules there.
        hosts: The reports that `examine_hosts` returned.
        machine: This machine. The devices of all hosts are taken to be like its own.
        inter: The name of the link between hosts in the catalog.
        interface: Network interface of the ranks; None for any.
        bandwidth: Whether to measure between pairs of ranks, too.
    """
    answering = [host for host in hosts if host.ranks > 0]
    if len(answering) < len(hosts):
        return HostReport(ALL, differences(answering), {})
    host_of_rank: list[str] = []
    for host in hosts:
        host_of_rank += [host.name] * host.ranks
    # NCCL needs a GPU on every rank.
    has_gpus = all("GPUs" in host.facts for host in hosts)
    device = "cuda" if has_gpus else "cpu"
    # The ranks of all hosts meet at the first host.
    address = reached[hosts[0].name].address
    port = hosts[0].port
    groups: dict[str, RankGroup] = {}
    first_rank = 0
    for host in hosts:
        groups[host.name] = RankGroup(
            address=address,
            port=port,
            first=first_rank,
            count=host.ranks,
            hosts=tuple(host_of_rank),
            device=device,
            bandwidth=bandwidth,
            interface=interface,
        )
        first_rank += host.ranks

    def run_ranks(name: str) -> list[End]:
        group = json.dumps(asdict(groups[name]))
        # The ranks are ended after LIMIT, and the report of that takes a little longer.
        seconds = LIMIT + ANSWER_SECONDS
        code, output, error = reached[name].run("drumline.doctor.ranks", group, seconds)
        answer = _last_line(output)
        if code == 0 and answer:
            ends_there: list[End] = []
            for end_code, end_output, end_error in json.loads(answer):
                ends_there.append((end_code, end_output, end_error))
            return ends_there
        # Without an answer all ranks of the host have failed, whatever its exit code is.
        if code == 0:
            code = 1
        return [(code, "", error)] * groups[name].count

    ends: list[End] = []
    # One thread for each host: no rank returns before all ranks have met.
    with ThreadPoolExecutor(len(hosts)) as pool:
        # `map` keeps the order of the hosts, and thus of the ranks, whichever host ends first.
        for ends_of_host in pool.map(run_ranks, groups):
            ends += ends_of_host
    checks = (*differences(hosts), *judge_all_reduce(ends, host_of_rank, machine, inter))
    return HostReport(ALL, checks, {})


def preflight(
    reached: Mapping[str, Reached], question: Question, machine: Machine, inter: str
) -> list[str]:
    """Check the hosts of a run before it starts, and return a line for each warning.

    It checks versions, names, ports, interfaces, the disk of the run folder, clocks and one
    all-reduce.

    Raises EnvironmentFault with the first check that failed, and how to fix it.
    """
    hosts = examine_hosts(reached, replace(question, only=BEFORE_RUN))
    all_hosts = compare_hosts(reached, hosts, machine, inter, question.interface)
    hosts.append(all_hosts)
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
    """Check an all-reduce over ranks that are all on this machine.

    Args:
        names: The name of the host, once for each rank.
        machine: This machine.
        bandwidth: Whether to measure between pairs of ranks, too.
        inter: The name of the link between hosts in the catalog.
        port: The port at which the ranks meet.
    """
    if len(names) < 2:
        return (Check("all-reduce", "one GPU: nothing to reduce"),)
    group = RankGroup("127.0.0.1", port, 0, len(names), tuple(names), machine.device, bandwidth)
    return judge_all_reduce(run(group), names, machine, inter)


def judge_all_reduce(
    ends: Sequence[End], hosts: Sequence[str], machine: Machine, inter: str
) -> tuple[Check, ...]:
    """Return the checks of an all-reduce, by how its ranks ended.

    Args:
        ends: How each rank ended. Only rank 0 prints a result.
        hosts: The host of each rank.
        machine: This machine. The devices of all hosts are taken to be like its own.
        inter: The name of the link between hosts in the catalog.
    """
    if any(code != 0 for code, _, _ in ends):
        return (_failure_check(ends, len(hosts)),)
    _, output, _ = ends[0]
    result = json.loads(_last_line(output))  # a reduce.Result
    ranks = plural(len(hosts), "rank")
    microseconds = result["latency"] * 1e6
    gb_per_s = result["bandwidth"] / 1e9
    found = f"{ranks}: {microseconds:,.0f} µs, {gb_per_s:,.2f} GB/s of 16 MiB"
    checks = [Check("all-reduce", found)]
    # Ranks of one host share a clock.
    if len(set(hosts)) > 1:
        offset = result["clocks"]
        fix = "have all hosts' clocks set by NTP (chrony)"
        checks.append(Check("clocks", f"{offset:.3f} s apart", warn_if(offset > CLOCKS), fix))
    for a, b, rate in result["pairs"]:
        checks.append(_pair_check(a, b, rate, hosts, machine, inter))
    return tuple(checks)


def _failure_check(ends: Sequence[End], number: int) -> Check:
    """Return the check of an all-reduce that failed, with its likely cause.

    The cause is a known signature in the ranks' errors, or else that ranks took too long, or else
    the last line of the errors.

    Args:
        ends: How each rank ended. All ranks of a host that gave no answer end as the host did.
        number: The number of ranks.
    """
    late = []
    errors = []
    for rank, (code, _, error) in enumerate(ends):
        errors.append(error)
        if code is None:
            late.append(str(rank))
    text = "\n".join(errors)
    fix = "NCCL_DEBUG=INFO says more"
    cause = find_likely_cause(text)
    if cause:
        found = cause.cause
        fix = cause.signature.fix
    elif late:
        found = f"rank {', '.join(late)} did not end within {LIMIT:.0f} s"
    else:
        found = _last_line(text) or "nothing"
    return Check("all-reduce", f"{plural(number, 'rank')}: {found}", "fail", fix)


def _pair_check(
    a: int, b: int, rate: float, hosts: Sequence[str], machine: Machine, inter: str
) -> Check:
    """Check the bytes/s between ranks `a` and `b` against the usual rate of their link.

    Args:
        a: The first rank.
        b: The second rank.
        rate: The measured bytes/s.
        hosts: The host of each rank.
        machine: This machine. The devices of all hosts are taken to be like its own.
        inter: The name of the link between hosts in the catalog.
    """
    is_same_host = hosts[a] == hosts[b]
    usual = expected_link(machine, is_same_host, inter)
    # A pair is a group of two ranks.
    usual_rate = usual.collective_rate(2)
    if is_same_host:
        name = f"rank {a} ↔ {b}"
    else:
        name = f"{hosts[a]} ↔ {hosts[b]}"
    measured_gb = rate / 1e9
    usual_gb = usual_rate / 1e9
    found = f"{measured_gb:,.2f} GB/s; {usual.name} usually reaches {usual_gb:,.2f}"
    is_slow = rate < SLOW * usual_rate
    fix = "another link is used, or it is shared: see `nvidia-smi topo -m` and NCCL_DEBUG=INFO"
    return Check(name, found, warn_if(is_slow), fix)


def expected_link(machine: Machine, same_host: bool, inter: str) -> Link:
    """Return the link between two ranks, by the catalog.

    Ranks of one host without a GPU are connected by loopback. A GPU that the catalog does not know
    is taken for one in a PCIe 4 slot.

    Args:
        machine: The machine of the ranks.
        same_host: Whether both ranks are on one host.
        inter: The name of the link between hosts in the catalog.
    """
    if not same_host:
        return find_link(inter) or LINKS["loopback"]
    if not machine.devices:
        return LINKS["loopback"]
    first = machine.devices[0]
    device = find_by_driver_name(first.name, first.memory_bytes)
    if device is None:
        return LINKS["pcie4"]
    return LINKS[device.intra]

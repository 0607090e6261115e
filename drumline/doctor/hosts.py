"""All hosts of a run: the checks of each, what must be the same on them, and one all-reduce over all their ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from drumline.core.launcher import Reached
from drumline.doctor.check import Check, Host, Verdict, differences
from drumline.doctor.diagnose import advice
from drumline.doctor.host import Question
from drumline.doctor.ranks import LIMIT, End, Group, run
from drumline.errors import EnvironmentFault
from drumline.hardware.catalog import LINKS, by_driver, link
from drumline.hardware.cluster import Link
from drumline.hardware.detect import Machine

ALL = "all"
CLOCKS = 1.0  # seconds that hosts may differ: logs of several are read side by side
SLOW = 0.5  # of a link's usual rate: below it a pair is warned of
# doctor.host.LOOKS before a run of several hosts.
BEFORE_RUN = (
    "versions",
    "names",
    "ports",
    "interfaces",
    "run_folder",
)


def examined(reached: Mapping[str, Reached], question: Question) -> list[Host]:
    """The checks of each host, made there. One that cannot be asked has that as its only check."""

    def look(name: str) -> Host:
        peers = tuple(
            other.address for host, other in reached.items() if host != name and other.address
        )
        code, out, error = reached[name].run(
            "drumline.doctor.host", json.dumps(asdict(replace(question, peers=peers))), LIMIT
        )
        if code == 0:
            return replace(Host.of(json.loads(out.splitlines()[-1])), name=name)
        why = (
            [line for line in error.splitlines() if line.strip()]
            or [f"no answer within {LIMIT:.0f} s"]
        )[-1]
        return Host(
            name,
            (
                Check(
                    "host",
                    why,
                    "fail",
                    "the same folders and the same Drumline there, reached without a password",
                ),
            ),
            {},
        )

    with ThreadPoolExecutor(len(reached)) as pool:
        return list(pool.map(look, reached))


def compared(
    reached: Mapping[str, Reached],
    hosts: Sequence[Host],
    machine: Machine,
    inter: str,
    interface: str | None,
    bandwidth: bool = False,
) -> Host:
    """What differs between hosts, and an all-reduce over the ranks of all of them where each could be asked."""
    if any(host.ranks == 0 for host in hosts):
        return Host(ALL, differences([host for host in hosts if host.ranks]), {})
    first, names = hosts[0], [host.name for host in hosts for _ in range(host.ranks)]
    places, begin = [], 0
    device = "cuda" if all("GPUs" in host.facts for host in hosts) else "cpu"
    for host in hosts:
        address = reached[first.name].address
        places.append(
            Group(
                address, first.port, begin, host.ranks, tuple(names), device, bandwidth, interface
            )
        )
        begin += host.ranks

    def ranks(at: int) -> list[End]:
        code, out, error = reached[hosts[at].name].run(
            "drumline.doctor.ranks", json.dumps(asdict(places[at])), LIMIT + 10
        )
        return (
            [(end[0], end[1], end[2]) for end in json.loads(out.splitlines()[-1])]
            if code == 0
            else [(code or 1, "", error)]
        )

    with ThreadPoolExecutor(len(hosts)) as pool:
        ends = [end for each in pool.map(ranks, range(len(hosts))) for end in each]
    return Host(ALL, (*differences(hosts), *judged(ends, names, machine, inter)), {})


def preflight(
    reached: Mapping[str, Reached], question: Question, machine: Machine, inter: str
) -> list[str]:
    """Before a run of several hosts: versions, names, ports, clock, disk and one all-reduce. Returns a line for each warning. Raises
    EnvironmentFault with the first check that failed, and its mend."""
    hosts = examined(reached, replace(question, only=BEFORE_RUN))
    hosts.append(compared(reached, hosts, machine, inter, question.interface))
    looked = [(host, check) for host in hosts for check in host.checks]
    for host, check in looked:
        if check.verdict == "fail":
            where = "preflight" if host.name == ALL else f"host {host.name}"
            raise EnvironmentFault(f"{check.name}: {check.found}", where=where, fix=check.mend)
    return [
        f"{host.name}: {check.name}: {check.found} — {check.mend}"
        for host, check in looked
        if check.verdict == "warn"
    ]


def all_reduce(
    names: Sequence[str], machine: Machine, bandwidth: bool, inter: str, port: int
) -> tuple[Check, ...]:
    """An all-reduce over one rank for each of `names`, all on this machine."""
    if len(names) < 2:
        return (Check("all-reduce", "one GPU: nothing to reduce"),)
    group = Group("127.0.0.1", port, 0, len(names), tuple(names), machine.device, bandwidth)
    return judged(run(group), names, machine, inter)


def judged(
    ends: Sequence[End], hosts: Sequence[str], machine: Machine, inter: str
) -> tuple[Check, ...]:
    """The checks of how the ranks ended. `hosts`: of each rank."""
    if any(code != 0 for code, _, _ in ends):
        late = [str(number) for number, (code, _, _) in enumerate(ends) if code is None]
        errors = "\n".join(error for _, _, error in ends)
        why = advice(errors)
        last = ([line for line in errors.splitlines() if line.strip()] or ["nothing"])[-1]
        found = (
            why.cause
            if why
            else f"rank {', '.join(late)} did not end within {LIMIT:.0f} s"
            if late
            else last
        )
        return (
            Check(
                "all-reduce",
                f"{len(hosts)} ranks: {found}",
                "fail",
                why.signature.mend if why else "NCCL_DEBUG=INFO says more",
            ),
        )
    result = json.loads(ends[0][1].splitlines()[-1])  # a reduce.Result
    found = f"{len(hosts)} ranks: {result['latency'] * 1e6:,.0f} µs, {result['bandwidth'] / 1e9:,.2f} GB/s of 16 MiB"
    checks = [Check("all-reduce", found)]
    if len(set(hosts)) > 1:
        mend = "have all hosts' clocks set by NTP (chrony)"
        checks.append(
            Check(
                "clocks",
                f"{result['clocks']:.3f} s apart",
                "warn" if result["clocks"] > CLOCKS else "ok",
                mend,
            )
        )
    return (*checks, *(_pair(pair, hosts, machine, inter) for pair in result["pairs"]))


def _pair(
    pair: tuple[int, int, float], hosts: Sequence[str], machine: Machine, inter: str
) -> Check:
    a, b, rate = pair
    usual = expected(machine, hosts[a] == hosts[b], inter)
    reached = usual.reached(2)
    slow: Verdict = "warn" if rate < SLOW * reached else "ok"
    where = f"rank {a} ↔ {b}" if hosts[a] == hosts[b] else f"{hosts[a]} ↔ {hosts[b]}"
    found = f"{rate / 1e9:,.2f} GB/s; {usual.name} usually reaches {reached / 1e9:,.2f}"
    return Check(
        where,
        found,
        slow,
        "another link is used, or it is shared: see `nvidia-smi topo -m` and NCCL_DEBUG=INFO",
    )


def expected(machine: Machine, same_host: bool, inter: str) -> Link:
    """The link between two ranks, by the catalog."""
    if not same_host:
        return link(inter) or LINKS["loopback"]
    device = (
        by_driver(machine.devices[0].name, machine.devices[0].memory_bytes)
        if machine.devices
        else None
    )
    return LINKS[device.intra if device else "pcie4" if machine.devices else "loopback"]

"""`drumline doctor`: before a run the checks of this host and an all-reduce of its ranks; after one what its logs say."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from drumline.core.process import run_module
from drumline.doctor.check import Check, Host, Verdict, table
from drumline.doctor.diagnose import STDIN, Finding, advice, diagnose, rank_without_log
from drumline.doctor.host import Question, examine
from drumline.errors import UserError
from drumline.hardware.catalog import LINKS, by_driver, link
from drumline.hardware.cluster import Link
from drumline.hardware.detect import Machine, detect

CPU_RANKS = 2
LIMIT, TIMEOUT = 120.0, 30.0  # seconds of all ranks together, imports of torch included, and of one collective
CLOCKS = 1.0  # seconds that hosts may differ: logs of several are read side by side
SLOW = 0.5  # of a link's usual rate: below it a pair is warned of


def doctor(place: str | None, bandwidth: bool, as_json: bool) -> int:
    """Returns the exit code: 1 where a check failed, or where the logs say why the run did. Raises UserError for a place that is not
    there."""
    if place is None or (Path(place).suffix in (".yaml", ".yml") and not Path(place).is_dir()):
        return _before(Path(place) if place else None, bandwidth, as_json)
    if bandwidth:
        raise UserError("--bandwidth measures before a run", where=f"drumline doctor {place}", fix="name no run, or its config")
    if place != STDIN and not Path(place).exists():
        raise UserError("no such run, log or config", where=place, fix="name one that is there, or - for standard input")
    return _after(place, as_json)


# ------------------------------------------------------------------------------------------------------------------ after a run


def _after(place: str, as_json: bool) -> int:
    findings = diagnose(place)
    silent = rank_without_log(Path(place)) if Path(place).is_dir() else []
    if as_json:
        print(_json({"findings": [finding.values() for finding in findings], "ranks_without_log": silent}))
    else:
        print(as_text(findings, silent))
    return int(any(not finding.signature.warn for finding in findings))


def _json(values: object) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False)


def as_text(findings: Sequence[Finding], silent: Sequence[int] = ()) -> str:
    """Causes with their evidence and mend; consequences in one line each, and attempts before the newest below it."""
    lines, attempt = [], None
    for finding in findings:
        if attempt is not None and finding.evidence.attempt != attempt:
            lines += [f"before, in attempt {finding.evidence.attempt}:", ""]
        attempt = finding.evidence.attempt
        ranks = f"rank {finding.ranks[0]}: " if len(finding.ranks) == 1 else f"{len(finding.ranks)} ranks: " if finding.ranks else ""
        if finding.follows:
            lines += [f"  in consequence of {', '.join(finding.follows)}: {ranks}{finding.cause} ({finding.evidence.place})", ""]
            continue
        more = f" (and {finding.lines - 1} more lines)" if finding.lines > 1 else ""
        lines += [f"{'!' if finding.signature.warn else '✗'} {ranks}{finding.cause}  [{finding.signature.name}]"]
        lines += [f"    evidence  {finding.evidence.place}{more}", f"              {finding.evidence.text}"]
        lines += [f"    mend      {finding.signature.mend}", ""]
    if silent:
        lines += [f"! no log of rank {', '.join(map(str, silent))} in the newest attempt: it never started", ""]
    return "\n".join(lines or ["✓ no signature of a fault was found"]).rstrip()


# ----------------------------------------------------------------------------------------------------------------- before a run


def _before(config: Path | None, bandwidth: bool, as_json: bool) -> int:
    question, inter = question_of(config) if config else (Question(), "100Gb")
    host, machine = examine(question), detect()
    names = [host.name] * (len(machine.devices) or CPU_RANKS)
    hosts = [host, Host(host.name, all_reduce(names, machine, bandwidth, inter), {})]
    if as_json:
        print(_json({"hosts": [each.values() for each in hosts]}))
    else:
        Console().print(table(hosts))
    return int(any(check.verdict == "fail" for each in hosts for check in each.checks))


def question_of(config: Path) -> tuple[Question, str]:
    """What a run of this config needs of a host, and the link between hosts. Raises ConfigError."""
    from drumline.core.data import FileSource, SavedSource
    from drumline.core.explain import default_run_dir
    from drumline.core.load import load

    loaded = load(config, [])
    run, model, base = loaded.config, loaded.config.model.id, loaded.base_dir
    sources = [*run.data.train, *run.data.eval] if run.data else []
    paths = [path for source in sources if isinstance(source, FileSource | SavedSource) for path in _files(source.path, base)]
    folder = Path(model).expanduser() if model else None
    question = Question(
        run_dir=str(run.run.dir or default_run_dir(loaded.path)),
        cache_dir=run.data.cache_dir if run.data else None,
        model=str(folder) if folder and (folder.is_dir() or folder.is_absolute()) else None,
        data=tuple(paths),
        port=run.launch.port,
    )
    return question, run.cluster.inter if run.cluster else "100Gb"


def _files(pattern: str, base: Path) -> list[str]:
    """The files that a path or glob names; the path itself where there are none, which a check then says."""
    from glob import glob

    full = str(base / Path(pattern).expanduser())
    return sorted(glob(full, recursive=True)) or [full]  # noqa: PTH207 - it may be absolute


def all_reduce(hosts: Sequence[str], machine: Machine, bandwidth: bool, inter: str) -> tuple[Check, ...]:
    """An all-reduce over one rank for each of `hosts`, all on this machine, within `LIMIT` seconds; with `bandwidth` also between pairs."""
    if len(hosts) < 2:
        return (Check("all-reduce", "one GPU: nothing to reduce"),)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def rank(number: int) -> tuple[int | None, str, str]:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "RANK": str(number)}
        variables |= {"LOCAL_RANK": str(number), "WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": str(len(hosts))}
        task = {"variables": variables, "hosts": list(hosts), "device": machine.device, "bandwidth": bandwidth}
        return run_module("drumline.doctor.reduce", json.dumps({**task, "parent": os.getpid(), "timeout": TIMEOUT}), LIMIT)

    with ThreadPoolExecutor(len(hosts)) as pool:
        ends = list(pool.map(rank, range(len(hosts))))
    return judged(ends, hosts, machine, inter)


def judged(ends: Sequence[tuple[int | None, str, str]], hosts: Sequence[str], machine: Machine, inter: str) -> tuple[Check, ...]:
    """The checks of what the ranks printed: (exit code, stdout, stderr) of each."""
    if any(code != 0 for code, _, _ in ends):
        late = [str(number) for number, (code, _, _) in enumerate(ends) if code is None]
        errors = "\n".join(error for _, _, error in ends)
        why = advice(errors)
        last = ([line for line in errors.splitlines() if line.strip()] or ["nothing"])[-1]
        found = why.cause if why else f"rank {', '.join(late)} did not end within {LIMIT:.0f} s" if late else last
        return (Check("all-reduce", f"{len(ends)} ranks: {found}", "fail", why.signature.mend if why else "NCCL_DEBUG=INFO says more"),)
    result = json.loads(ends[0][1].splitlines()[-1])  # a reduce.Result
    found = f"{len(hosts)} ranks: {result['latency'] * 1e6:,.0f} µs, {result['bandwidth'] / 1e9:,.2f} GB/s of 16 MiB"
    checks = [Check("all-reduce", found)]
    if len(set(hosts)) > 1:
        mend = "have all hosts' clocks set by NTP (chrony)"
        checks.append(Check("clocks", f"{result['clocks']:.3f} s apart", "warn" if result["clocks"] > CLOCKS else "ok", mend))
    return (*checks, *(_pair(pair, hosts, machine, inter) for pair in result["pairs"]))


def _pair(pair: tuple[int, int, float], hosts: Sequence[str], machine: Machine, inter: str) -> Check:
    a, b, rate = pair
    usual = expected(machine, hosts[a] == hosts[b], inter)
    reached = usual.reached(2)
    slow: Verdict = "warn" if rate < SLOW * reached else "ok"
    where = f"rank {a} ↔ {b}" if hosts[a] == hosts[b] else f"{hosts[a]} ↔ {hosts[b]}"
    found = f"{rate / 1e9:,.2f} GB/s; {usual.name} usually reaches {reached / 1e9:,.2f}"
    return Check(where, found, slow, "another link is used, or it is shared: see `nvidia-smi topo -m` and NCCL_DEBUG=INFO")


def expected(machine: Machine, same_host: bool, inter: str) -> Link:
    """The link between two ranks, by the catalog."""
    if not same_host:
        return link(inter) or LINKS["loopback"]
    device = by_driver(machine.devices[0].name, machine.devices[0].memory_bytes) if machine.devices else None
    return LINKS[device.intra if device else "pcie4" if machine.devices else "loopback"]

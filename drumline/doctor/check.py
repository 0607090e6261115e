"""The results of checks: of each host, in a table, and compared between hosts.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table

from drumline.system.output import plural

Verdict = Literal["ok", "warn", "fail"]
MARKS: dict[str, str] = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}
# Facts that may differ between hosts. The run is then at worst slower.
MAY_DIFFER = ("GPUs", "driver")


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found, in one line, and how to fix it if it is not ok."""

    name: str
    found: str
    verdict: Verdict = "ok"
    fix: str = ""


def warn_if(is_doubtful: bool) -> Verdict:
    """Return the verdict of a check that warns if something is doubtful."""
    return "warn" if is_doubtful else "ok"


def fail_if(is_faulty: bool) -> Verdict:
    """Return the verdict of a check that fails if something is faulty."""
    return "fail" if is_faulty else "ok"


@dataclass(frozen=True)
class Host:
    """What was found on a host; with the name `all`, what concerns all hosts together."""

    name: str
    checks: tuple[Check, ...]
    # Values that are compared between hosts, by name. A difference fails the check, or warns if
    # MAY_DIFFER has the name.
    facts: Mapping[str, str]
    # Number of ranks that it would have; 0 if it could not be reached.
    ranks: int = 0
    # A port that is free there.
    port: int = 0

    def values(self) -> dict[str, Any]:
        """Return the host for JSON."""
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Host:
        """Return the host that was sent as JSON."""
        checks = tuple(Check(**check) for check in values["checks"])
        return Host(**{**values, "checks": checks})


def table(hosts: Sequence[Host]) -> Table:
    """Return a table with a row for each check. A check that is not ok has its fix below it."""
    from rich.markup import escape

    has_many_hosts = len({host.name for host in hosts}) > 1
    headers = ["", "check", "found"]
    if has_many_hosts:
        headers.insert(0, "host")
    rows = Table(*headers, box=box.SIMPLE)
    for host in hosts:
        for check in host.checks:
            found = escape(check.found)
            if check.fix and check.verdict != "ok":
                found += f"\n[dim]fix:[/] {escape(check.fix)}"
            cells = [MARKS[check.verdict], check.name, found]
            if has_many_hosts:
                cells.insert(0, host.name)
            rows.add_row(*cells)
    return rows


def differences(hosts: Sequence[Host]) -> tuple[Check, ...]:
    """Return a check for each fact that differs between hosts, or one that says that none does.

    There is none for one host alone.
    """
    if len(hosts) < 2:
        return ()
    # A dictionary keeps the order in which the hosts name their facts.
    names: dict[str, None] = {}
    for host in hosts:
        names.update(dict.fromkeys(host.facts))
    checks = []
    for name in names:
        value_of = {host.name: host.facts.get(name, "none") for host in hosts}
        if len(set(value_of.values())) == 1:
            continue
        where = ", ".join(f"{value} on {host}" for host, value in value_of.items())
        verdict: Verdict = "warn" if name in MAY_DIFFER else "fail"
        checks.append(Check(name, f"differs: {where}", verdict, f"the same {name} on all hosts"))
    if not checks:
        found = f"versions and digests are the same on {plural(len(hosts), 'host')}"
        checks.append(Check("hosts", found))
    return tuple(checks)

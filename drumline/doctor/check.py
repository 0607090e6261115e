"""The results of checks: of each host, as a table, and compared between hosts.

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
# Facts that may differ between hosts, since a run is then at worst slower.
MAY_DIFFER = ("GPUs", "driver")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    # What was found, in one line.
    found: str
    verdict: Verdict = "ok"
    # How to fix it; it is shown only if the verdict is not ok.
    fix: str = ""


def warn_if(is_doubtful: bool) -> Verdict:
    """Return the verdict `warn` if something is doubtful, else `ok`."""
    return "warn" if is_doubtful else "ok"


def fail_if(is_faulty: bool) -> Verdict:
    """Return the verdict `fail` if something is faulty, else `ok`."""
    return "fail" if is_faulty else "ok"


@dataclass(frozen=True)
class HostReport:
    """What was found on a host. The report named `all` has what concerns all hosts together."""

    name: str
    checks: tuple[Check, ...]
    # Values that are compared between hosts, by name. A difference is a failed check, or a warning
    # if MAY_DIFFER has the name.
    facts: Mapping[str, str]
    # Number of ranks that the host would have; 0 if it could not be reached.
    ranks: int = 0
    # A port that is free on the host; 0 if it is not known.
    port: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> HostReport:
        """Return the report whose `to_json` gave these values."""
        checks = tuple(Check(**check) for check in values["checks"])
        return HostReport(**{**values, "checks": checks})


def table(hosts: Sequence[HostReport]) -> Table:
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


def differences(hosts: Sequence[HostReport]) -> tuple[Check, ...]:
    """Return a check for each fact that differs between hosts.

    If no fact differs, the result is one check that says so. For a single host it is empty.
    """
    if len(hosts) < 2:
        return ()
    # A dictionary in place of a set, because it keeps the order of the facts.
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

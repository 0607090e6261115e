"""What a check says: its name, what was found, a verdict, and how to mend it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table

Verdict = Literal["ok", "warn", "fail"]
MARKS: dict[str, str] = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}
MAY_DIFFER = ("GPUs", "driver")  # between hosts, where it costs speed at most


@dataclass(frozen=True)
class Check:
    """`found`: in one line. `mend`: how to mend what is not ok."""

    name: str
    found: str
    verdict: Verdict = "ok"
    mend: str = ""


@dataclass(frozen=True)
class Host:
    """A host's checks, and what must be the same on all hosts: name → value. `ranks`: it would have; `port`: that is free there."""

    name: str
    checks: tuple[Check, ...]
    facts: Mapping[str, str]
    ranks: int = 0
    port: int = 0

    def values(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Host:
        return Host(**{**values, "checks": tuple(Check(**check) for check in values["checks"])})


def table(hosts: Sequence[Host]) -> Table:
    """One row a check; below what is not ok stands how to mend it."""
    from rich.markup import escape

    many = len({host.name for host in hosts}) > 1
    made = Table(*["host"] * many, "", "check", "found", box=box.SIMPLE)
    for host in hosts:
        for check in host.checks:
            mend = (
                f"\n[dim]mend:[/] {escape(check.mend)}"
                if check.mend and check.verdict != "ok"
                else ""
            )
            made.add_row(
                *[host.name] * many, MARKS[check.verdict], check.name, escape(check.found) + mend
            )
    return made


def differences(hosts: Sequence[Host]) -> tuple[Check, ...]:
    """A check for each fact that is not the same on all hosts; one that says so where all are."""
    found = []
    for name in dict.fromkeys(name for host in hosts for name in host.facts):
        on = {host.name: host.facts.get(name, "none") for host in hosts}
        if len(set(on.values())) > 1:
            where = ", ".join(f"{value} on {host}" for host, value in on.items())
            found.append(
                Check(
                    name,
                    f"differs: {where}",
                    "warn" if name in MAY_DIFFER else "fail",
                    f"the same {name} on all hosts",
                )
            )
    same = f"versions and digests are the same on {len(hosts)} hosts"
    return tuple(found) or (Check("hosts", same),)

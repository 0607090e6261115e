"""Read `signatures.yaml`, the table of known failures: words in the log, cause and fix."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("signatures.yaml")
ANY = "any"
# What launchers write before a rank's lines: `[rank3]:` or `[default3]:` (torch), `[1,3]<stderr>:`
# (mpirun), `3: ` (srun -l), `(Worker pid=7, ip=…) ` (Ray), `trainer-1  | ` (Compose), a time
# (kubectl).
LAUNCHER = r"(?:\[?rank\d+\]?:? ?|\[[^\]\n]*\](?:<\w+>)?:? ?| *\d+: |\(\w+ pid=[^)\n]*\) |\S+ +\| |\d{4}-\d\d-\d\dT\S+ )?"
# How far a wildcard of a pattern reaches. Without a limit, a line that repeats the text before the
# wildcard would take time by the square of its length.
FAR = "{0,1000}"
_WILD = re.compile(r"(?<!\\)(\.|\[\^\\n\])\*")


@dataclass(frozen=True)
class Signature:
    """One row of the table. The head of `signatures.yaml` describes the fields."""

    name: str
    kind: str
    match: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    after: frozenset[str] = frozenset()
    least: int = 1
    warn: bool = False

    def follows(self, other: Signature) -> bool:
        """Return whether this fault is a consequence of `other` if both are found."""
        if other is self or other.warn or ANY in other.after:
            return False
        return ANY in self.after or bool(self.after & {other.name, other.kind})

    def explain(self, names: dict[str, str]) -> str:
        """Return the cause, with the names that a line of the log gives."""
        return self.cause.format_map(defaultdict(_not_named, names))


def _not_named() -> str:
    """Return the text for a name that the line of the log does not give."""
    return "not named here"


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the whole table, the special signatures before the general ones."""
    kinds: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    table = []
    for kind, rows in kinds.items():
        for name, row in rows.items():
            table.append(_signature(name, kind, **row))
    return tuple(table)


def _bounded(pattern: str) -> str:
    """Return a pattern whose wildcards have a limit.

    A pattern for the beginning of a line, or of an event, is tried only once for each line, so its
    wildcards need no limit.
    """
    if pattern.startswith(("^", '"kind"')):
        return pattern
    return _WILD.sub(rf"\1{FAR}", pattern)


def _signature(
    name: str,
    kind: str,
    match: list[str],
    cause: str,
    fix: str,
    after: tuple[str, ...] = (),
    **rest: Any,
) -> Signature:
    """Return a row of the table, with its patterns compiled."""
    patterns = []
    for pattern in match:
        whole = _bounded(pattern).replace("<launcher>", LAUNCHER)
        patterns.append(re.compile(whole, re.MULTILINE))
    return Signature(name, kind, tuple(patterns), cause, fix, frozenset(after), **rest)

"""Read `signatures.yaml`, the table of known failures: patterns of lines in logs, cause and fix."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("signatures.yaml")
# As `after` of a signature it stands for all signatures.
ANY = "any"
# A pattern of what launchers write before the lines of a rank: `[rank3]:` or `[default3]:` (torch),
# `[1,3]<stderr>:` (mpirun), `3: ` (srun -l), `(Worker pid=7, ip=…) ` (Ray), `trainer-1  | `
# (Compose), a time (kubectl).
LAUNCHER = r"(?:\[?rank\d+\]?:? ?|\[[^\]\n]*\](?:<\w+>)?:? ?| *\d+: |\(\w+ pid=[^)\n]*\) |\S+ +\| |\d{4}-\d\d-\d\dT\S+ )?"
# How many characters a wildcard of a pattern matches. Without a limit, the search in a line that
# repeats the text before the wildcard would take time in proportion to the square of its length.
FAR = "{0,1000}"
_WILD = re.compile(r"(?<!\\)(\.|\[\^\\n\])\*")


@dataclass(frozen=True)
class Signature:
    """A row of the table: a known failure. The head of `signatures.yaml` describes the fields."""

    name: str
    kind: str
    match: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    after: frozenset[str] = frozenset()
    least: int = 1
    warn: bool = False

    def is_caused_by(self, other: Signature) -> bool:
        """Return whether this fault is a consequence of `other` if both are found.

        A warning causes nothing, and neither does a signature that has ANY in `after`.
        """
        if other is self or other.warn or ANY in other.after:
            return False
        return ANY in self.after or bool(self.after & {other.name, other.kind})

    def explain(self, names: dict[str, str]) -> str:
        """Return the cause as text, with the names that a line of the log gives."""
        return self.cause.format_map(defaultdict(_not_named, names))


def _not_named() -> str:
    """Return the text for a name that the line of the log does not give."""
    return "not named here"


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the whole table, in its order: special signatures come before general ones."""
    kinds: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    table = []
    for kind, rows in kinds.items():
        for name, row in rows.items():
            table.append(_signature(name, kind, **row))
    return tuple(table)


def _limit_wildcards(pattern: str) -> str:
    """Return a pattern with a limit for each wildcard (see FAR).

    A pattern for the beginning of a line or event is tried only once in each line, so its wildcards
    need no limit.
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
        whole = _limit_wildcards(pattern).replace("<launcher>", LAUNCHER)
        patterns.append(re.compile(whole, re.MULTILINE))
    return Signature(name, kind, tuple(patterns), cause, fix, frozenset(after), **rest)

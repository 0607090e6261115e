"""The table of signatures: what logs say when a distributed run fails, why, and how to mend it. It is data: `signatures.yaml`."""

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
# Of a rank's lines: `[rank3]:` or `[default3]:` (torch), `[1,3]<stderr>:` (mpirun), `3: ` (srun -l), `(Worker pid=7, ip=…) ` (Ray),
# `trainer-1  | ` (Compose), a time (kubectl).
LAUNCHER = r"(?:\[?rank\d+\]?:? ?|\[[^\]\n]*\](?:<\w+>)?:? ?| *\d+: |\(\w+ pid=[^)\n]*\) |\S+ +\| |\d{4}-\d\d-\d\dT\S+ )?"
# A wildcard reaches this far: without an end, a line that repeats what stands before it would take time by the square of its length.
FAR = "{0,1000}"
_WILD = re.compile(r"(?<!\\)(\.|\[\^\\n\])\*")


@dataclass(frozen=True)
class Signature:
    """One row of the table, whose head says what the fields are."""

    name: str
    kind: str
    match: tuple[re.Pattern[str], ...]
    cause: str
    mend: str
    after: frozenset[str] = frozenset()
    least: int = 1
    warn: bool = False

    def follows(self, other: Signature) -> bool:
        """Whether it is a consequence where `other` is found too."""
        if other is self or other.warn or ANY in other.after:
            return False
        return ANY in self.after or bool(self.after & {other.name, other.kind})

    def explain(self, names: dict[str, str]) -> str:
        """The cause, with what the line names."""
        return self.cause.format_map(defaultdict(lambda: "not named here", names))


@cache
def signatures() -> tuple[Signature, ...]:
    """The whole table, the special before the general."""
    kinds: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return tuple(
        _signature(name, kind, **row) for kind, rows in kinds.items() for name, row in rows.items()
    )


def _bounded(pattern: str) -> str:
    """The pattern with wildcards that end; those behind a line's begin, and of events (one a line), are tried once a line anyway."""
    return pattern if pattern.startswith(("^", '"kind"')) else _WILD.sub(rf"\1{FAR}", pattern)


def _signature(
    name: str,
    kind: str,
    match: list[str],
    cause: str,
    mend: str,
    after: tuple[str, ...] = (),
    **rest: Any,
) -> Signature:
    patterns = tuple(
        re.compile(_bounded(pattern).replace("<launcher>", LAUNCHER), re.MULTILINE)
        for pattern in match
    )
    return Signature(name, kind, patterns, cause, mend, frozenset(after), **rest)

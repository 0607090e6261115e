"""`drumline doctor RUN`: what the logs, events and dumps of a run, or the output of any program, say of why it failed."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from math import prod
from pathlib import Path
from statistics import median
from typing import BinaryIO

from drumline.core.files import numbered
from drumline.core.redact import redact
from drumline.doctor.signatures import Signature, signatures
from drumline.errors import UserError
from drumline.foreign import open_plain, read_object
from drumline.telemetry.events import Step, examined, read

STDIN, EVENTS = "-", "events.jsonl"
MOST_RANKS = 2**17
PIECE = 2**22  # bytes that are searched at once
SHOWN = 300  # characters of a line of evidence
LOGS = {".log", ".out", ".err", ".txt"}
NO_LOGS = {"checkpoints", "export", "cache", "tensorboard"}  # folders of a run with none
# Data are waited for where this part of the last steps went by so, and it was long enough for anybody to care.
WAITED, WAITED_SECONDS, WAITED_STEPS = 0.3, 0.05, 20
_ATTEMPT, _RANK_FILE = (
    re.compile(r"attempt[-_](\d+)"),
    re.compile(r"rank-(\d+)\.|/(\d+)/std(?:err|out)\.log$"),
)
# `[rank3]:`, `[default3]:` (torchrun), `[Rank 3]`, `[1,3]<stderr>:` (mpirun), `3: ` (srun -l)
_RANK_LINE = re.compile(
    r"\[(?:rank|default|Rank )(\d+)\]|^\[\d+,(\d+)\]<std|^ ?(\d+): |\"rank\": (\d+),"
)
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)[T_ ](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)\d*(Z\b|[+-]\d\d:?\d\d\b)?"
)
# Month and day, and no year.
_GLOG = re.compile(r"\b[EWF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d\.\d{1,6})")
_EVENT = re.compile(r'^\{"t": (\d+\.?\d*)')
# Texts of strangers, which may speak of any fault: in events, and as the display prints them.
_TEXTS = re.compile(r'^(\{"t": [^,\n]*, "kind": "(?:samples|completions)").*', re.MULTILINE)
_SAMPLE = re.compile(r"^(.{0,80}?\bsample, step \d+: …).*", re.MULTILINE)
_BEGINS = re.compile(rb'^\{"t": [^,]*, "kind": "(?:run_start|(fault)", "attempt": (\d+))')


@dataclass(frozen=True)
class Evidence:
    """A line that a signature matches. `at`: unix seconds, None where nothing tells."""

    path: str
    line: int
    text: str
    attempt: int = 0
    rank: int | None = None
    at: float | None = None

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """A signature that was found in an attempt: its first line, how many there were, on which ranks, and what it is a consequence of."""

    signature: Signature
    cause: str
    evidence: Evidence
    lines: int = 1
    ranks: tuple[int, ...] = ()
    follows: tuple[str, ...] = ()

    def values(self) -> dict[str, object]:
        one, where = self.signature, self.evidence
        own = {
            "name": one.name,
            "kind": one.kind,
            "warning": one.warn,
            "cause": self.cause,
            "mend": one.mend,
        }
        seen = {
            "place": where.place,
            "text": where.text,
            "lines": self.lines,
            "attempt": where.attempt,
            "ranks": list(self.ranks),
        }
        return {**own, **seen, "consequence_of": list(self.follows)}


# A line that a signature matches: what its pattern names there, and where it is. It holds no more of the log than what is shown.
Line = tuple[Signature, dict[str, str], Evidence]


@dataclass
class _Lines:
    """The lines of a signature in an attempt, counted as they come: a log of gigabytes may be full of them."""

    signature: Signature
    first: Evidence
    names: tuple[Evidence, dict[str, str]] | None = None
    number: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, names: dict[str, str], where: Evidence) -> None:
        self.number += 1
        self.first = min(self.first, where, key=_when)
        self.ranks |= set() if where.rank is None else {where.rank}
        if names and (self.names is None or _when(where) < _when(self.names[0])):
            self.names = where, names

    def finding(self) -> Finding:
        cause = self.signature.explain(self.names[1] if self.names else {})
        return Finding(self.signature, cause, self.first, self.number, tuple(sorted(self.ranks)))


def diagnose(place: str) -> list[Finding]:
    """The findings of a run folder, another folder of logs, a file, or standard input (`-`): of the newest attempt first, and in each the
    causes before their consequences, the earliest first. Raises UserError where there is nothing to read."""
    if place == STDIN:
        return ordered(search(sys.stdin.buffer, "<stdin>"))
    path = Path(place)
    files = sorted(_logs(path)) if path.is_dir() else [path]
    if not files:
        raise UserError(
            "no log is there",
            where=place,
            fix="name a run folder, a log file, or - for standard input",
        )
    found = (_of_file(each, path) if each == path else _read_if_may(each, path) for each in files)
    return ordered(chain(*found, _slow_loader(path / EVENTS), _damage(path)))


def advice(text: str) -> Finding | None:
    """The first cause that a text holds; None where only errors that no signature knows are in it."""
    found = ordered(search(io.BytesIO(text.encode(errors="replace")), ""))
    known = [each for each in found if not each.signature.warn and each.signature.kind != "unknown"]
    return (
        known[0] if known and not (known[0].follows or "any" in known[0].signature.after) else None
    )


def _logs(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        named = path.suffix in LOGS or path.name == EVENTS
        with contextlib.suppress(
            PermissionError
        ):  # of a folder that may be listed, but not entered
            if named and path.is_file() and not NO_LOGS & set(path.relative_to(folder).parts[:-1]):
                yield path


def _read_if_may(path: Path, place: Path) -> Iterator[Line]:
    """One of a folder's files; that it cannot be read is a finding beside those of the others."""
    try:
        yield from _of_file(path, place)
    except UserError as error:
        if path.name == EVENTS:
            raise
        yield from _own(f"a record is damaged: {error.what}", path, 1)


def _of_file(path: Path, place: Path) -> Iterator[Line]:
    """What is in a file below `place`, or in `place`; a rank's lines without a time have that of its end."""
    with open_plain(path, UserError) as file:
        rank, named = (
            _RANK_FILE.search(str(path)),
            _ATTEMPT.findall(str(path.relative_to(place) if path != place else path)),
        )
        attempt = (
            _attempts(path) if path.name == EVENTS else lambda line: int(named[-1] if named else 0)
        )
        number = next((int(group) for group in (rank.groups() if rank else ()) if group), None)
        for signature, names, where in search(file, str(path)):
            here = where.attempt or attempt(where.line)
            on = number if where.rank is None else where.rank
            yield signature, names, replace(where, attempt=here, rank=on, at=where.at or _end(path))


def _attempts(events: Path) -> Callable[[int], int]:
    """Line → attempt, of a file of events. A start may have failed before it wrote `run_start`: the fault after it says which it was."""
    lines, attempts, begun = [0], [0], False
    with open_plain(events, UserError) as file:
        for number, line in enumerate(file, 1):
            if (found := _BEGINS.match(line)) is None:
                continue
            if found[1]:
                attempts[-1] = int(found[2])
            if found[1] or begun:
                lines.append(number + bool(found[1]))
                attempts.append(attempts[-1] + 1)
            begun = not found[1]
    return lambda line: attempts[bisect_right(lines, line) - 1]


def _end(log: Path) -> float | None:
    """When a rank ended by its error: unix seconds. Without one when its log was last written to."""
    noted = log.with_suffix(".json")
    try:
        return (
            float(read_object(noted, UserError)["message"]["drumline"]["time"])
            if noted.is_file()
            else log.stat().st_mtime
        )
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return None


def search(file: BinaryIO, name: str) -> Iterator[Line]:
    """Each line that a signature matches, once, by the first that does."""
    first = 1
    for text in _pieces(file):
        lines: dict[int, tuple[Signature, re.Match[str]]] = {}
        for signature in signatures():
            for pattern in signature.match:
                for match in pattern.finditer(text):
                    lines.setdefault(text.rfind("\n", 0, match.end()) + 1, (signature, match))
        counted = 0
        for start in sorted(lines):
            first, counted = first + text.count("\n", counted, start), start
            signature, match = lines[start]
            names = {name: value for name, value in match.groupdict().items() if value}
            yield (
                signature,
                names,
                _evidence(name, first, text[start : start + SHOWN * 8].partition("\n")[0]),
            )
        first += text.count("\n", counted)


def _pieces(file: BinaryIO) -> Iterator[str]:
    """The text of a file in pieces of whole lines, without colours; a line of more than a piece is cut."""
    rest = b""
    while piece := file.read(PIECE):
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > PIECE:
            whole, end, rest = rest, b"", b""
        yield _plain(whole + end)
    if rest:
        yield _plain(rest)


def _plain(text: bytes) -> str:
    plain = re.sub(
        r"\x1b\[[0-9;]*m",
        "",
        text.decode(errors="replace").replace("\r\n", "\n").replace("\r", " "),
    )
    return _SAMPLE.sub(r"\1", _TEXTS.sub(r"\1}", plain))


def _evidence(name: str, number: int, line: str) -> Evidence:
    rank = _RANK_LINE.search(line)
    attempt = re.search(r'"kind": "(?:fault|hang)".*"attempt": (\d+)', line)
    shown = redact(line.strip())
    return Evidence(
        name,
        number,
        shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…",
        int(attempt[1]) if attempt else 0,
        next((int(group) for group in (rank.groups() if rank else ()) if group), None),
        moment(line),
    )


def moment(line: str) -> float | None:
    """The time that a line begins with, or names, in unix seconds; local time where it has no zone, this year where it has none."""
    try:
        if event := _EVENT.search(line):
            return float(event[1])
        if date := _DATE.search(line):
            return datetime.fromisoformat(
                f"{date[1]}T{date[2].replace(',', '.')}{date[3] or ''}"
            ).timestamp()
        if short := _GLOG.search(line):
            day = f"{datetime.now().year}-{int(short[1]):02}-{short[2]}"
            return datetime.fromisoformat(f"{day}T{short[3][:15]}").timestamp()
    except ValueError:
        return None
    return None


def ordered(found: Iterable[Line]) -> list[Finding]:
    """One finding a signature and attempt, and in which order to read them."""
    groups: dict[tuple[int, str], _Lines] = {}
    for signature, names, where in found:
        groups.setdefault((where.attempt, signature.name), _Lines(signature, where)).add(
            names, where
        )
    findings = [
        lines.finding() for lines in groups.values() if lines.number >= lines.signature.least
    ]
    return sorted((replace(each, follows=_causes(each, findings)) for each in findings), key=_turn)


def _turn(finding: Finding) -> tuple[object, ...]:
    signature = finding.signature
    return (
        -finding.evidence.attempt,
        signature.warn,
        bool(finding.follows),
        signature.kind == "unknown",
        *_when(finding.evidence),
    )


def _when(where: Evidence) -> tuple[float, int, str, int]:
    return (
        float("inf") if where.at is None else where.at,
        -1 if where.rank is None else where.rank,
        where.path,
        where.line,
    )


def _causes(finding: Finding, findings: list[Finding]) -> tuple[str, ...]:
    there = [
        each.signature for each in findings if each.evidence.attempt == finding.evidence.attempt
    ]
    return tuple(other.name for other in there if finding.signature.follows(other))


def _damage(run: Path) -> Iterator[Line]:
    """A line for each record of a run that cannot be read, or not all of it."""
    try:
        if (run / "plan.json").exists():
            read_object(run / "plan.json", UserError, numbers=False)
    except UserError as error:
        yield from _own(f"a record is damaged: {error.what}", run / "plan.json", 1)
    if lines := [number for number, _, sound in examined(run / "events.jsonl") if not sound]:
        text = (
            f"a record is damaged: {len(lines):,} lines cannot be read, the first is {lines[0]:,}"
        )
        yield from _own(text, run / "events.jsonl", lines[0])


def _own(text: str, path: Path, line: int, at: float | None = None) -> Iterator[Line]:
    """What the doctor itself has seen in a file."""
    attempt = _attempts(path)(line) if path.name == EVENTS else 0
    for signature, names, _ in search(io.BytesIO(text.encode()), ""):
        yield signature, names, Evidence(str(path), line, text, attempt, at=at)


def _slow_loader(events: Path) -> Iterator[Line]:
    """A line for a run whose steps waited for data."""
    known = [
        event
        for event in read(events)
        if isinstance(event, Step)
        and isinstance(event.data_s, float)
        and isinstance(event.seconds, float)
    ]
    steps = known[-WAITED_STEPS:]
    if len(steps) < WAITED_STEPS:
        return
    waited, whole = (
        median(times)
        for times in ([step.data_s for step in steps], [step.seconds for step in steps])
    )
    if waited >= max(WAITED_SECONDS, WAITED * whole):
        text = f"the last {WAITED_STEPS} steps waited for data: {waited:.2f} s of {whole:.2f} s (medians)"
        yield from _own(text, events, events.read_bytes().count(b"\n"), steps[-1].t)


def rank_without_log(run: Path) -> list[int]:
    """Ranks of the plan that wrote no log in the newest attempt, though others did."""
    try:
        world = int(prod(read_object(run / "plan.json", UserError)["mesh"].values()))
    except (UserError, KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return []
    attempts = [*numbered(run / "logs", "attempt-").values()]
    there = (
        {
            rank
            for folder in (attempts[-1], *attempts[-1].glob("*/"))
            for rank in numbered(folder, "rank-")
        }
        if attempts
        else set()
    )
    return [rank for rank in range(min(world, MOST_RANKS)) if rank not in there] if there else []

"""`drumline doctor RUN`: find in the logs and events of a run why it failed.

It also reads the output of any other program. Lines are matched against the table of signatures;
logs may have gigabytes, so they are read in pieces, and matched lines are counted, not kept.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from math import prod
from pathlib import Path
from statistics import median
from typing import BinaryIO, NamedTuple

from drumline.doctor.signatures import ANY, Signature, signatures
from drumline.errors import UserError
from drumline.foreign import open_plain, read_object
from drumline.system.files import numbered_entries
from drumline.system.redact import redact
from drumline.telemetry.events import Step, examine, read

STDIN = "-"
EVENTS = "events.jsonl"
# A plan with more ranks is damaged.
MOST_RANKS = 2**17
# Bytes that are searched at once.
PIECE = 2**22
# Characters of a line that are shown as evidence.
SHOWN = 300
# Characters of a line that are searched for a rank, an attempt and a time.
LONGEST_LINE = 8 * SHOWN
LOGS = {".log", ".out", ".err", ".txt"}
# Folders of a run that hold no logs.
NO_LOGS = {"checkpoints", "export", "cache", "tensorboard"}
# The data loader is slow if a step waits at least this share of its time and this many seconds for
# data, by the medians of the last steps.
WAITED = 0.3
WAITED_SECONDS = 0.05
WAITED_STEPS = 20
_ATTEMPT = re.compile(r"attempt[-_](\d+)")
# `rank-3.log`, or `3/stderr.log` (torchrun --log-dir)
_RANK_FILE = re.compile(r"rank-(\d+)\.|/(\d+)/std(?:err|out)\.log$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ATTEMPT_OF_EVENT = re.compile(r'"kind": "(?:fault|hang)".*"attempt": (\d+)')
# `[rank3]:`, `[default3]:` (torchrun), `[Rank 3]`, `[1,3]<stderr>:` (mpirun), `3: ` (srun -l)
_RANK_LINE = re.compile(
    r"\[(?:rank|default|Rank )(\d+)\]|^\[\d+,(\d+)\]<std|^ ?(\d+): |\"rank\": (\d+),"
)
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)[T_ ](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)\d*(Z\b|[+-]\d\d:?\d\d\b)?"
)
# glog writes month and day, and no year.
_GLOG = re.compile(r"\b[EWF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d\.\d{1,6})")
_EVENT = re.compile(r'^\{"t": (\d+\.?\d*)')
# Texts that a model wrote or read may contain the words of any fault, so they are removed. They are
# in events, and the display prints samples of them.
_TEXTS = re.compile(r'^(\{"t": [^,\n]*, "kind": "(?:samples|completions)").*', re.MULTILINE)
_SAMPLE = re.compile(r"^(.{0,80}?\bsample, step \d+: …).*", re.MULTILINE)
# The event at the beginning of an attempt, or at its end, a fault. Only a fault has the groups.
_ATTEMPT_BOUNDARY = re.compile(rb'^\{"t": [^,]*, "kind": "(?:run_start|(fault)", "attempt": (\d+))')


@dataclass(frozen=True)
class Evidence:
    """A line of a log that a signature matches."""

    path: str
    line: int  # its number, from 1
    text: str  # without secrets, at most SHOWN characters
    attempt: int = 0
    rank: int | None = None
    at: float | None = None  # unix seconds; None: not known

    @property
    def place(self) -> str:
        """Return the file and the line."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """A signature that was found in an attempt."""

    signature: Signature
    cause: str
    # The first line that the signature matches.
    evidence: Evidence
    # How many lines it matches.
    lines: int = 1
    # The ranks that wrote these lines.
    ranks: tuple[int, ...] = ()
    # Names of the findings that it is a consequence of.
    follows: tuple[str, ...] = ()

    def values(self) -> dict[str, object]:
        """Return the finding for JSON."""
        return {
            "name": self.signature.name,
            "kind": self.signature.kind,
            "warning": self.signature.warn,
            "cause": self.cause,
            "fix": self.signature.fix,
            "place": self.evidence.place,
            "text": self.evidence.text,
            "lines": self.lines,
            "attempt": self.evidence.attempt,
            "ranks": list(self.ranks),
            "consequence_of": list(self.follows),
        }


class Line(NamedTuple):
    """A line that a signature matches. It holds no more of the log than what is shown."""

    signature: Signature
    # What the groups of the signature's pattern matched, by their names.
    names: dict[str, str]
    evidence: Evidence


@dataclass
class _Lines:
    """The lines that one signature matches in one attempt.

    Only the first is kept and the rest are counted, since a log of gigabytes may be full of them.
    """

    signature: Signature
    first: Evidence
    first_with_names: Line | None = None
    number: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, line: Line) -> None:
        """Count a line. Lines come file by file, so a later one may be earlier in time."""
        evidence = line.evidence
        self.number += 1
        self.first = min(self.first, evidence, key=_order)
        if evidence.rank is not None:
            self.ranks.add(evidence.rank)
        if not line.names:
            return
        earlier = self.first_with_names
        if earlier is None or _order(evidence) < _order(earlier.evidence):
            self.first_with_names = line

    def finding(self) -> Finding:
        """Return what was found. The cause has the names of the first line that gives some."""
        names: dict[str, str] = {}
        if self.first_with_names is not None:
            names = self.first_with_names.names
        cause = self.signature.explain(names)
        ranks = tuple(sorted(self.ranks))
        return Finding(self.signature, cause, self.first, self.number, ranks)


def diagnose(place: str) -> list[Finding]:
    """Return the findings of a run folder, another folder of logs, a file, or standard input (`-`).

    Those of the newest attempt come first; in an attempt the causes come before their consequences,
    and the earliest first. Raises UserError if there is nothing to read.
    """
    if place == STDIN:
        return order_findings(search(sys.stdin.buffer, "<stdin>"))
    path = Path(place)
    if path.is_dir():
        files = sorted(_logs(path))
    else:
        files = [path]
    if not files:
        raise UserError(
            "no log is there",
            where=place,
            fix="name a run folder, a log file, or - for standard input",
        )
    lines: list[Iterator[Line]] = []
    for file in files:
        # A file that the user names must be readable; one of many in a folder need not.
        if file == path:
            lines.append(_search_file(file, path))
        else:
            lines.append(_search_readable(file, path))
    return order_findings(chain(*lines, _find_slow_loader(path / EVENTS), _find_damage(path)))


def advice(text: str) -> Finding | None:
    """Return the first cause that a text holds.

    None if it only holds consequences, or errors that no signature knows.
    """
    file = io.BytesIO(text.encode(errors="replace"))
    for finding in order_findings(search(file, "")):
        signature = finding.signature
        if signature.warn or signature.kind == "unknown":
            continue
        # Causes come first, so if this is none, there is none.
        is_consequence = bool(finding.follows) or ANY in signature.after
        if is_consequence:
            return None
        return finding
    return None


def _logs(folder: Path) -> Iterator[Path]:
    """Give the logs and events of a folder, in any order."""
    for path in folder.rglob("*"):
        if path.suffix not in LOGS and path.name != EVENTS:
            continue
        # A folder may be listed, but not entered.
        with contextlib.suppress(PermissionError):
            folders = set(path.relative_to(folder).parts[:-1])
            if path.is_file() and not NO_LOGS & folders:
                yield path


def _search_readable(path: Path, place: Path) -> Iterator[Line]:
    """Search one of a folder's files.

    If it cannot be read, that is a finding beside those of the others.
    """
    try:
        yield from _search_file(path, place)
    except UserError as error:
        # `_doctor_lines` reads the events to find an attempt, and would fail on them again.
        if path.name == EVENTS:
            raise
        yield from _doctor_lines(f"a record is damaged: {error.what}", path, 1)


def _search_file(path: Path, place: Path) -> Iterator[Line]:
    """Search a file that is `place` or below it.

    Lines that do not name their attempt and rank have those of the file's name. Lines without a
    time have that of the rank's end.
    """
    with open_plain(path, UserError) as file:
        rank_of_file = _first_number(_RANK_FILE.search(str(path)))
        attempts = _Attempts.of_file(path, place)
        for signature, names, evidence in search(file, str(path)):
            rank = evidence.rank
            if rank is None:
                rank = rank_of_file
            attempt = evidence.attempt or attempts.at(evidence.line)
            time = evidence.at or _end_of_rank(path)
            whole = replace(evidence, attempt=attempt, rank=rank, at=time)
            yield Line(signature, names, whole)


def _first_number(match: re.Match[str] | None) -> int | None:
    """Return the first group of a match that is there, as a number."""
    if match is None:
        return None
    for group in match.groups():
        if group:
            return int(group)
    return None


@dataclass
class _Attempts:
    """The attempt that each line of a file belongs to."""

    # The first line of each attempt, ascending.
    first_lines: list[int]
    # The numbers of these attempts.
    numbers: list[int]

    def at(self, line: int) -> int:
        """Return the attempt of a line."""
        following = bisect_right(self.first_lines, line)
        return self.numbers[following - 1]

    @staticmethod
    def of_file(path: Path, place: Path) -> _Attempts:
        """Return the attempts of a file that is `place` or below it, by its events or its name."""
        if path.name == EVENTS:
            return _Attempts.of_events(path)
        # Folders above the run may be named like an attempt.
        name = path
        if path != place:
            name = path.relative_to(place)
        numbers = _ATTEMPT.findall(str(name))
        number = 0
        if numbers:
            number = int(numbers[-1])
        return _Attempts([0], [number])

    @staticmethod
    def of_events(events: Path) -> _Attempts:
        """Return the attempts of a file of events.

        A start may fail before it writes `run_start`; then the fault after it gives its number.
        """
        attempts = _Attempts([0], [0])
        has_started = False
        with open_plain(events, UserError) as file:
            for number, line in enumerate(file, 1):
                found = _ATTEMPT_BOUNDARY.match(line)
                if found is None:
                    continue
                is_fault = bool(found[1])
                if is_fault:
                    # The attempt ends with the line of its fault.
                    attempts.numbers[-1] = int(found[2])
                    attempts.start_next(number + 1)
                elif has_started:
                    # The previous attempt was killed, and could not write its fault.
                    attempts.start_next(number)
                has_started = not is_fault
        return attempts

    def start_next(self, line: int) -> None:
        """Let the next attempt start at a line."""
        self.first_lines.append(line)
        self.numbers.append(self.numbers[-1] + 1)


def _end_of_rank(log: Path) -> float | None:
    """Return when a rank ended, in unix seconds.

    It is the time of the error in the .json file beside its log, else when the log was last written.

    None if neither can be read.
    """
    noted = log.with_suffix(".json")
    try:
        if not noted.is_file():
            return log.stat().st_mtime
        error = read_object(noted, UserError)
        return float(error["message"]["drumline"]["time"])
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return None


def search(file: BinaryIO, name: str) -> Iterator[Line]:
    """Give each line that a signature matches once, by the first signature that does.

    `name`: of the file, for the evidence.
    """
    line_number = 1
    for text in _pieces(file):
        matches = _matches(text)
        counted = 0  # characters whose lines are in `line_number`
        for start in sorted(matches):
            line_number += text.count("\n", counted, start)
            counted = start
            signature, match = matches[start]
            names: dict[str, str] = {}
            for group, value in match.groupdict().items():
                # A group of an alternative that did not match is None.
                if value:
                    names[group] = value
            line, _, _ = text[start : start + LONGEST_LINE].partition("\n")
            yield Line(signature, names, _evidence(name, line_number, line))
        line_number += text.count("\n", counted)


def _matches(text: str) -> dict[int, tuple[Signature, re.Match[str]]]:
    """Return index of a line's first character → the first signature that matches the line."""
    matches: dict[int, tuple[Signature, re.Match[str]]] = {}
    # The table has special signatures before general ones, so the first match is the best.
    for signature in signatures():
        for pattern in signature.match:
            for match in pattern.finditer(text):
                start = text.rfind("\n", 0, match.end()) + 1
                matches.setdefault(start, (signature, match))
    return matches


def _pieces(file: BinaryIO) -> Iterator[str]:
    """Give the text of a file in pieces of whole lines, without colours.

    A line that is longer than a piece is cut.
    """
    rest = b""
    while True:
        piece = file.read(PIECE)
        if not piece:
            break
        # The last line of a piece goes on in the next.
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > PIECE:
            whole, end, rest = rest, b"", b""
        yield _plain(whole + end)
    if rest:
        yield _plain(rest)


def _plain(text: bytes) -> str:
    """Return the text of a log without colours and without texts that a model wrote or read."""
    lines = text.decode(errors="replace")
    # Progress bars overwrite their line by carriage returns, which are no ends of lines.
    lines = lines.replace("\r\n", "\n").replace("\r", " ")
    lines = _COLOUR.sub("", lines)
    lines = _TEXTS.sub(r"\1}", lines)
    return _SAMPLE.sub(r"\1", lines)


def _evidence(name: str, number: int, line: str) -> Evidence:
    """Return a line of a file as evidence, with the attempt, rank and time that it names."""
    shown = redact(line.strip())
    if len(shown) > SHOWN:
        shown = f"{shown[:SHOWN]}…"
    attempt = 0
    named_attempt = _ATTEMPT_OF_EVENT.search(line)
    if named_attempt is not None:
        attempt = int(named_attempt[1])
    rank = _first_number(_RANK_LINE.search(line))
    return Evidence(name, number, shown, attempt, rank, moment(line))


def moment(line: str) -> float | None:
    """Return the time that a line begins with, or names, in unix seconds.

    A time without a zone is local, and one without a year is of this year. None if there is none.
    """
    try:
        event = _EVENT.search(line)
        if event:
            return float(event[1])
        date = _DATE.search(line)
        if date:
            time = date[2].replace(",", ".")
            zone = date[3] or ""
            return datetime.fromisoformat(f"{date[1]}T{time}{zone}").timestamp()
        glog = _GLOG.search(line)
        if glog:
            day = f"{datetime.now().year}-{int(glog[1]):02}-{glog[2]}"
            time = glog[3][:15]  # HH:MM:SS and six digits
            return datetime.fromisoformat(f"{day}T{time}").timestamp()
    except ValueError:
        return None
    return None


def order_findings(found: Iterable[Line]) -> list[Finding]:
    """Return one finding for each signature and attempt, in the order in which to read them."""
    groups: dict[tuple[int, str], _Lines] = {}
    for line in found:
        key = (line.evidence.attempt, line.signature.name)
        if key not in groups:
            groups[key] = _Lines(line.signature, line.evidence)
        groups[key].add(line)
    findings = []
    for lines in groups.values():
        # Some messages mean a fault only if they are repeated.
        if lines.number >= lines.signature.least:
            findings.append(lines.finding())
    with_causes = []
    for finding in findings:
        causes = _causes(finding, findings)
        with_causes.append(replace(finding, follows=causes))
    return sorted(with_causes, key=_reading_order)


def _reading_order(finding: Finding) -> tuple[object, ...]:
    """Return the sort key of a finding: newest attempt, faults, causes, and known errors first."""
    signature = finding.signature
    return (
        -finding.evidence.attempt,
        signature.warn,
        bool(finding.follows),
        signature.kind == "unknown",
        *_order(finding.evidence),
    )


def _order(evidence: Evidence) -> tuple[float, int, str, int]:
    """Return the sort key of a line: by its time, lines without one last; then rank and place."""
    time = float("inf") if evidence.at is None else evidence.at
    rank = -1 if evidence.rank is None else evidence.rank
    return time, rank, evidence.path, evidence.line


def _causes(finding: Finding, findings: list[Finding]) -> tuple[str, ...]:
    """Return the names of the findings of the same attempt that a finding is a consequence of."""
    causes = []
    for other in findings:
        is_same_attempt = other.evidence.attempt == finding.evidence.attempt
        if is_same_attempt and finding.signature.follows(other.signature):
            causes.append(other.signature.name)
    return tuple(causes)


def _find_damage(run: Path) -> Iterator[Line]:
    """Give a line for each record of a run that cannot be read, or not all of it."""
    plan = run / "plan.json"
    try:
        if plan.exists():
            read_object(plan, UserError, numbers=False)
    except UserError as error:
        yield from _doctor_lines(f"a record is damaged: {error.what}", plan, 1)
    events = run / EVENTS
    damaged = []
    for number, _, is_sound in examine(events):
        if not is_sound:
            damaged.append(number)
    if damaged:
        first = damaged[0]
        text = f"a record is damaged: {len(damaged):,} lines cannot be read, the first is {first:,}"
        yield from _doctor_lines(text, events, first)


def _doctor_lines(text: str, path: Path, line: int, at: float | None = None) -> Iterator[Line]:
    """Give a line that the doctor itself writes about a file, if a signature matches it.

    Args:
        text: The line.
        path: The file.
        line: The line of the file that it is about.
        at: Its time in unix seconds.
    """
    attempt = 0
    if path.name == EVENTS:
        attempt = _Attempts.of_events(path).at(line)
    for signature, names, _ in search(io.BytesIO(text.encode()), ""):
        evidence = Evidence(str(path), line, text, attempt, at=at)
        yield Line(signature, names, evidence)


def _find_slow_loader(events: Path) -> Iterator[Line]:
    """Give a line for a run whose last steps waited for data."""
    steps = []
    for event in read(events):
        if not isinstance(event, Step):
            continue
        # Damaged events have other types.
        if isinstance(event.data_s, float) and isinstance(event.seconds, float):
            steps.append(event)
    steps = steps[-WAITED_STEPS:]
    if len(steps) < WAITED_STEPS:
        return
    # Medians, because one long wait, as at the start of an epoch, does no harm.
    waited = median(step.data_s for step in steps)
    whole = median(step.seconds for step in steps)
    if waited >= max(WAITED_SECONDS, WAITED * whole):
        text = f"the last {WAITED_STEPS} steps waited for data: {waited:.2f} s of {whole:.2f} s (medians)"
        last_line = events.read_bytes().count(b"\n")
        yield from _doctor_lines(text, events, last_line, steps[-1].t)


def ranks_without_log(run: Path) -> list[int]:
    """Return the ranks of the plan that wrote no log in the newest attempt, though others did.

    Empty if the plan cannot be read, or if nobody wrote a log.
    """
    try:
        plan = read_object(run / "plan.json", UserError)
        world_size = int(prod(plan["mesh"].values()))
    except (UserError, KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return []
    attempts = list(numbered_entries(run / "logs", "attempt-").values())
    if not attempts:
        return []
    newest = attempts[-1]
    with_log: set[int] = set()
    # Of several hosts each has a folder of its own.
    for folder in (newest, *newest.glob("*/")):
        with_log.update(numbered_entries(folder, "rank-"))
    if not with_log:
        return []
    ranks = range(min(world_size, MOST_RANKS))
    return [rank for rank in ranks if rank not in with_log]

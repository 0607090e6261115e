"""`drumline doctor RUN`: find in the logs and events of a run why it failed.

The output of any other program can be read as well. Lines are matched against the table of
signatures. Logs may have gigabytes, so they are read in pieces, and matching lines are counted, not
kept.
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
# Bytes of a log that are searched at once.
PIECE = 2**22
# The most characters of a line that are shown as evidence.
SHOWN = 300
# Characters of a line that are searched for a rank, an attempt and a time.
LONGEST_LINE = 8 * SHOWN
# Endings of the names of logs.
LOGS = {".log", ".out", ".err", ".txt"}
# Folders of a run without logs.
NO_LOGS = {"checkpoints", "export", "cache", "tensorboard"}
# The data loader is slow if the median of the last WAITED_STEPS steps waits for data at least this
# share of its time, and at least this many seconds.
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
    # Counted from 1.
    line_number: int
    # The line without secrets, cut after SHOWN characters.
    text: str
    # The attempt of the run, counted from 1; 0 if it is not known.
    attempt: int = 0
    # None if it is not known.
    rank: int | None = None
    # Unix seconds; None if the time is not known.
    at: float | None = None

    @property
    def place(self) -> str:
        """The path and the number of the line, as `path:number`."""
        return f"{self.path}:{self.line_number}"


@dataclass(frozen=True)
class Finding:
    """A signature that matches lines of one attempt."""

    signature: Signature
    # The cause with the names that the lines give.
    cause: str
    # The first line that the signature matches.
    evidence: Evidence
    # How many lines it matches.
    line_count: int = 1
    # The ranks that wrote these lines.
    ranks: tuple[int, ...] = ()
    # Names of the other findings of the attempt that it is a consequence of.
    caused_by: tuple[str, ...] = ()

    def values(self) -> dict[str, object]:
        """Return the finding as values for JSON."""
        return {
            "name": self.signature.name,
            "kind": self.signature.kind,
            "warning": self.signature.warn,
            "cause": self.cause,
            "fix": self.signature.fix,
            "place": self.evidence.place,
            "text": self.evidence.text,
            "lines": self.line_count,
            "attempt": self.evidence.attempt,
            "ranks": list(self.ranks),
            "consequence_of": list(self.caused_by),
        }


class MatchedLine(NamedTuple):
    """A line that a signature matches. It keeps no more of the log than what is shown."""

    signature: Signature
    # Name of a group in the signature's pattern → the text that it matched.
    names: dict[str, str]
    evidence: Evidence


@dataclass
class _MatchGroup:
    """The lines that one signature matches in one attempt.

    Only the first is kept, and all are counted, since a log of gigabytes may be full of them.
    """

    signature: Signature
    first: Evidence
    first_with_names: MatchedLine | None = None
    count: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, line: MatchedLine) -> None:
        """Count a line. Lines come file by file, so a line may be earlier in time than those before it."""
        evidence = line.evidence
        self.count += 1
        self.first = min(self.first, evidence, key=_order)
        if evidence.rank is not None:
            self.ranks.add(evidence.rank)
        if not line.names:
            return
        earlier = self.first_with_names
        if earlier is None or _order(evidence) < _order(earlier.evidence):
            self.first_with_names = line

    def build_finding(self) -> Finding:
        """Return the finding. The names in its cause are those of the first line that has names."""
        names: dict[str, str] = {}
        if self.first_with_names is not None:
            names = self.first_with_names.names
        cause = self.signature.explain(names)
        ranks = tuple(sorted(self.ranks))
        return Finding(self.signature, cause, self.first, self.count, ranks)


def diagnose(place: str) -> list[Finding]:
    """Return the findings of a run, in the order in which to read them.

    The newest attempt comes first. Within an attempt causes come before their consequences, and of
    two causes the earlier one comes first.

    Args:
        place: A run folder, another folder with logs, a file, or `-` for standard input.

    Raises UserError if there is nothing to read.
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
    lines: list[Iterator[MatchedLine]] = []
    for file in files:
        # A file that the user names must be readable; one of many in a folder need not.
        if file == path:
            lines.append(_search_file(file, path))
        else:
            lines.append(_search_readable(file, path))
    return order_findings(chain(*lines, _find_slow_loader(path / EVENTS), _find_damage(path)))


def find_likely_cause(text: str) -> Finding | None:
    """Return the first finding of a text that is a cause.

    None if the text has only warnings, consequences, and errors that no signature knows.
    """
    file = io.BytesIO(text.encode(errors="replace"))
    for finding in order_findings(search(file, "")):
        signature = finding.signature
        if signature.warn or signature.kind == "unknown":
            continue
        # Causes come before consequences, so after a consequence there is none.
        is_consequence = bool(finding.caused_by) or ANY in signature.after
        if is_consequence:
            return None
        return finding
    return None


def _logs(folder: Path) -> Iterator[Path]:
    """Yield the paths of the logs and events in a folder and below it, in any order."""
    for path in folder.rglob("*"):
        if path.suffix not in LOGS and path.name != EVENTS:
            continue
        # A folder may be listed, but not entered.
        with contextlib.suppress(PermissionError):
            folders = set(path.relative_to(folder).parts[:-1])
            if path.is_file() and not NO_LOGS & folders:
                yield path


def _search_readable(path: Path, place: Path) -> Iterator[MatchedLine]:
    """Yield the matched lines of one of several files in a folder.

    A file that cannot be read does not end the search, but becomes a finding itself.
    """
    try:
        yield from _search_file(path, place)
    except UserError as error:
        # `_doctor_lines` reads the events to find an attempt, and would fail on them again.
        if path.name == EVENTS:
            raise
        yield from _doctor_lines(f"a record is damaged: {error.what}", path, 1)


def _search_file(path: Path, place: Path) -> Iterator[MatchedLine]:
    """Yield the matched lines of a file.

    A line that does not name its attempt or rank gets those of the file's name. A line without a
    time gets the time at which its rank ended.

    Args:
        path: The file.
        place: The file itself, or the folder that is searched.
    """
    with open_plain(path, UserError) as file:
        rank_of_file = _first_number(_RANK_FILE.search(str(path)))
        attempts = _Attempts.from_file(path, place)
        for signature, names, evidence in search(file, str(path)):
            rank = evidence.rank
            if rank is None:
                rank = rank_of_file
            attempt = evidence.attempt or attempts.get_attempt(evidence.line_number)
            time = evidence.at or _end_of_rank(path)
            whole = replace(evidence, attempt=attempt, rank=rank, at=time)
            yield MatchedLine(signature, names, whole)


def _first_number(match: re.Match[str] | None) -> int | None:
    """Return the first group of a match that has a text, as a number; None if none has."""
    if match is None:
        return None
    for group in match.groups():
        if group:
            return int(group)
    return None


@dataclass
class _Attempts:
    """The attempt that each line of a file belongs to."""

    # The number of the first line of each attempt, ascending.
    first_lines: list[int]
    # The numbers of these attempts, from 1; 0 if the attempt is not known.
    numbers: list[int]

    def get_attempt(self, line: int) -> int:
        """Return the number of the attempt that a line belongs to."""
        following = bisect_right(self.first_lines, line)
        return self.numbers[following - 1]

    @staticmethod
    def from_file(path: Path, place: Path) -> _Attempts:
        """Return the attempts in a file: by its events, or else by its name.

        Args:
            path: The file.
            place: The file itself, or the folder that is searched.
        """
        if path.name == EVENTS:
            return _Attempts.from_events(path)
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
    def from_events(events: Path) -> _Attempts:
        """Return the attempts in a file of events.

        An attempt begins with the event `run_start`, and ends with `fault`, which has its number.
        If an attempt failed before it wrote `run_start`, its fault alone tells its number.
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
        """Add the next attempt. `line`: the number of its first line."""
        self.first_lines.append(line)
        self.numbers.append(self.numbers[-1] + 1)


def _end_of_rank(log: Path) -> float | None:
    """Return the time at which a rank ended, in unix seconds.

    It is the time of the error in the .json file beside the rank's log, or else the time at which
    the log was last written. None if neither can be read.
    """
    noted = log.with_suffix(".json")
    try:
        if not noted.is_file():
            return log.stat().st_mtime
        error = read_object(noted, UserError)
        return float(error["message"]["drumline"]["time"])
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return None


def search(file: BinaryIO, name: str) -> Iterator[MatchedLine]:
    """Yield each line that a signature matches, once, with the first signature that matches it.

    Args:
        file: The log.
        name: The name of the log, for the evidence.
    """
    line_number = 1
    for text in _pieces(file):
        matches = _matches(text)
        counted = 0  # characters before this index are counted in `line_number`
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
            yield MatchedLine(signature, names, _evidence(name, line_number, line))
        line_number += text.count("\n", counted)


def _matches(text: str) -> dict[int, tuple[Signature, re.Match[str]]]:
    """Return the index of a line's first character → the first signature that matches the line."""
    matches: dict[int, tuple[Signature, re.Match[str]]] = {}
    # The table has special signatures before general ones, so the first match is the best.
    for signature in signatures():
        for pattern in signature.match:
            for match in pattern.finditer(text):
                start = text.rfind("\n", 0, match.end()) + 1
                matches.setdefault(start, (signature, match))
    return matches


def _pieces(file: BinaryIO) -> Iterator[str]:
    """Yield the text of a file in pieces of whole lines, as `_plain` returns it.

    A line that is longer than a piece is split.
    """
    rest = b""
    while True:
        piece = file.read(PIECE)
        if not piece:
            break
        # The last line of a piece may continue in the next piece.
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > PIECE:
            whole, end, rest = rest, b"", b""
        yield _plain(whole + end)
    if rest:
        yield _plain(rest)


def _plain(text: bytes) -> str:
    """Return the text of a log without colours and without texts that a model wrote or read."""
    lines = text.decode(errors="replace")
    # Progress bars overwrite their line by carriage returns, which do not end a line.
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
    """Return the time that a line begins with or contains, in unix seconds; None if it has none.

    A time without a time zone is taken for local time, and one without a year for this year's.
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


def order_findings(found: Iterable[MatchedLine]) -> list[Finding]:
    """Return a finding for each signature in each attempt, in the order in which to read them."""
    groups: dict[tuple[int, str], _MatchGroup] = {}
    for line in found:
        key = (line.evidence.attempt, line.signature.name)
        if key not in groups:
            groups[key] = _MatchGroup(line.signature, line.evidence)
        groups[key].add(line)
    findings = []
    for group in groups.values():
        # Some messages are a fault only if they are repeated.
        if group.count >= group.signature.least:
            findings.append(group.build_finding())
    with_causes = []
    for finding in findings:
        causes = _causes(finding, findings)
        with_causes.append(replace(finding, caused_by=causes))
    return sorted(with_causes, key=_reading_order)


def _reading_order(finding: Finding) -> tuple[object, ...]:
    """Return the sort key of a finding.

    The newest attempt comes first, then faults before warnings, causes before consequences, known
    errors before unknown ones, and earlier lines before later ones.
    """
    signature = finding.signature
    return (
        -finding.evidence.attempt,
        signature.warn,
        bool(finding.caused_by),
        signature.kind == "unknown",
        *_order(finding.evidence),
    )


def _order(evidence: Evidence) -> tuple[float, int, str, int]:
    """Return the sort key of a line: its time (lines without one come last), then rank and place."""
    time = float("inf") if evidence.at is None else evidence.at
    rank = -1 if evidence.rank is None else evidence.rank
    return time, rank, evidence.path, evidence.line_number


def _causes(finding: Finding, findings: list[Finding]) -> tuple[str, ...]:
    """Return the names of those of `findings` that cause `finding` in the same attempt."""
    causes = []
    for other in findings:
        is_same_attempt = other.evidence.attempt == finding.evidence.attempt
        if is_same_attempt and finding.signature.is_caused_by(other.signature):
            causes.append(other.signature.name)
    return tuple(causes)


def _find_damage(run: Path) -> Iterator[MatchedLine]:
    """Yield a line for each record of a run, plan.json or the events, that cannot be read as a whole."""
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


def _doctor_lines(
    text: str, path: Path, line: int, at: float | None = None
) -> Iterator[MatchedLine]:
    """Yield a line that the doctor itself writes about a file, if a signature matches it.

    Args:
        text: The text of the line.
        path: The file.
        line: The number of the line in the file that the text is about.
        at: The time of that line in unix seconds; None if it is not known.
    """
    attempt = 0
    if path.name == EVENTS:
        attempt = _Attempts.from_events(path).get_attempt(line)
    for signature, names, _ in search(io.BytesIO(text.encode()), ""):
        evidence = Evidence(str(path), line, text, attempt, at=at)
        yield MatchedLine(signature, names, evidence)


def _find_slow_loader(events: Path) -> Iterator[MatchedLine]:
    """Yield a line if the last steps of a run waited for data (see WAITED)."""
    steps = []
    for event in read(events):
        if not isinstance(event, Step):
            continue
        # The fields of a damaged event may have other types.
        if isinstance(event.data_s, float) and isinstance(event.seconds, float):
            steps.append(event)
    steps = steps[-WAITED_STEPS:]
    if len(steps) < WAITED_STEPS:
        return
    # Medians are taken because a single long wait, such as at the start of an epoch, does no harm.
    waited = median(step.data_s for step in steps)
    whole = median(step.seconds for step in steps)
    if waited >= max(WAITED_SECONDS, WAITED * whole):
        text = f"the last {WAITED_STEPS} steps waited for data: {waited:.2f} s of {whole:.2f} s (medians)"
        last_line = events.read_bytes().count(b"\n")
        yield from _doctor_lines(text, events, last_line, steps[-1].t)


def ranks_without_log(run: Path) -> list[int]:
    """Return the ranks that wrote no log in the newest attempt, although other ranks did.

    The result is empty if the plan cannot be read, or if no rank wrote a log.
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
    # If there are several hosts, each has a folder of its own.
    for folder in (newest, *newest.glob("*/")):
        with_log.update(numbered_entries(folder, "rank-"))
    if not with_log:
        return []
    ranks = range(min(world_size, MOST_RANKS))
    return [rank for rank in ranks if rank not in with_log]

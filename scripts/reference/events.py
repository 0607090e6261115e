"""The pages of events and exit codes, from the classes in which they are declared."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import dataclass

from drumline import errors
from drumline.telemetry import events
from scripts.reference.markdown import cell, code, links_to, paragraph, table

EVENTS_HEAD = """# Events and metrics

A run writes what happens into `RUN/events.jsonl`, one JSON object a line. Its report, `drumline watch` and trackers
show what stands there. Each event has `t` (unix seconds), `kind`, and the fields of its kind. Besides these it may have
metrics: the numbers of an algorithm, an evaluation set or a probe.

A number that is not finite is `null` (NaN) or the text `"inf"`.

"""
EXIT_CODES_HEAD = """# Exit codes

What a command, and the job script around it, can tell from its exit code.

"""


@dataclass(frozen=True)
class Field:
    """A field of an event as its class declares it."""

    name: str
    type: str
    meaning: str


def events_page() -> str:
    """Return the page of events."""
    parts = []
    kinds = []
    for kind, event in events.KINDS.items():
        if not kind:
            continue
        kinds.append(kind)
        lines = [f"## {kind}\n"]
        # A dataclass without a docstring gets its signature as one.
        own = event.__dict__.get("__doc__") or ""
        if own and not own.startswith(f"{event.__name__}("):
            lines.append(paragraph(own) + "\n")
        rows = [
            [code(field.name), code(field.type), cell(field.meaning)]
            for field in _declared_fields(event)
        ]
        if rows:
            lines.append(table(["field", "type", "meaning"], rows))
        parts.append("\n".join(lines))
    return EVENTS_HEAD + links_to(kinds) + "\n\n" + "\n".join(parts)


def exit_codes_page() -> str:
    """Return the page of exit codes."""
    rows = [["0", "", "The command did what it was asked to do."]]
    for error in vars(errors).values():
        if not (isinstance(error, type) and issubclass(error, errors.DrumlineError)):
            continue
        has_own_code = "exit_code" in vars(error)
        if has_own_code or error.__base__ is errors.DrumlineError:
            meaning = inspect.cleandoc(error.__doc__ or "")
            rows.append([str(error.exit_code), code(error.__name__), cell(meaning)])
    rows.append(
        ["130", "", "Ctrl-C left a display, such as that of `drumline follow`; the run goes on."]
    )
    rows.sort(key=lambda row: int(row[0]))
    return EXIT_CODES_HEAD + table(["exit code", "exception in Python", "meaning"], rows)


def _declared_fields(event: type) -> list[Field]:
    """Return the fields that a class declares, each with its comment: above it, or behind it."""
    source = inspect.cleandoc("\n" + inspect.getsource(event))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    comments = {}
    alone = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            comments[line] = token.string.lstrip("# ")
            if token.line.strip().startswith("#"):
                alone.add(line)
    found = []
    for statement in body.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        above: list[str] = []
        line = statement.lineno - 1
        while line in alone:
            above.insert(0, comments[line])
            line -= 1
        behind = []
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            if line in comments:
                behind.append(comments[line])
        name = statement.target.id.removesuffix("_")
        meaning = " ".join([*above, *behind])
        found.append(Field(name, ast.unparse(statement.annotation), meaning))
    return found

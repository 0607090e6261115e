"""The page of all commands, from the command line itself."""

from __future__ import annotations

from typing import Any

import typer.main

from drumline.cli import app
from drumline.config.registry import DISTRIBUTIONS
from scripts.reference.markdown import cell, code, links_to, paragraph, table

HEAD = """# Commands

Every command of `drumline`, with its arguments and options. `drumline COMMAND --help` prints the same.
[Exit codes](exit_codes.md) have a page of their own.

"""


def commands_page() -> str:
    """Return the page."""
    # Of a class of click's, or of typer's own copy of click: this depends on typer's version.
    group: Any = typer.main.get_command(app)
    parts = []
    names = []
    # Commands of other people's packages, which may be installed here, are left out.
    for name in [*group.commands, *DISTRIBUTIONS["commands"]]:
        command = group.get_command(None, name)
        if command.hidden:
            continue
        names.append(name)
        parts.append(_command_text(name, command))
    return HEAD + links_to(names) + "\n\n" + "\n".join(parts)


def _command_text(name: str, command: Any) -> str:
    """Return the part of the page about one command."""
    context = command.make_context(f"drumline {name}", [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")
    lines = [f"## {name}\n", f"```\ndrumline {name} {usage}\n```\n"]
    if command.help:
        lines.append("\n\n".join(paragraph(part) for part in command.help.split("\n\n")) + "\n")
    distribution = DISTRIBUTIONS["commands"].get(name)
    if distribution is not None:
        lines.append(f"This command needs `pip install {distribution}`.\n")
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record and parameter.name != "help":
            written, meaning = record
            rows.append([code(written), cell(meaning)])
    if rows:
        lines.append(table(["argument or option", "meaning"], rows))
    return "\n".join(lines)

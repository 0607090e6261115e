"""The command `drumline convert`: the entry point of the group `drumline.commands`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import parse_path
from drumline.cli.plugins import PluginCommand
from drumline.errors import UserError


def convert(
    old: Annotated[
        list[str],
        typer.Argument(
            metavar="OLD | -- COMMAND",
            help="A config of another tool, a script that calls trl, or that call: -- trl sft --key value.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            parser=parse_path,
            metavar="NEW.yaml",
            help="The file to write. Default: standard output.",
        ),
    ] = None,
) -> None:
    """Translate a config of another tool into a Drumline YAML.

    OLD may be of accelerate, DeepSpeed, transformers, TRL, LLaMA-Factory or Axolotl. Each key that
    has no effect gets a note.
    """
    if len(old) == 1:
        write_converted(parse_path(old[0]), output)
    else:
        write_converted(old, output)


def write_converted(old: Path | list[str], output: Path | None) -> None:
    """Write the new YAML to a file or standard output, and the notes to standard error.

    The YAML has the notes as well, so they are not written again if a terminal shows the YAML.

    Args:
        old: A file, or the words of a command.
        output: The file to write; None for standard output.

    Raises:
        UserError: `output` exists already, or cannot be written.
    """
    from drumline.report.bars import notes
    from drumline_convert.convert import convert as to_drumline

    text, messages = to_drumline(old, output)
    text_is_shown = output is None and sys.stdout.isatty()
    if not text_is_shown:
        notes(messages)
    if output is None:
        print(text, end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            "is there already", where=str(output), fix="choose another name, or remove it"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(output), fix="choose another place"
        ) from None


CONVERT = PluginCommand(convert, heading="Data")

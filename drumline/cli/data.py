"""The commands on data and on files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import ConfigFile, Overrides, path_of


def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tokenise and pack the data ahead of training.

    The result is cached by content.
    """
    from drumline.train.command import prepare as run

    run(config, overrides or [])


def preview(
    config: ConfigFile,
    overrides: Overrides = None,
    row: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show row N of the data alone, counted from 1."),
    ] = None,
    first: Annotated[
        int, typer.Option(min=1, metavar="N", help="Read the first N rows of each source.")
    ] = 500,
    samples: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show N samples. Default: 3, or 20 in a page."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(parser=path_of, metavar="F", help="Write a page that needs no network."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all tokens of long rows.")
    ] = False,
) -> None:
    """Show rows as the model gets them.

    Tokens are marked as in the loss, cut or special. Packs, both sides of pairs and what rewards
    get are shown, too.
    """
    from drumline.train.preview import Options
    from drumline.train.preview import preview as run

    run(config, overrides or [], Options(row, first, samples, html, everything))


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
            parser=path_of,
            metavar="NEW.yaml",
            help="The file to write. Default: standard output.",
        ),
    ] = None,
) -> None:
    """Translate a config of another tool into a Drumline YAML.

    OLD may be of accelerate, DeepSpeed, transformers, TRL, LLaMA-Factory or Axolotl. Each key that
    has no effect gets a note.
    """
    from drumline.train.command import convert as run

    if len(old) == 1:
        run(path_of(old[0]), output)
    else:
        run(old, output)


COMMANDS = {
    "prepare": prepare,
    "preview": preview,
    "convert": convert,
}

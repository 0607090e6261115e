"""The commands that tokenise data and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import ConfigFile, Overrides, path_option


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
        path_option(metavar="F", help="Write a page that needs no network."),
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


COMMANDS = {
    "prepare": prepare,
    "preview": preview,
}

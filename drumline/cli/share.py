"""The commands that export, publish and serve the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import Run, Trust, existing_or_url, path_option


def export(
    run: Annotated[
        str,
        typer.Argument(
            parser=existing_or_url,
            metavar="RUN",
            help="A run folder, or the URL of a run (its checkpoint.url).",
        ),
    ],
    to: Annotated[Path, path_option(help="The folder to write.")],
    which: Annotated[str, typer.Option(help="last, best, or a step number.")] = "best",
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16, fp16, or auto: as checkpoint.export_dtype of the run.")
    ] = "auto",
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="LoRA: write only the adapter, as PEFT's files, not merged."
        ),
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face folder.

    The folder is then loaded again, and the logits are compared.
    """
    from drumline.train.command import export as run_export

    run_export(run, to, which, dtype, adapter, trust_remote_code)


def push(
    run: Run,
    to: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="The repository, made where there is none.")
    ],
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Make the repository private; fail if it exists and is public."
        ),
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="LoRA: only the adapter, as PEFT's files, not merged.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the model card; send nothing.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Send a run's model to the Hugging Face hub.

    The model card is made from the run's facts. HF_ENDPOINT and HF_TOKEN are used.
    """
    from drumline.inference.hub import push as run_push

    run_push(run, to, private, adapter, dry_run, trust_remote_code)


def serve(
    run: Run,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets others in.")
    ] = "127.0.0.1",
    trust_remote_code: Trust = False,
) -> None:
    """Serve a run's model with OpenAI's interface until Ctrl-C.

    vLLM serves it if it is installed, else `transformers serve`.
    """
    from drumline.inference.serve import serve as run_serve

    exit_code = run_serve(run, host, port, trust_remote_code)
    raise typer.Exit(exit_code)


COMMANDS = {
    "export": export,
    "push": push,
    "serve": serve,
}

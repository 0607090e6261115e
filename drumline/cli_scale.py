"""The commands that take a run out into the world, and a config to many runs."""

from __future__ import annotations

from typing import Annotated

import typer

from drumline.cli_runs import Run

Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. No file can allow this.")]


def push(
    run: Run,
    to: Annotated[str, typer.Option(metavar="ORG/NAME", help="The repository, made where there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private; one that is there and public is refused.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="LoRA: only the adapter, as PEFT's files, not merged.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files and the model card; send nothing.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Send a run's model to the Hugging Face hub (HF_ENDPOINT, HF_TOKEN) with a model card made from the run's facts."""
    from drumline.inference.hub import push as send

    send(run, to, private, adapter, dry_run, trust_remote_code)


def serve(
    run: Run,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 lets others in.")] = "127.0.0.1",
    trust_remote_code: Trust = False,
) -> None:
    """Serve a run's model with OpenAI's interface, by vLLM where it is installed, else by `transformers serve`, until Ctrl-C."""
    from drumline.inference.serve import serve as run_server

    raise typer.Exit(run_server(run, host, port, trust_remote_code))


def add(app: typer.Typer) -> None:
    """Have `app` know of them."""
    for command in (push, serve):
        app.command()(command)

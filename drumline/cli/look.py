"""The commands that show what runs did and what their models have learned."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.arguments import (
    TRUSTED,
    ConfigFile,
    Overrides,
    Runs,
    Trust,
    existing_or_url,
    existing_path,
    parse_model,
    path_option,
)
from drumline.cli.usage import read_list
from drumline.errors import UserError, printable

if TYPE_CHECKING:
    from drumline.launch.early import EarlyRanks


def watch(
    runs: Runs,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen at; another than this machine's own needs the token that is printed."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port; 0: a free one. Default: 8765.")
    ] = None,
) -> None:
    """Follow runs on a page in the browser until Ctrl-C.

    The runs are only read.
    """
    from drumline.launch.rank_phases import rank_phases
    from drumline.report.watch import watch as run

    run(list(dict.fromkeys(runs)), host, port, rank_phases)


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        path_option(metavar="F", help="The file to write. Default: RUN/report.html."),
    ] = None,
) -> None:
    """Write an HTML page about runs and a PNG of their curves.

    The page opens without a network.
    """
    from drumline.report.page import report as run

    print(printable(f"wrote {run(runs, out)}"))


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            parser=existing_path,
            metavar="A B",
            help="Two runs, or two folders of runs that differ in run.seed.",
        ),
    ],
) -> None:
    """Compare the keys and the curves of two runs.

    It prints which keys differ, which curves are better and by how much, and whether seeds can tell
    that from chance.
    """
    from drumline.report.compare import compare as run

    run(runs)


def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            parser=existing_or_url,
            metavar="PATH",
            help="A checkpoint or run (folder or URL), or a Hugging Face folder. Default: the run's best, else its newest.",
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="sft: answer N held-out prompts with greedy decoding."
        ),
    ] = None,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASKS",
            help="Comma-separated tasks of lm-eval; CONFIG may then be a run folder.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --lm-eval: questions per task.")
    ] = None,
    include_path: Annotated[
        Path | None, path_option(help="With --lm-eval: a folder with more task YAMLs.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Evaluate a checkpoint on the held-out set.

    It runs with the strategy of CONFIG. Metrics are also written to RUN/eval.json.
    """
    all_overrides = list(overrides or [])
    if trust_remote_code:
        all_overrides.append(TRUSTED)
    tasks = read_list(lm_eval, "--lm-eval", "arc_easy,hellaswag")
    if generate and tasks:
        raise UserError(
            "--generate and --lm-eval are two evaluations",
            where="drumline eval",
            fix="give one at a time",
        )
    if not tasks and (limit is not None or include_path is not None):
        raise UserError(
            "--limit and --include-path are of --lm-eval",
            where="drumline eval",
            fix="name its tasks, or leave them out",
        )
    with ExitStack() as stack:
        early = None
        if not tasks and not generate:
            # Before the imports below: the ranks are forks of this process and share them.
            early = stack.enter_context(_early_ranks(config, all_overrides))
        from drumline.inference import evaluate as evaluation

        fetched = stack.enter_context(
            evaluation.fetch_checkpoint(checkpoint, config, all_overrides)
        )
        if tasks:
            code = evaluation.score_with_lm_eval(
                config, all_overrides, fetched, tasks, limit, include_path
            )
        elif generate:
            code = evaluation.answer_held_out_prompts(config, all_overrides, fetched, generate)
        else:
            code = evaluation.evaluate(config, all_overrides, fetched, early)
        raise typer.Exit(code)


def _early_ranks(config_path: Path, overrides: list[str]) -> EarlyRanks:
    """Start the ranks of a config, so that they import their modules while the plan is made.

    The config may be a stranger's, so only an override can allow it to run code of its own.
    """
    from drumline.config.load import load
    from drumline.launch.early import EarlyRanks

    return EarlyRanks(load(config_path, overrides, trusted=False).config)


def chat(
    place: Annotated[
        str,
        typer.Argument(
            parser=parse_model,
            metavar="RUN",
            help="A run folder, a Hugging Face folder, or a hub id.",
        ),
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, help="Sampling temperature; 0 takes the most likely token each time."
        ),
    ] = 0.7,
    system: Annotated[
        str | None, typer.Option(help="A system message before the conversation.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk to a trained model in the terminal."""
    from drumline.system.process import pause_garbage_collection

    with pause_garbage_collection():
        from drumline.inference.model import chat as run

    run(place, max_new_tokens, temperature, system, trust_remote_code)


COMMANDS = {
    "watch": watch,
    "report": report,
    "compare": compare,
    "eval": evaluate,
    "chat": chat,
}

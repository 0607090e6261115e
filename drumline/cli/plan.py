"""The commands that plan a run, and those that print what a plan may contain."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.arguments import (
    Overrides,
    existing_path,
    parse_model,
    parse_path,
    parse_path_or_id,
    path_option,
)
from drumline.errors import UserError

# `none` works as well, and means the same as `full`: all weights are trained.
ADAPTER_HELP = "full, lora or qlora."
# Letters that may end a number of tokens, and the factor of each.
COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_count(given: str | float) -> float:
    """Return a number of tokens that was given as a text such as 1e9, 500M or 10B.

    Raises:
        UserError: The text is no number, or the number is below 1.
    """
    text = str(given).strip()
    factor = COUNTS.get(text[-1:].upper(), 1.0)
    digits = text
    if factor > 1:
        digits = text[:-1]
    try:
        count = factor * float(digits)
    except ValueError:
        count = 0.0
    # Infinity and NaN pass here, and are refused later, as for all options that are numbers.
    if math.isfinite(count) and count < 1:
        raise UserError(
            f"{text!r} is no number of tokens", where="--tokens", fix="such as 1e9, 500M or 10B"
        )
    return count


def init(
    config: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="[NEW.yaml]",
            help="The file to write; an existing file is never overwritten.",
        ),
    ] = Path("drumline.yaml"),
    model: Annotated[
        str | None,
        typer.Option(
            parser=parse_model, help="A name such as llama-3.1-8b, a folder, or a hub id."
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="What is learned, such as sft, dpo or grpo; `drumline schema` has all."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            parser=parse_path_or_id,
            help="A file, a folder, hub:OWNER/NAME, tasks:NAME,NAME or digits.",
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="SPEC", help="here, 4x4090, 8xh100-80g, 4x8xa100-80g.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help=ADAPTER_HELP)] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens per training row.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples per optimizer step.")
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Ask nothing; use the default of everything that no flag sets."
        ),
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Ask nothing and copy this recipe, with --data and --model in it.",
        ),
    ] = None,
) -> None:
    """Ask a few questions, plan, and write a commented YAML; or copy a recipe."""
    from drumline.planner.init import InitAnswers
    from drumline.planner.init import init as run

    if recipe is not None:
        from drumline.planner.recipes import write_copy

        planned_flags = {
            "--cluster": cluster,
            "--length": length,
            "--adapter": adapter,
            "--batch": batch,
            "--algorithm": algorithm,
        }
        given = [flag for flag, value in planned_flags.items() if value is not None]
        if given:
            raise UserError(
                "a recipe has its own",
                where=" ".join(given),
                fix="change it in the copy, or plan anew without --recipe",
            )
        raise typer.Exit(write_copy(recipe, config, data, model))

    answers = InitAnswers(
        model=model,
        cluster=cluster,
        length=length,
        adapter=adapter,
        batch=batch,
        algorithm=algorithm,
        data=data,
    )
    exit_code = run(config, answers, yes)
    raise typer.Exit(exit_code)


def recipes(
    family: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this family of models, such as qwen3 or llama."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this size of models, such as 8b or 30b-a3b."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this task: sft, sft-lora, dpo, grpo."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only for this machine: 1x24gb, 1x80gb, 8x80gb, 2x8x80gb."
        ),
    ] = None,
) -> None:
    """List planned YAMLs for common models, tasks and machines.

    `drumline init --recipe NAME` copies one.
    """
    from drumline.planner.recipes import show_recipes

    show_recipes(family, size, task, machine)


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(parser=parse_path, metavar="[CONFIG.yaml]", help="Or use the flags below."),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            parser=parse_model, help="A name such as llama-3.1-8b, a folder, or a hub id."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="4x4090, 8xh100-80g, 4x8xa100-80g. Default: this machine."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens per training row.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help=ADAPTER_HELP)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples per optimizer step.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="What is learned, such as sft, dpo or grpo; `drumline schema` has all."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or auto.")] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            parser=parse_count,
            metavar="N",
            help="Tokens of the whole run, such as 1e9 or 10B: gives hours and cost.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of one device per hour, in any currency.")
    ] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Hours between two faults of a device: print what faults cost, and how often to save.",
        ),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show the N best plans.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also print memory, seconds and hosts by category, what is excluded and why, and"
            " the heuristics.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Explain one plan, by its name or row number."),
    ] = None,
    max_seq: Annotated[
        bool,
        typer.Option(
            "--max-seq", help="Print the longest row that fits, for each family of strategies."
        ),
    ] = False,
    max_batch: Annotated[
        bool,
        typer.Option(
            "--max-batch", help="Print the largest micro-batch that fits, for each family."
        ),
    ] = False,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,…",
            help="Print the best plan for other numbers of hosts (nodes=2,4,8), or for devices, links"
            " and prices that are not there (memory_gb=288 price=6).",
        ),
    ] = None,
    why_not: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Print why the best plan that has this, such as tp=8, is not the first one.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="Print the cheapest number of hosts that trains --tokens in this time, such as 24h.",
        ),
    ] = None,
    offers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST=PRICE,…",
            help="Hosts for --for, with the price of a device per hour: 8xh100-80g=2.5,8xa100-80g=1.6.",
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Trace the activations of the best three plans; takes up to a minute."
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        path_option(metavar="F", help="Plot memory and time to a .png, .svg or .html."),
    ] = None,
    devices: Annotated[
        bool, typer.Option("--devices", help="Print the catalog of devices and links.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Run the best two plans here for a few steps, and correct all estimates by the result.",
        ),
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            parser=existing_path,
            metavar="RUN",
            help="Compare what a run measured with what its plan predicted.",
        ),
    ] = None,
    learn: Annotated[
        bool | None,
        typer.Option(
            "--learn/--no-learn",
            help="With --check: keep what the run measured, and correct later plans for this machine by"
            " it. --no-learn plans without what was kept.",
        ),
    ] = None,
) -> None:
    """Predict which strategies fit, how fast they are, and why.

    This needs no launch, no weights and no data.
    """
    if check is not None:
        from drumline.planner.report.check import check as run_check

        exit_code = run_check(check, as_json, learns=bool(learn))
        raise typer.Exit(exit_code)
    if learn:
        fix = "add --check RUN"
        raise UserError("--learn keeps what a run measured", where="drumline plan", fix=fix)
    from drumline.planner.command import Options, Trial
    from drumline.planner.command import plan as run
    from drumline.planner.question import Flags
    from drumline.planner.report.table import SizeLimit

    flags = Flags(
        model=model,
        cluster=cluster,
        length=length,
        adapter=adapter,
        batch=batch,
        algorithm=algorithm,
        precision=precision,
        price=price,
        mtbf_hours=mtbf_hours,
    )
    if max_seq and max_batch:
        raise UserError(
            "--max-seq and --max-batch cannot be combined",
            where="drumline plan",
            fix="give one at a time",
        )
    find_limit_of: SizeLimit | None = None
    if max_seq:
        find_limit_of = "max_length"
    elif max_batch:
        find_limit_of = "max_batch"
    trial: Trial | None = None
    if probe:
        # The planner may not import from `train`, so the command passes the function to it.
        from drumline.train.probe import probe as trial
    options = Options(
        config=config,
        overrides=overrides or [],
        flags=flags,
        tokens=tokens,
        as_json=as_json,
        top=top,
        everything=everything,
        explain=explain,
        devices=devices,
        figure=figure,
        find_limit_of=find_limit_of,
        what_if=what_if,
        why_not=why_not,
        deadline=deadline,
        offers=offers,
        probe=trial,
        trace=trace,
        uses_learned=learn is None,
    )
    exit_code = run(options)
    raise typer.Exit(exit_code)


def strategies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Show one strategy: the options that it excludes, and why."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; some combinations require a GPU.")
    ] = "cuda",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Print which features each strategy supports.

    Among them are tensor, context and pipeline parallelism, LoRA and offload.
    """
    from drumline.planner.matrix import as_markdown, as_text, as_text_of

    if device not in ("cpu", "cuda"):
        raise UserError(f"no device {device!r}", where="--device", fix="cpu or cuda")
    if name is not None and markdown:
        raise UserError(
            "the Markdown table is of all strategies",
            where="--markdown",
            fix="leave it out, or the name",
        )
    if name is not None:
        print(as_text_of(name, device))
    elif markdown:
        print(as_markdown(device))
    else:
        print(as_text(device))


def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    import json

    from drumline.config.load import schema as json_schema

    print(json.dumps(json_schema(), indent=2))


COMMANDS = {
    "init": init,
    "recipes": recipes,
    "plan": plan,
    "strategies": strategies,
    "schema": schema,
}

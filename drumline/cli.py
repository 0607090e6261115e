"""The commands: one function each, without logic. Heavy imports are inside, so that --help stays quick."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline import cli_data, cli_report, cli_runs, cli_scale, cli_usage
from drumline.cli_runs import (
    ConfigFile,
    Overrides,
    Trust,
    existing_or_url,
    existing_path,
    model_place,
)
from drumline.cli_runs import path_of as _path
from drumline.errors import DrumlineError, EnvironmentFault, UserError
from drumline.foreign import first_line
from drumline.system.output import let_go_of_output, lossy, say
from drumline.system.redact import redact
from drumline.version import __version__

if TYPE_CHECKING:
    from drumline.launch.early import EarlyRanks

app = typer.Typer(
    name="drumline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=cli_usage.Group,
    help="One YAML and one command train a model on however many devices there are.",
)


def _place(text: str) -> str:
    """Parse a path or an id. Raises UserError for what can be neither."""
    _path(text)
    return text


_command = partial(app.command, cls=cli_usage.Command)
_path_option = partial(typer.Option, parser=_path)
# The override that --trust-remote-code stands for.
TRUSTED = "model.trust_remote_code=true"
# What torch.distributed.launch and deepspeed add to a rank's arguments.
LOCAL_RANK_OPTIONS = ("--local_rank=", "--local-rank=")


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@_command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes on this machine (default: one per GPU, or 1).")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Restarts after a rank fails (launch.max_restarts).")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan, and what differs from the defaults; start nothing."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --dry-run: print every key.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            parser=_place,
            metavar="[PATH]",
            help="Resume from the newest valid checkpoint, or from PATH: a checkpoint or run, its folder or URL.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEYS",
            help="With --resume: config keys that may differ, comma-separated, or `all`.",
        ),
    ] = None,
    trust_remote_code: Trust = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="With a launcher that submits: do not wait for the end."),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Also show the run on a page in the browser, as `drumline watch` does."
        ),
    ] = False,
    accelerate_config: Annotated[
        Path | None,
        _path_option(
            metavar="F",
            help="An accelerate config or DeepSpeed JSON; its strategy overrides that of CONFIG.",
        ),
    ] = None,
) -> None:
    """Plan, prepare the data, launch and train. CONFIG may also be of accelerate, DeepSpeed or transformers: see `drumline convert`."""
    from drumline.train.command import train as run

    if everything and not dry_run:
        raise UserError("it is of --dry-run", where="--all", fix="add --dry-run, or leave it out")
    allowed = cli_usage.read_list(allow, "--allow", "optimizer.lr,run.steps")
    all_overrides = list(overrides or [])
    if nproc is not None:
        all_overrides.append(f"launch.nproc={nproc}")
    if max_restarts is not None:
        all_overrides.append(f"launch.max_restarts={max_restarts}")
    if detach:
        all_overrides.append("launch.detach=true")
    if trust_remote_code:
        all_overrides.append(TRUSTED)
    code = run(
        config,
        all_overrides,
        resume=resume,
        allow=allowed,
        dry_run=dry_run,
        accelerate_config=accelerate_config,
        watch=watch,
        everything=everything,
    )
    raise typer.Exit(code)


@_command()
def launch(
    script: Annotated[
        Path,
        typer.Argument(
            parser=_path, metavar="SCRIPT.py", help="A Python file that has a drumline.session."
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]...", help="Arguments passed to the script."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on this machine (default: one per GPU, or 1)."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Restarts after a rank fails, from the session's newest checkpoint. Default: 3 with a drumline.session, else 0.",
        ),
    ] = None,
) -> None:
    """Run a script with a training loop of its own on several processes."""
    from drumline.launch.script import launch_script as run

    raise typer.Exit(run(script, arguments or [], nproc, max_restarts))


@_command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(parser=_path, metavar="[CONFIG.yaml]", help="Or use the flags below."),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            parser=model_place, help="A name such as llama-3.1-8b, a folder, or a hub id."
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
    adapter: Annotated[str | None, typer.Option(help="lora, qlora or none.")] = None,
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
        typer.Option(min=1, help="Tokens of the whole run, such as 1e9: gives hours and cost."),
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
            help="Also print memory, seconds and hosts by category, what is out, and heuristics.",
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
        typer.Option(metavar="nodes=N,…", help="Print the best plan for other numbers of hosts."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Trace the activations of the best three plans; takes up to a minute."
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        _path_option(metavar="F", help="Plot memory and time to a .png, .svg or .html."),
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
) -> None:
    """Predict which strategies fit, how fast they are and why, without a launch, weights or data."""
    if check is not None:
        from drumline.planner.report.check import check as run_check

        raise typer.Exit(run_check(check, as_json))
    from drumline.planner.command import Options, Trial
    from drumline.planner.command import plan as run
    from drumline.planner.question import Flags
    from drumline.planner.report.table import Kind

    flags = Flags(model, cluster, length, adapter, batch, algorithm, precision, price, mtbf_hours)
    if max_seq and max_batch:
        raise UserError(
            "--max-seq and --max-batch cannot be combined",
            where="drumline plan",
            fix="give one at a time",
        )
    most: Kind | None = None
    if max_seq:
        most = "max_length"
    elif max_batch:
        most = "max_batch"
    trial: Trial | None = None
    if probe:
        from drumline.train.probe import probe as trial
    options = Options(
        config,
        overrides or [],
        flags,
        tokens,
        as_json,
        top,
        everything,
        explain,
        devices,
        figure,
        most,
        what_if,
        trial,
        trace,
    )
    raise typer.Exit(run(options))


@_command()
def init(
    config: Annotated[
        Path,
        typer.Argument(
            parser=_path,
            metavar="[NEW.yaml]",
            help="The file to write; an existing file is never overwritten.",
        ),
    ] = Path("drumline.yaml"),
    model: Annotated[
        str | None,
        typer.Option(
            parser=model_place, help="A name such as llama-3.1-8b, a folder, or a hub id."
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="What is learned, such as sft, dpo or grpo; `drumline schema` has all."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            parser=_place, help="A file, a folder, hub:OWNER/NAME, tasks:NAME,NAME or digits."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="SPEC", help="here, 4x4090, 8xh100-80g, 4x8xa100-80g.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="full, lora or qlora.")] = None,
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
) -> None:
    """Ask five questions, plan, and write a commented YAML."""
    from drumline.planner.init import Answers
    from drumline.planner.init import init as run

    answers = Answers(model, cluster, length, adapter, batch, algorithm, data=data)
    raise typer.Exit(run(config, answers, yes))


for _data_command in cli_data.COMMANDS:
    _command()(_data_command)


@_command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            parser=existing_or_url,
            metavar="RUN",
            help="A run folder, or the URL of a run (its checkpoint.url).",
        ),
    ],
    to: Annotated[Path, _path_option(help="The folder to write.")],
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
    """Write a run's checkpoint as a Hugging Face folder, then reload it and compare the logits."""
    from drumline.train.command import export as run_export

    run_export(run, to, which, dtype, adapter, trust_remote_code)


@_command()
def chat(
    place: Annotated[
        str,
        typer.Argument(
            parser=model_place,
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
    from drumline.system.process import uncollected

    with uncollected():
        from drumline.inference.model import chat as run

    run(place, max_new_tokens, temperature, system, trust_remote_code)


@_command(name="eval")
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
        Path | None, _path_option(help="With --lm-eval: a folder with more task YAMLs.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Evaluate a checkpoint on the held-out set, with the strategy of CONFIG. Metrics are also written to RUN/eval.json."""
    all_overrides = list(overrides or [])
    if trust_remote_code:
        all_overrides.append(TRUSTED)
    tasks = cli_usage.read_list(lm_eval, "--lm-eval", "arc_easy,hellaswag")
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
        from drumline.inference import evaluate as inference

        place = stack.enter_context(inference.placed(checkpoint, config, all_overrides))
        if tasks:
            code = inference.harness(config, all_overrides, place, tasks, limit, include_path)
        elif generate:
            code = inference.answers(config, all_overrides, place, generate)
        else:
            code = inference.evaluate(config, all_overrides, place, early)
        raise typer.Exit(code)


def _early_ranks(config_path: Path, overrides: list[str]) -> EarlyRanks:
    """Return ranks of a config that import what they need while the plan is made."""
    from drumline.config.load import load
    from drumline.launch.early import EarlyRanks

    return EarlyRanks(load(config_path, overrides).config)


@_command()
def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST", help="Comma-separated: `ddp,fsdp2 tp=2`. Default: the common ones."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes per strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per run.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest relative difference that counts as equal. Default: 1e-5, or what rounding"
            " alone does to this training, if that is more.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, _path_option(help="A new folder in which to keep the runs.")
    ] = None,
) -> None:
    """Train a few steps on one process and with each strategy; compare losses, gradient norms, weights and moments."""
    from drumline.bench.verify import verify as run

    wanted = cli_usage.read_list(strategies, "--strategies", "ddp,fsdp2")
    raise typer.Exit(run(config, overrides or [], list(wanted), steps, nproc, tolerance, keep))


@_command()
def calibrate(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Take fewer and smaller measurements: seconds instead of minutes."
        ),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes. Default: one per GPU; without GPUs one per core, 2 to 8."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        _path_option(help="Also write the result to this file (for cluster.calibration)."),
    ] = None,
) -> None:
    """Measure this machine once: matrix products, memory, collectives, disk. The planner uses the stored result."""
    from drumline.bench.calibrate import calibrate as run

    raise typer.Exit(run(quick, nproc, out))


@_command()
def doctor(
    place: Annotated[
        str | None,
        typer.Argument(
            parser=_place,
            metavar="[CONFIG.yaml|RUN|LOG|-]",
            help="A config: before a run. A run or log: after it.",
        ),
    ] = None,
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth", help="Before: also measure between every pair, against the catalog."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check this host before a run, or say why a run failed: the cause, the line that shows it, and how to mend it."""
    from drumline.doctor.command import doctor as run

    raise typer.Exit(run(place, bandwidth, as_json))


@_command()
def strategies(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One strategy: why it does not go with an option."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; some combinations require a GPU.")
    ] = "cuda",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Print which features each strategy supports: tensor, context and pipeline parallelism, LoRA, offload and more."""
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


@_command()
def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    import json

    from drumline.config.load import schema as json_schema

    print(json.dumps(json_schema(), indent=2))


for _other_command in (*cli_runs.COMMANDS, *cli_report.COMMANDS, *cli_scale.COMMANDS):
    _command()(_other_command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command, whether or not somebody reads what it prints.

    `arguments`: those of the command line, without the program's name; None: those of this process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # Names of files and texts of strangers need not be UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        with lossy():
            _main(sys.argv[1:] if arguments is None else arguments)
    finally:
        let_go_of_output()


def _main(given: list[str]) -> None:
    """Run a command. A DrumlineError becomes one line on stderr and an exit code.

    So does a signal, as long as there is nothing to lose, and any other error.
    """
    from drumline.launch.environment import expandable_segments, first_rank, other_rank_runs
    from drumline.launch.tasks import join_tasks
    from drumline.system.signals import LEFT, NOTHING_LOST, Interrupted, Stoppable

    arguments = _own(given)
    try:
        join_tasks()
        if other_rank_runs(arguments[0] if arguments else ""):
            return
        expandable_segments()
        with Stoppable():
            _run(arguments, speaks=first_rank())
    except DrumlineError as error:
        raise SystemExit(_report(error)) from None
    except Interrupted as stop:
        if first_rank():
            say(f"stopped: {stop} — start it again")
        raise SystemExit(NOTHING_LOST) from None
    except KeyboardInterrupt:
        raise SystemExit(LEFT) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets one line
        raise SystemExit(_report_unexpected(error)) from None


def _report(error: DrumlineError) -> int:
    """Print an error's line, and its notes below it. Returns its exit code."""
    say(f"error: {redact(error.line())}")
    for note in getattr(error, "__notes__", ()):  # more mistakes of the same file
        say(f"       {redact(note)}")
    return error.exit_code


def _report_unexpected(error: Exception) -> int:
    """Report an error that was not raised on purpose, in one line. Returns its exit code."""
    from drumline.plan.out_of_memory import is_out_of_memory, memory_fault

    if isinstance(error, PermissionError) and error.filename:
        fault = EnvironmentFault(
            "permission denied", where=str(error.filename), fix="ask its owner, or name another"
        )
        return _report(fault)
    if is_out_of_memory(error):
        return _report(memory_fault(error))
    return _report_bug(error)


def _report_bug(error: Exception) -> int:
    """Write the traceback to a file and print its path in one line. Returns the exit code."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="drumline-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
    ) as file:
        file.write(redact("".join(traceback.format_exception(error))))
    what = f"unexpected error: {first_line(error)}"
    return _report(DrumlineError(what, fix=f"please report it, with {file.name}"))


def _run(arguments: list[str], speaks: bool) -> None:
    """Run a command and exit with its code. A mistake in its usage is raised as a UserError.

    `speaks`: whether this rank reports such a mistake. Under another launcher all ranks make the same
    one, and the others exit silently.
    """
    from drumline.launch.environment import first_rank_reports

    try:
        code = app(arguments, standalone_mode=False)
    except typer.Abort as abort:  # typer's name for an EOFError that nobody expected
        raise (abort.__cause__ or abort) from None
    except (cli_usage.UsageMistake, cli_usage.UsageError) as error:
        if not arguments and not isinstance(error, UserError):  # typer's error is the help itself
            say(error.format_message())  # type: ignore[attr-defined]  # of typer's own class
            raise SystemExit(UserError.exit_code) from None
        if not speaks:
            with first_rank_reports():
                raise SystemExit(UserError.exit_code) from None
        if isinstance(error, UserError):
            raise
        raise cli_usage.one_line(error) from None
    raise SystemExit(code or 0)


def _own(arguments: list[str]) -> list[str]:
    """Return the arguments as typer can read them. Those behind `--` are a script's, and stay.

    torch.distributed.launch and deepspeed add `--local_rank=N`, which is removed: LOCAL_RANK has it, too.
    """
    end = len(arguments)
    if "--" in arguments:
        end = arguments.index("--")
    own = [each for each in arguments[:end] if not each.startswith(LOCAL_RANK_OPTIONS)]
    if own[:1] == ["train"]:
        own = _bare_resume(own)
    return own + arguments[end:]


def _bare_resume(arguments: list[str]) -> list[str]:
    """Return the arguments with the value `newest` after each `--resume` that has no path.

    typer's options always take a value.
    """
    completed = []
    for index, argument in enumerate(arguments):
        completed.append(argument)
        if argument == "--resume":
            following = arguments[index + 1] if index + 1 < len(arguments) else None
            if following is None or not _may_be_checkpoint(following):
                completed.append("newest")
    return completed


def _may_be_checkpoint(argument: str) -> bool:
    """Return whether an argument may be the path of --resume, and not an option, an override or a config."""
    if argument.startswith("-") or argument.endswith((".yaml", ".yml")):
        return False
    key, has_value, _ = argument.partition("=")
    # The runs of a sweep have `=` in their names.
    is_override = has_value and "/" not in key and not os.path.lexists(argument)
    return not is_override

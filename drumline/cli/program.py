"""The program `drumline`: read the command line, run a command, and turn errors into one line."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from drumline.cli import data, diagnose, look, plan, runs, share, train, usage
from drumline.cli.group import CommandGroup
from drumline.errors import DrumlineError, EnvironmentFault, UserError
from drumline.foreign import first_line
from drumline.system.output import flush_or_drop_output, lossy, say
from drumline.system.redact import redact
from drumline.version import __version__

app = typer.Typer(
    name="drumline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=CommandGroup,
    help="One YAML and one command train a model on however many devices there are.",
)
# Beginnings of an option that torch.distributed.launch and deepspeed add to a rank's arguments.
LOCAL_RANK_OPTIONS = ("--local_rank=", "--local-rank=")


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# Heading of `drumline --help` → the module with its commands, in the order of the help.
MODULES_BY_HEADING = {
    "Train": train,
    "Plan": plan,
    "Data": data,
    "Look": look,
    "Runs": runs,
    "Share": share,
    "Diagnose": diagnose,
}
for _heading, _module in MODULES_BY_HEADING.items():
    for _name, _command in _module.COMMANDS.items():
        app.command(name=_name, cls=usage.Command, rich_help_panel=_heading)(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code, also if the reader of its output has gone.

    Args:
        arguments: The arguments after the program's name; None for those of this process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # Names of files, and texts from elsewhere, need not be UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        with lossy():
            _main(sys.argv[1:] if arguments is None else arguments)
    finally:
        flush_or_drop_output()


def _main(given: list[str]) -> None:
    """Run a command, and turn any error into one line on stderr and an exit code.

    A signal becomes a line as well, unless the command handles it because it has work to save.

    Args:
        given: The arguments after the program's name, as they were given.
    """
    from drumline.launch.environment import (
        is_first_rank,
        is_left_to_another_rank,
        use_expandable_segments,
    )
    from drumline.launch.tasks import join_tasks
    from drumline.system.signals import EXIT_INTERRUPTED, EXIT_TEMPFAIL, Interrupted, Stoppable

    arguments = _arguments_for_typer(given)
    try:
        # If srun or mpirun has started this process as one of several tasks, it becomes a rank.
        join_tasks()
        if is_left_to_another_rank(arguments[0] if arguments else ""):
            return
        use_expandable_segments()
        with Stoppable():
            _run(arguments, reports=is_first_rank())
    except DrumlineError as error:
        raise SystemExit(_report(error)) from None
    except Interrupted as stop:
        if is_first_rank():
            say(f"stopped: {stop} — start it again")
        raise SystemExit(EXIT_TEMPFAIL) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets one line
        raise SystemExit(_report_unexpected(error)) from None


def _report(error: DrumlineError) -> int:
    """Print an error's line with its notes below it, and return its exit code."""
    say(f"error: {redact(error.line())}")
    for note in getattr(error, "__notes__", ()):  # more mistakes of the same file
        say(f"       {redact(note)}")
    return error.exit_code


def _report_unexpected(error: Exception) -> int:
    """Report an error that is no DrumlineError in one line, and return its exit code."""
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
    """Write the traceback to a file, print its path in one line, and return the exit code."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="drumline-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
    ) as file:
        file.write(redact("".join(traceback.format_exception(error))))
    what = f"unexpected error: {first_line(error)}"
    return _report(DrumlineError(what, fix=f"please report it, with {file.name}"))


def _run(arguments: list[str], reports: bool) -> None:
    """Run a command and exit with its code. Raise UserError for a mistake in its usage.

    Args:
        arguments: The arguments after the program's name, in a form that typer can read.
        reports: Whether this rank reports such a mistake. All ranks of a launcher make the same
        mistake,
            and all but one exit silently.
    """
    from drumline.launch.environment import first_rank_reports

    try:
        code = app(arguments, standalone_mode=False)
    except typer.Abort as abort:  # typer's name for an EOFError that nobody expected
        raise (abort.__cause__ or abort) from None
    except (usage.UsageMistake, usage.UsageError) as error:
        is_typers_error = not isinstance(error, UserError)
        # For `drumline` without arguments typer raises an error whose message is the help.
        if is_typers_error and not arguments:
            say(error.format_message())  # type: ignore[attr-defined]  # of typer's own class
            raise SystemExit(UserError.exit_code) from None
        if not reports:
            # This waits until rank 0 has printed the mistake: the launcher ends all ranks when one
            # exits.
            with first_rank_reports():
                raise SystemExit(UserError.exit_code) from None
        if isinstance(error, UserError):
            raise
        raise usage.one_line(error) from None
    raise SystemExit(code or 0)


def _arguments_for_typer(arguments: list[str]) -> list[str]:
    """Return the arguments in a form that typer can read.

    `--resume` without a path gets the value `newest`. `--local_rank=N`, which
    torch.distributed.launch and deepspeed add, is removed: the variable LOCAL_RANK has the same
    number. Arguments after `--` belong to a script and stay as they are.
    """
    end = len(arguments)
    if "--" in arguments:
        end = arguments.index("--")
    own = [each for each in arguments[:end] if not each.startswith(LOCAL_RANK_OPTIONS)]
    if own[:1] == ["train"]:
        own = _complete_resume(own)
    return own + arguments[end:]


def _complete_resume(arguments: list[str]) -> list[str]:
    """Return the arguments with the value `newest` after each `--resume` that has no path.

    The reason is that an option of typer always takes a value.
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
    """Return whether an argument may be the path of --resume, not an option, override or config."""
    if argument.startswith("-") or argument.endswith((".yaml", ".yml")):
        return False
    key, has_value, _ = argument.partition("=")
    # The run folders of a sweep have `=` in their names, as overrides have.
    is_override = has_value and "/" not in key and not os.path.lexists(argument)
    return not is_override

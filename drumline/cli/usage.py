"""Read lists and numbers of the command line, and report a mistake in its usage in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from drumline.config.registry import nearest
from drumline.errors import UserError
from drumline.foreign import MOST_WHOLE

# click's class UsageError, the base of all mistakes in the usage of a command. typer does not
# export it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
assert UsageError.__name__ == "UsageError"
# The most characters of the user's text that an error shows.
MOST_SHOWN = 80


class UsageMistake(UserError):
    """The error for a mistake in the usage of a command.

    If another program has started the ranks, every rank meets it, and only rank 0 reports it.
    """


def read_list(texts: Sequence[str] | None, flag: str, example: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated option, each once and in order.

    `--allow a,b` and `--allow a --allow b` mean the same.

    Args:
        texts: One text for each time that the option was given; None or empty if it was not given.
        flag: The option, for errors.
        example: A list that an error shows as an example.

    Raises:
        UsageMistake: A part is empty. An empty list would silently mean everything.
    """
    names: list[str] = []
    for text in texts or ():
        parts = [part.strip() for part in text.split(",")]
        if not any(parts):
            raise UsageMistake(
                "an empty list given",
                where=flag,
                fix=f"name at least one, such as {example}, or leave {flag} out",
            )
        if not all(parts):
            raise UsageMistake(
                f"{text[:MOST_SHOWN]!r} has an empty part",
                where=flag,
                fix=f"put one comma between two names, such as {example}",
            )
        names += parts
    return tuple(dict.fromkeys(names))


class Command(TyperCommand):
    """A command that also refuses senseless numbers: NaN, infinity, more than 64 bits."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command = f"drumline {ctx.info_name}"
        ctx.allow_extra_args = True  # they are refused below, with an error of Drumline
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = ctx  # type: ignore[attr-defined]  # click leaves it out where an option has no value
            raise
        if ctx.resilient_parsing:  # true if the shell completes an unfinished line
            return rest
        if rest:
            what = f"{rest[0][:MOST_SHOWN]!r} is one argument too many"
            raise UsageMistake(what, where=command, fix=_help_hint(command))
        for parameter in self.params:
            _check_number(ctx.params.get(parameter.name), parameter.opts[0])
        return rest


def _check_number(value: Any, name: str) -> None:
    """Raise UsageMistake for NaN, infinity and integers of more than 64 bits.

    Args:
        value: The value of an option, of any type.
        name: The option, for the error.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageMistake(
            f"{value} given, a finite number is wanted", where=name, fix="give a finite number"
        )
    if isinstance(value, int) and abs(value) >= MOST_WHOLE:
        raise UsageMistake(
            "a whole number of more than 64 bits given", where=name, fix="give a smaller one"
        )


def one_line(error: Any) -> UsageMistake:
    """Return an error of one line for a mistake that typer found in the arguments.

    Args:
        error: The `UsageError` that typer raised.
    """
    context = error.ctx
    has_command = context is not None and context.parent is not None
    command = f"drumline {context.info_name}" if has_command else "drumline"
    help_hint = _help_hint(command)
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _unknown_option(error.option_name, context, command)
    if kind == "MissingParameter":
        return UsageMistake(f"{_name_of(error.param)} is missing", where=command, fix=help_hint)
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return UsageMistake(_describe_value(error), where=_name_of(error.param), fix=help_hint)
    message = error.format_message().rstrip(".")
    return UsageMistake(f"{message[:1].lower()}{message[1:]}", where=command, fix=help_hint)


def _help_hint(command: str) -> str:
    """Return the fix that points to the help of a command."""
    return f"`{command} --help` shows how it is used"


def _unknown_option(option: str, context: Any, command: str) -> UsageMistake:
    """Return the error for an option that the command lacks, with the most similar option."""
    known = []
    if context is not None:
        for parameter in context.command.params:
            if parameter.param_type_name == "option":
                known += parameter.opts
    # Without the dashes, which would make any two options similar.
    names = {name.lstrip("-"): name for name in known}
    guess = nearest(option.lstrip("-"), names)
    fix = f"did you mean {names[guess]}?" if guess else f"`{command} --help` lists all"
    return UsageMistake(f"there is no option {option[:MOST_SHOWN]}", where=command, fix=fix)


def _name_of(parameter: Any) -> str:
    """Return the name by which the user knows a parameter: `--nproc`, or CONFIG.yaml."""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.name.upper())


def _describe_value(error: Any) -> str:
    """Return what is wrong with a value. typer reads values by pydantic since 0.29, before by click."""
    from pydantic import ValidationError

    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return str(error.message).rstrip(".")
    from drumline.config.mistakes import describe_value

    detail = cause.errors(include_url=False)[0]
    if str(detail["input"]).lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return f"{detail['input']} given, a finite number is wanted"
    return describe_value(detail)

"""Progress bars for what happens before a run, such as converting a model or tokenising; and notes.

All of it goes to standard error or to a console of the caller's, so that a command's result on
standard output stays alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from drumline.errors import printable
from drumline.system.output import Verbosity, lossy, say_note, verbosity

# Called with a phase, how much of it is done, and how much there is in all; None if that is not
# known.
OnProgress = Callable[[str, int, int | None], None]
# Phases of planning that take long for large models on many devices.
COMPARING = "comparing plans"
LOOKING_FOR_HELP = "nothing fits; looking for what would help"
# What a phase is called in the terminal, without and with its number of rows.
TITLES = {
    "hash": ("Checking whether the data are prepared", ""),
    "tokenise": ("Tokenising the rows", "Tokenising {:,} rows"),
    "pack": ("Packing the rows", "Packing {:,} rows"),
    "export": ("Exporting the model", ""),
}


@contextmanager
def stderr_bars(display: bool) -> Iterator[OnProgress]:
    """Give a callback that draws bars on standard error, as long as the context is open.

    If `display` is false, or the process is quiet, the callback shows nothing.
    """
    is_quiet = verbosity() is Verbosity.QUIET
    if is_quiet or not display:
        yield _show_nothing
        return
    with lossy(), bars(Console(stderr=True)) as on_progress:
        yield on_progress


def _show_nothing(phase: str, done: int, total: int | None) -> None:
    """Take the place of a callback that draws bars."""


def notes(lines: Iterable[str]) -> None:
    """Print what the user should know on standard error, unless the process is quiet."""
    for line in lines:
        say_note(printable(line))


def title_of(phase: str, rows: int | None) -> str:
    """Return what a phase is called in the terminal: `Tokenising 40 rows`.

    `rows`: how much the phase has in all; None if that is not known. A phase that is not in TITLES
    is called by its name.
    """
    capitalised = phase[:1].upper() + phase[1:]
    plain, counted = TITLES.get(phase, (capitalised, ""))
    if counted and rows:
        return counted.format(rows)
    return plain


@contextmanager
def notify_if_slow(tell: Callable[[], None], seconds: float = 2.0) -> Iterator[None]:
    """Call `tell` once if the `with` block takes longer than `seconds`."""
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # What is done next may fork, and a fork must not copy a running thread.
        timer.join()


def line_if_slow(
    console: Console, phase: str, seconds: float = 2.0
) -> AbstractContextManager[None]:
    """Print the title of a phase, with …, if the `with` block takes longer than `seconds`."""

    def tell() -> None:
        console.print(f"{title_of(phase, None)} …", highlight=False)

    return notify_if_slow(tell, seconds)


@contextmanager
def bars(console: Console) -> Iterator[OnProgress]:
    """Give a callback (phase, done, total or None) that draws one bar for each phase.

    Without a terminal it prints one line when a phase begins.
    """
    if not console.is_terminal:
        yield _line_printer(console)
        return
    with Progress(*_columns(), console=console, expand=True) as progress:
        tasks: dict[str, TaskID] = {}

        def update(phase: str, done: int, total: int | None) -> None:
            """Draw the bar of a phase, which is new at the first call."""
            if phase not in tasks:
                # Without the number of rows, which the bar shows anyway.
                title = title_of(phase, None)
                tasks[phase] = progress.add_task(title, total=total)
            progress.update(tasks[phase], completed=done, total=total)

        yield update
        for task in progress.tasks:
            # Its end was not known before it was over. Its bar would move on for ever.
            if task.total is None:
                done = max(1, task.completed)
                progress.update(task.id, total=done, completed=done)


def _line_printer(console: Console) -> OnProgress:
    """Return a callback that prints one line when a phase begins."""
    seen: set[str] = set()

    def print_phase(phase: str, done: int, total: int | None) -> None:
        if phase in seen:
            return
        seen.add(phase)
        console.print(title_of(phase, total), highlight=False)

    return print_phase


def _columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar.

    At a width of 80 a long phase is cut, so that numbers and times are whole.
    """
    phase = Column(ratio=2, no_wrap=True, overflow="ellipsis")
    return (
        TextColumn("{task.description}", table_column=phase),
        BarColumn(None, table_column=Column(ratio=1)),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )

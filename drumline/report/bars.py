"""Progress bars for what happens before a run: converting a model, tokenising, packing; and notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from drumline.core.output import lossy, say
from drumline.errors import printable

OnProgress = Callable[[str, int, int | None], None]
# Phases of planning that take long for large models on many devices.
COMPARING = "comparing plans"
LOOKING_FOR_HELP = "nothing fits; looking for what would help"


@contextmanager
def aside(display: bool) -> Iterator[OnProgress]:
    """Bars on standard error, or a callback that shows nothing."""
    if not display:
        yield lambda phase, done, total: None
        return
    with lossy(), bars(Console(stderr=True)) as on_progress:
        yield on_progress


def notes(lines: Iterable[str]) -> None:
    """Print what the user should know on standard error."""
    for line in lines:
        say(f"note: {printable(line)}")


@contextmanager
def told_if_slow(tell: Callable[[], None], seconds: float = 2.0) -> Iterator[None]:
    """Call `tell` if what is inside takes longer than some seconds."""
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # what is done next may fork


def line_if_slow(
    console: Console, phase: str, seconds: float = 2.0
) -> AbstractContextManager[None]:
    """Print a line that work goes on if what is inside takes longer than some seconds."""
    return told_if_slow(lambda: console.print(f"{phase} …", highlight=False), seconds)


@contextmanager
def bars(console: Console) -> Iterator[OnProgress]:
    """A callback (phase, done, total or None) that draws one bar a phase; without a terminal, one line when a phase begins."""
    if not console.is_terminal:
        seen: set[str] = set()

        def line(phase: str, done: int, total: int | None) -> None:
            if phase not in seen:
                seen.add(phase)
                console.print(f"{phase} …" + (f" ({total})" if total else ""), highlight=False)

        yield line
        return
    # What is long gives way: at a width of 80 the phase is cut, and numbers and times are whole.
    phase = TextColumn(
        "{task.description}", table_column=Column(ratio=2, no_wrap=True, overflow="ellipsis")
    )
    columns = (
        phase,
        BarColumn(None, table_column=Column(ratio=1)),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        tasks: dict[str, int] = {}

        def bar(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done, total=total)  # type: ignore[arg-type]

        yield bar
        for task in progress.tasks:
            if task.total is None:  # its end was not known before it was over
                progress.update(
                    task.id, total=max(1, task.completed), completed=max(1, task.completed)
                )

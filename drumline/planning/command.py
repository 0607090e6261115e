"""What `drumline plan` does: ask, search, say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from drumline.config.load import Loaded
from drumline.plan.search import Answer, search
from drumline.planning.advise import nothing_fits
from drumline.planning.asked import FLAGS, Flags, asked
from drumline.planning.written import to_use
from drumline.report.bars import bars


@dataclass(frozen=True)
class Options:
    """What the command line says. `tokens`: that the run trains on, where data and steps do not say it."""

    config: Path | None = None
    overrides: list[str] = field(default_factory=list)
    flags: Flags = Flags()
    tokens: float | None = None
    as_json: bool = False
    top: int = 8
    explain: str | None = None
    devices: bool = False
    figure: Path | None = None


def plan(options: Options) -> int:
    """`drumline plan`. Returns the exit code. Raises PlanError, after the answer was shown, where nothing fits."""
    console, aside = Console(highlight=False), Console(stderr=True, highlight=False)
    if options.devices:
        from drumline.planning.devices import show_devices

        show_devices(console)
        return 0
    loaded = asked(options.config, options.overrides, options.flags)
    answer = _answer(loaded, aside)
    if options.figure is not None:
        from drumline.planning.picture import draw

        draw(answer, options.figure)
        aside.print(f"drew {options.figure}", markup=False, soft_wrap=True)
    if options.explain is not None:
        from drumline.planning.words import explain

        console.print(explain(answer, options.explain, options.tokens), markup=False, soft_wrap=True)
    elif options.as_json:
        from drumline.planning.as_json import as_json

        print(json.dumps(as_json(answer, options.tokens), indent=2))
    else:
        from drumline.planning.table import show

        show(answer, console, top=options.top, tokens=options.tokens)
        if answer.ranked:
            config = None if loaded.path == Path(FLAGS) else loaded.path
            console.print(to_use(answer.question.config, answer.ranked[0], config), soft_wrap=True, markup=False)
    if not answer.ranked:
        raise nothing_fits(answer)
    return 0


def _answer(loaded: Loaded, aside: Console) -> Answer:
    from drumline.planning.question import ask

    with bars(aside) as on_progress:
        question = ask(loaded, on_progress)
    for note in (*loaded.notes, *question.notes):
        aside.print(f"note: {note}", soft_wrap=True, markup=False)
    return search(question.question)

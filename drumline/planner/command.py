"""`drumline plan`: assemble the question, search, show the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from drumline.core.config import NoAdapter
from drumline.core.load import Loaded
from drumline.errors import UserError
from drumline.planner.cluster import network_assumed
from drumline.planner.cost.times import estimate
from drumline.planner.question import FLAGS, Flags, Found, ask, in_turn, load_with_flags
from drumline.planner.report import table
from drumline.planner.report.check import show_probes
from drumline.planner.report.explanation import explain, pick
from drumline.planner.report.faults import report_faults
from drumline.planner.report.output import as_json, candidate, catalog, to_use
from drumline.planner.search.advice import Change, by_adapter, nothing_fits, refusal
from drumline.planner.search.answer import Answer, Candidate, Question, ranked_anew, require_here
from drumline.planner.search.auto import heuristic_first
from drumline.planner.search.search import search
from drumline.report.bars import COMPARING, LOOKING_FOR_HELP, OnProgress, bars, line_if_slow

TRACED = 3  # of the best
MOST_TOKENS = 1e18
SHORT, LONG = 3, 8  # plans that a screen shows, and --all

Trial = Callable[[Answer, Loaded, OnProgress], Answer]


@dataclass(frozen=True)
class Options:
    """The options of the command line. `tokens` of the whole run, where data and steps do not give them; `most`: the length or batch whose
    largest value is requested; `what_if`: nodes=2,4,8; `everything`: more than a screen."""

    config: Path | None = None
    overrides: list[str] = field(default_factory=list)
    flags: Flags = Flags()
    tokens: float | None = None
    as_json: bool = False
    top: int | None = None
    everything: bool = False
    explain: str | None = None
    devices: bool = False
    figure: Path | None = None
    most: table.Kind | None = None
    what_if: str | None = None
    probe: Trial | None = None  # runs the best candidates: `train.probe.probe`
    trace: bool = False


def plan(options: Options) -> int:
    """The exit code of `drumline plan`. Tracing corrects the activations of the best few, a probe all estimates by some real steps of the
    best. Raises PlanError, behind the answer, where nothing fits, EnvironmentFault for a probe where the cluster is not this machine."""
    console, aside = Console(highlight=False), Console(stderr=True, highlight=False)
    if options.devices:
        print(json.dumps(catalog(), indent=2)) if options.as_json else table.show_devices(console)
        return 0
    alone = {
        "--max-seq or --max-batch": options.most,
        "--what-if": options.what_if,
        "--mtbf-hours": options.flags.mtbf_hours,
    }
    shown = {
        "--explain": options.explain,
        "--figure": options.figure,
        "--probe": options.probe,
        "--trace": options.trace,
    }
    single, beside = ([name for name, value in flags.items() if value] for flags in (alone, shown))
    if len(single) > 1 or (single and beside):  # one would be ignored
        raise UserError(
            f"{' and '.join([*single, *beside])} are questions of their own",
            where="drumline plan",
            fix="ask one at a time",
        )
    if options.tokens is not None and not options.tokens <= MOST_TOKENS:
        raise UserError(
            f"{options.tokens} given, {MOST_TOKENS:g} or less is wanted",
            where="--tokens",
            fix="such as 1e9",
        )
    hosts = None if options.what_if is None else table.parse_what_if(options.what_if)
    loaded = load_with_flags(options.config, options.overrides, options.flags)
    with bars(aside) as on_progress:
        made = ask(loaded, on_progress)
    question, notes = made.question, [*loaded.notes, *made.notes]
    if hosts is not None and question.cluster.nodes == 1:  # else it is among the notes
        notes += network_assumed(question.config.cluster, max(hosts), question.cluster.inter.name)
    for note in notes:
        aside.print(f"note: {note}", soft_wrap=True, markup=False)
    comparing = partial(line_if_slow, aside, COMPARING)
    if options.most is not None:
        with comparing():
            table.report_most(question, options.most, console, options.top or LONG, options.as_json)
    elif hosts is not None:
        with comparing():
            table.report_what_if(question, hosts, console, options.tokens, options.as_json)
    elif options.flags.mtbf_hours is not None:
        with comparing():
            answer = search(question)
        report_faults(heuristic_first(answer)[0], console, options.tokens, options.as_json)
    else:
        if options.probe is not None:
            require_here(question.cluster)
        with comparing():
            answer = search(question)
        with bars(aside) as on_progress:
            if options.trace:
                answer = _traced(answer, made.policy, on_progress)
            if options.probe is not None:
                answer = options.probe(answer, loaded, on_progress)
        _answer(answer, lambda: _without_adapter(loaded, question), loaded, options, console, aside)
    return 0


def _traced(answer: Answer, policy: Found, on_progress: OnProgress) -> Answer:
    """The answer with new estimates for the first TRACED; one that does not fit any more is refused. What cannot be
    traced keeps its estimate."""
    from drumline.planner.trace import trace

    question, made, total = answer.question, list[Candidate](), min(TRACED, len(answer.ranked))
    for number, best in enumerate(answer.ranked[:TRACED]):
        on_progress("tracing activations of the best", number, total)
        config = best.layout.config.model_copy(update={"model": policy.model})
        found = trace(config, policy.path, best.layout, question.facts)
        made.append(
            replace(best, estimate=estimate(best.layout, question.facts, question.cluster, found))
            if found
            else best
        )
        on_progress("tracing activations of the best", number + 1, total)
    return ranked_anew(answer, ((c.name, c) for c in (*made, *answer.ranked[TRACED:])), {})


def _without_adapter(loaded: Loaded, question: Question) -> Question:
    """The question of the same run that trains all weights."""
    if question.config.adapter.kind == "none":
        return question
    whole = loaded.config.model_copy(update={"adapter": NoAdapter()})
    return ask(replace(loaded, config=whole), lambda *_: None).question


def _answer(
    answer: Answer,
    plain: Callable[[], Question],
    loaded: Loaded,
    options: Options,
    console: Console,
    aside: Console,
) -> None:
    """Show an answer as the options request it."""
    changes: tuple[Change, ...] = ()
    if not answer.ranked:
        with line_if_slow(aside, LOOKING_FOR_HELP):
            changes = nothing_fits(answer)
    answer, line = heuristic_first(answer)
    if options.figure is not None:
        from drumline.planner.report.picture import draw

        draw(answer, options.figure)
        aside.print(f"drew {options.figure}", markup=False, soft_wrap=True)
    if options.explain is not None:
        if options.as_json:
            print(
                json.dumps(
                    candidate(answer.question, pick(answer, options.explain)[0], options.tokens),
                    indent=2,
                )
            )
        else:
            console.print(
                explain(answer, options.explain, options.tokens), markup=False, soft_wrap=True
            )
        return
    with line_if_slow(aside, "looking for the longest rows of the best plans"):
        adapted = by_adapter(answer, plain())
    if options.as_json:
        print(json.dumps(as_json(answer, options.tokens, changes, adapted), indent=2))
    else:
        if line:
            console.print(f"{line}\n", soft_wrap=True, markup=False)
        show_probes(answer.probes, console)
        if options.everything or not answer.ranked:
            table.show(
                answer, console, changes, adapted, top=options.top or LONG, tokens=options.tokens
            )
        else:
            table.show_short(
                answer, console, adapted, top=options.top or SHORT, tokens=options.tokens
            )
        if answer.ranked:
            config = None if loaded.path == Path(FLAGS) else loaded.path
            given = in_turn(list(options.flags.overrides()), options.overrides)
            console.print(
                to_use(answer.question.config, answer.ranked[0], config, given),
                soft_wrap=True,
                markup=False,
            )
    if not answer.ranked:
        raise refusal(answer, changes)

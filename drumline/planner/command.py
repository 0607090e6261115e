"""`drumline plan`: build the question, search, and show the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from drumline.config.config import NoAdapter
from drumline.config.load import Loaded
from drumline.errors import UserError
from drumline.planner.cluster import network_notes
from drumline.planner.cost.times import estimate
from drumline.planner.learned import devices_of, factors_of_runs, read_learned
from drumline.planner.question import (
    FLAGS_ONLY_PATH,
    Flags,
    FoundModel,
    PlanRequest,
    build_request,
    load_cluster,
    load_with_flags,
    move_to_cluster,
    order_overrides,
)
from drumline.planner.report import table
from drumline.planner.report.cheapest import parse_duration, parse_offers, report_cheapest
from drumline.planner.report.check import describe_factors, show_probes
from drumline.planner.report.devices import show_devices
from drumline.planner.report.explanation import explain, pick
from drumline.planner.report.faults import report_faults
from drumline.planner.report.output import (
    answer_as_json,
    candidate_as_json,
    catalog_as_json,
    describe_use,
)
from drumline.planner.report.sizing import report_largest, report_what_if
from drumline.planner.report.why_not import report_why_not
from drumline.planner.search.advice import (
    Change,
    compare_modes,
    nothing_fits_error,
    smallest_changes,
)
from drumline.planner.search.answer import Answer, Candidate, Question, rank_again, require_here
from drumline.planner.search.auto import heuristic_first
from drumline.planner.search.hypothetical import Changes, parse_what_if
from drumline.planner.search.pure_bf16 import find_pure_bf16
from drumline.planner.search.rival import parse_wanted
from drumline.planner.search.search import search
from drumline.report.bars import COMPARING, LOOKING_FOR_HELP, OnProgress, bars, line_if_slow
from drumline.system.output import plural

# How many of the best candidates are traced.
MOST_TRACED = 3
# More tokens than any run has.
MOST_TOKENS = 1e18
# Plans that one screen shows, and that --all shows.
PLANS_OF_ONE_SCREEN = 3
PLANS_OF_ALL = 8
# The newest runs that are named, of those by which plans are corrected.
MOST_RUNS_NAMED = 3

Trial = Callable[[Answer, Loaded, OnProgress], Answer]


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    `tokens`: of the whole run, if data and steps do not give them.
    `top`: plans to show.
    `everything`: show more than a screen.
    `explain`: the name or row number of a candidate.
    `find_limit_of`: find the largest length, or the largest batch, that fits.
    `what_if`: such as `nodes=2,4,8` or `memory_gb=288 price=6`.
    `why_not`: such as `tp=8`.
    `deadline`: such as `24h`, in which the run is to be over.
    `offers`: hosts that can be rented for it, with prices, such as `8xh100-80g=2.5`.
    `trace`: trace the activations of the best few candidates.
    `uses_learned`: correct plans for this machine by what earlier runs taught (planner.learned).
    `probe`: runs the best candidates for some real steps, which correct all estimates
    (`train.probe.probe`).
    """

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
    find_limit_of: table.SizeLimit | None = None
    what_if: str | None = None
    why_not: str | None = None
    deadline: str | None = None
    offers: str | None = None
    probe: Trial | None = None
    trace: bool = False
    uses_learned: bool = True


def plan(options: Options) -> int:
    """Do what the options of `drumline plan` request, and return its exit code.

    Raises UserError for options that exclude one another, PlanError after printing the answer if
    nothing fits, and EnvironmentFault for a probe if the cluster is not this machine.
    """
    # Answers go to stdout, notes and progress to stderr, so that --json can be piped.
    console = Console(highlight=False)
    aside = Console(stderr=True, highlight=False)
    if options.devices:
        if options.as_json:
            print(json.dumps(catalog_as_json(), indent=2))
        else:
            show_devices(console)
        return 0
    _check_options(options)
    if options.deadline is not None:
        _report_cheapest(options, parse_duration(options.deadline), console, aside)
        return 0
    rows: list[Changes] = []
    if options.what_if is not None:
        rows = parse_what_if(options.what_if)
    loaded = load_with_flags(options.config, options.overrides, options.flags)
    with bars(aside) as on_progress:
        request = build_request(loaded, on_progress)
    request = _with_learned(request, options)
    question = request.question
    notes = [*loaded.notes, *request.notes, *_notes_on_hosts(question, rows)]
    for note in notes:
        aside.print(f"note: {note}", soft_wrap=True, markup=False)
    if rows:
        with line_if_slow(aside, COMPARING):
            report_what_if(question, rows, console, options.tokens, options.as_json)
    else:
        _answer(request, loaded, options, console, aside)
    return 0


def _with_learned(request: PlanRequest, options: Options) -> PlanRequest:
    """Return a request for this machine with the factors of earlier runs on it, and a note that says so.

    A probe is not corrected, since it measures the factors itself.
    """
    cluster = request.question.cluster
    if not options.uses_learned or options.probe is not None or not cluster.is_this_machine:
        return request
    devices = devices_of(cluster)
    runs = read_learned(devices)
    if not runs:
        return request
    factors = factors_of_runs(runs)
    names = ", ".join(Path(run.run).name for run in runs[-MOST_RUNS_NAMED:])
    note = (
        f"corrected by {plural(len(runs), 'run')} measured on {devices} ({names}):"
        f" {describe_factors(factors)} (off: --no-learn)"
    )
    question = request.question.with_learned(factors)
    return replace(request, question=question, notes=(*request.notes, note))


def _notes_on_hosts(question: Question, rows: Sequence[Changes]) -> tuple[str, ...]:
    """Return notes on the network of hosts that `--what-if` adds to a single one."""
    hosts = [changes["nodes"] for changes in rows if "nodes" in changes and "inter" not in changes]
    # On several hosts they are among the notes of the question.
    if not hosts or question.cluster.nodes > 1:
        return ()
    most = max(int(number_of_hosts) for number_of_hosts in hosts)
    return network_notes(question.config.cluster, most, question.cluster.inter.name)


def _answer(
    request: PlanRequest, loaded: Loaded, options: Options, console: Console, aside: Console
) -> None:
    """Answer the question that the options ask about one cluster."""
    question = request.question
    if options.find_limit_of is not None:
        with line_if_slow(aside, COMPARING):
            report_largest(
                question,
                options.find_limit_of,
                console,
                options.top or PLANS_OF_ALL,
                options.as_json,
            )
    elif options.flags.mtbf_hours is not None:
        with line_if_slow(aside, COMPARING):
            answer = search(question)
        answer, _ = heuristic_first(answer)
        report_faults(answer, console, options.tokens, options.as_json)
    elif options.why_not is not None:
        wanted = parse_wanted(options.why_not)
        with line_if_slow(aside, COMPARING):
            answer = search(question)
            if not answer.ranked:
                raise nothing_fits_error(answer, smallest_changes(answer))
            answer, _ = heuristic_first(answer)
            report_why_not(answer, wanted, console, options.as_json)
    else:
        answer = _find_answer(question, request.policy, loaded, options, aside)
        _show_answer(answer, question, loaded, options, console, aside)


def _report_cheapest(options: Options, deadline: float, console: Console, aside: Console) -> None:
    """Print the cheapest of the offered hosts on which the run is over in `deadline` hours."""
    flags = [options.flags]
    if options.offers is not None:
        flags = []
        for offer in parse_offers(options.offers):
            flags.append(replace(options.flags, cluster=offer.host, price=offer.price))
    # The config is loaded and the model found once; further offers differ in their devices alone.
    loaded = load_with_flags(options.config, options.overrides, flags[0])
    with bars(aside) as on_progress:
        requests = [build_request(loaded, on_progress)]
    for other in flags[1:]:
        described = load_cluster(loaded, options.config, options.overrides, other)
        requests.append(move_to_cluster(requests[0], described))
    questions: list[Question] = []
    notes: list[str] = [*loaded.notes]
    for request in requests:
        question = request.question
        questions.append(question)
        notes += request.notes
        if question.cluster.nodes == 1:
            # More hosts than one will be planned for.
            notes += network_notes(question.config.cluster, 2, question.cluster.inter.name)
    if questions[0].config.batch.model_dump(exclude_defaults=True) == {}:
        notes.append("no batch is set, so more devices take larger steps: set one with --batch")
    for note in dict.fromkeys(notes):
        aside.print(f"note: {note}", soft_wrap=True, markup=False)
    with line_if_slow(aside, COMPARING):
        report_cheapest(questions, options.tokens, deadline, console, options.as_json)


def _check_options(options: Options) -> None:
    """Raise UserError for two options of which one would be ignored, and for too many tokens."""
    alone = {
        "--max-seq or --max-batch": options.find_limit_of,
        "--what-if": options.what_if,
        "--why-not": options.why_not,
        "--for": options.deadline,
        "--mtbf-hours": options.flags.mtbf_hours,
    }
    shown = {
        "--explain": options.explain,
        "--figure": options.figure,
        "--probe": options.probe,
        "--trace": options.trace,
    }
    alone_flags = [flag for flag, value in alone.items() if value]
    shown_flags = [flag for flag, value in shown.items() if value]
    if len(alone_flags) > 1 or (alone_flags and shown_flags):
        raise UserError(
            f"{' and '.join([*alone_flags, *shown_flags])} are questions of their own",
            where="drumline plan",
            fix="ask one at a time",
        )
    if options.offers is not None:
        _check_offers(options)
    # Written this way round, so that nan is refused, too.
    if options.tokens is not None and not options.tokens <= MOST_TOKENS:
        raise UserError(
            f"{options.tokens} given, {MOST_TOKENS:g} or less is wanted",
            where="--tokens",
            fix="such as 1e9",
        )


def _check_offers(options: Options) -> None:
    """Raise UserError if offers would be ignored, or stand beside another cluster or price."""
    if options.deadline is None:
        raise UserError(
            "offers are compared by the time that they take",
            where="--offers",
            fix="say in which time the run is to be over, such as --for 24h",
        )
    if options.flags.cluster is not None or options.flags.price is not None:
        raise UserError(
            "each offer has its own host and price",
            where="--offers",
            fix="leave out --cluster and --price",
        )


def _find_answer(
    question: Question, policy: FoundModel, loaded: Loaded, options: Options, aside: Console
) -> Answer:
    """Return the answer of the search, corrected by a trace and by a probe if the options say so."""
    if options.probe is not None:
        require_here(question.cluster)
    with line_if_slow(aside, COMPARING):
        answer = search(question)
    with bars(aside) as on_progress:
        if options.trace:
            answer = _trace_best(answer, policy, on_progress)
        if options.probe is not None:
            answer = options.probe(answer, loaded, on_progress)
    return answer


def _trace_best(answer: Answer, policy: FoundModel, on_progress: OnProgress) -> Answer:
    """Return the answer with the activations of its first MOST_TRACED candidates traced.

    A candidate that does not fit by its new estimate is refused. One that cannot be traced keeps its
    estimate.
    """
    from drumline.planner.trace import trace_activations

    question = answer.question
    candidates: list[Candidate] = []
    best = answer.ranked[:MOST_TRACED]
    for number, candidate in enumerate(best):
        on_progress("tracing activations of the best", number, len(best))
        config = candidate.layout.config.model_copy(update={"model": policy.model})
        activations = trace_activations(config, policy.path, candidate.layout, question.facts)
        if activations:
            traced = estimate(candidate.layout, question.facts, question.cluster, activations)
            candidates.append(replace(candidate, estimate=traced))
        else:
            candidates.append(candidate)
        on_progress("tracing activations of the best", number + 1, len(best))
    candidates += answer.ranked[MOST_TRACED:]
    named = [(candidate.name, candidate) for candidate in candidates]
    return rank_again(answer, named, {})


def _without_adapter(loaded: Loaded, question: Question) -> Question:
    """Return the question of the same run that trains all weights."""
    if question.config.adapter.kind == "none":
        return question
    whole = loaded.config.model_copy(update={"adapter": NoAdapter()})
    return build_request(replace(loaded, config=whole), lambda *_: None).question


def _show_answer(
    answer: Answer,
    question: Question,
    loaded: Loaded,
    options: Options,
    console: Console,
    aside: Console,
) -> None:
    """Show an answer as the options request it.

    `question`: before any correction. Raises PlanError, after the answer is shown, if nothing fits.
    """
    changes: tuple[Change, ...] = ()
    if not answer.ranked:
        with line_if_slow(aside, LOOKING_FOR_HELP):
            changes = smallest_changes(answer)
    answer, heuristic_line = heuristic_first(answer)
    if options.figure is not None:
        from drumline.planner.report.picture import draw

        draw(answer, options.figure)
        aside.print(f"drew {options.figure}", markup=False, soft_wrap=True)
    if options.explain is not None:
        _show_explanation(answer, options.explain, options, console)
        return
    with line_if_slow(aside, "looking for the longest rows of the best plans"):
        modes = compare_modes(answer, _without_adapter(loaded, question))
        pure_bf16 = find_pure_bf16(answer)
    if options.as_json:
        values = answer_as_json(answer, options.tokens, changes, modes, pure_bf16)
        print(json.dumps(values, indent=2))
    else:
        if heuristic_line:
            console.print(f"{heuristic_line}\n", soft_wrap=True, markup=False)
        show_probes(answer.probes, console)
        if options.everything or not answer.ranked:
            top = options.top or PLANS_OF_ALL
            table.show(
                answer,
                console,
                changes,
                modes,
                top=top,
                tokens=options.tokens,
                pure_bf16=pure_bf16,
            )
        else:
            top = options.top or PLANS_OF_ONE_SCREEN
            table.show_short(
                answer, console, modes, top=top, tokens=options.tokens, pure_bf16=pure_bf16
            )
        if answer.ranked:
            _show_use(answer, loaded, options, console)
    if not answer.ranked:
        raise nothing_fits_error(answer, changes)


def _show_explanation(answer: Answer, name: str, options: Options, console: Console) -> None:
    """Print the explanation of the candidate with this name or row number."""
    if options.as_json:
        found = pick(answer, name).candidate
        values = candidate_as_json(answer.question, found, options.tokens)
        print(json.dumps(values, indent=2))
    else:
        text = explain(answer, name, options.tokens, width=console.width)
        console.print(text, markup=False, soft_wrap=True)


def _show_use(answer: Answer, loaded: Loaded, options: Options, console: Console) -> None:
    """Print how to train by the first candidate."""
    path = None if loaded.path == Path(FLAGS_ONLY_PATH) else loaded.path
    given = order_overrides(list(options.flags.overrides()), options.overrides)
    text = describe_use(answer.question.config, answer.ranked[0], path, given)
    console.print(text, soft_wrap=True, markup=False)

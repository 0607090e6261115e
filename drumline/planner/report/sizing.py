"""The reports of `drumline plan --max-seq`, `--max-batch` and `--what-if`: how far a config can grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from drumline.errors import PlanError
from drumline.plan.explain import describe_recomputation
from drumline.planner.report.output import VERSION, candidate_as_json
from drumline.planner.report.table import (
    BILLION,
    NEEDS,
    SHOWN,
    UNKNOWN,
    VERDICT,
    SizeLimit,
    main_cells,
    plain_table,
    run_length_to_show,
    show_headline,
)
from drumline.planner.search.advice import LargestFit, max_batch, max_length
from drumline.planner.search.answer import Answer, Candidate, Question, number
from drumline.planner.search.hypothetical import (
    Changes,
    changes_hosts_alone,
    describe_changes,
    what_if,
)


class Quantity(NamedTuple):
    """A quantity whose largest value is wanted: its flag, the key that sets it, and its column's head."""

    flag: str
    key: str
    head: str


QUANTITIES: dict[SizeLimit, Quantity] = {
    "max_length": Quantity("--max-seq", "data.max_length", "longest row\nin tokens"),
    "max_batch": Quantity("--max-batch", "batch.micro_batch", "largest\nmicro-batch"),
}


def report_largest(
    question: Question, limit: SizeLimit, console: Console, top: int, as_json: bool
) -> None:
    """Print the longest row, or the largest micro-batch, of each family.

    `top`: the most families that the table shows. Raises PlanError if nothing fits.
    """
    if limit == "max_length":
        sizes = max_length(question)
    else:
        sizes = max_batch(question)
    quantity = QUANTITIES[limit]
    if not sizes:
        raise PlanError(
            "nothing fits, however small",
            where=quantity.flag,
            fix="see `drumline plan` for what comes nearest",
        )
    if as_json:
        content = []
        for size in sizes:
            plan = candidate_as_json(question, size.candidate)
            content.append({"number": size.number, "candidate": plan})
        print(json.dumps({"version": VERSION, limit: content}, indent=2))
        return
    show_headline(question, console)
    rows = [_size_row(size) for size in sizes[:top]]
    heads = ("strategy", quantity.head, *SHOWN, "checkpointing")
    console.print(plain_table(console, heads, rows, spare=("checkpointing", VERDICT)))
    largest = sizes[0]
    console.print(
        f"\nThe largest: {quantity.key}={largest.number} under {largest.candidate.name}",
        markup=False,
        soft_wrap=True,
    )


def _size_row(size: LargestFit) -> list[str]:
    """Return the table row of a family: its largest number, and the plan at that number."""
    candidate = size.candidate
    cells = main_cells(candidate)
    shown = [cells[head] for head in SHOWN]
    return [candidate.name, f"{size.number:,}", *shown, describe_recomputation(candidate.layout)]


def report_what_if(
    question: Question,
    rows: Sequence[Changes],
    console: Console,
    tokens: float | None,
    as_json: bool,
) -> None:
    """Print the first plan on each cluster that is asked about, and what it gains.

    Other numbers of hosts are compared with each other, other changes with the cluster as it is.
    `tokens`: of the whole run; None: those of its steps.
    """
    is_of_hosts = changes_hosts_alone(rows)
    if not is_of_hosts:
        unchanged: Changes = {}
        rows = [unchanged, *rows]
    answers = what_if(question, rows)
    if as_json:
        _print_what_if_json(rows, answers, tokens)
    elif is_of_hosts:
        show_headline(answers[0].question, console)
        _show_hosts(answers, console, tokens)
    else:
        show_headline(question, console)
        _show_changes(rows, answers, console, tokens)


def _show_hosts(answers: Sequence[Answer], console: Console, tokens: float | None) -> None:
    """Print the first plan on each number of hosts, and how far it is from linear scaling."""
    fitting = [answer for answer in answers if answer.ranked]
    rows = []
    for answer in answers:
        if answer.ranked:
            rows.append(_fitting_row(answer, fitting[0], tokens))
        else:
            rows.append(_refused_row(answer))
    hours = _head_of_hours(fitting, tokens)
    heads = ("hosts", "devices", "strategy", *SHOWN, "speed", "of\nlinear", hours)
    console.print(plain_table(console, heads, rows, spare=(hours, VERDICT, "devices")))


def _head_of_hours(fitting: Sequence[Answer], tokens: float | None) -> str:
    """Return the head of the column of hours, which are of a billion tokens if none are known."""
    is_known = any(answer.ranked[0].hours(tokens) is not None for answer in fitting)
    return "hours" if is_known else "hours /\n1B tokens"


def _show_changes(
    rows: Sequence[Changes], answers: Sequence[Answer], console: Console, tokens: float | None
) -> None:
    """Print the first plan after each change, beside that on the cluster as it is."""
    fitting = [answer for answer in answers if answer.ranked]
    base = None
    if answers[0].ranked:
        base = answers[0].ranked[0]
    cells = []
    for changes, answer in zip(rows, answers, strict=True):
        # Each change has a line of its own, which leaves room for the other columns.
        changed = describe_changes(changes).replace(" ", "\n")
        cells.append([changed or "as it is", *_cells(answer, base, tokens)])
    hours = _head_of_hours(fitting, tokens)
    heads = ("what if", "strategy", *SHOWN, "times\nas fast", hours, "cost")
    console.print(plain_table(console, heads, cells, spare=(VERDICT, NEEDS)))


def _cells(answer: Answer, base: Candidate | None, tokens: float | None) -> list[str]:
    """Return the cells of a changed cluster: its first plan, its gain over `base`, hours and cost."""
    if not answer.ranked:
        name, verdict, needs = _cells_of_nearest(answer)
        return [name, verdict, needs, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]
    first = answer.ranked[0]
    cells = main_cells(first)
    gain = UNKNOWN
    if base is not None:
        gain = f"{first.estimate.tokens_per_s / base.estimate.tokens_per_s:.2f}"
    length = run_length_to_show([first], tokens).tokens
    cost = first.cost(answer.question.cluster.price_per_device_hour, length)
    shown = [cells[head] for head in SHOWN]
    return [first.name, *shown, gain, number(first.hours(length)), number(cost)]


def _print_what_if_json(
    rows: Sequence[Changes], answers: Sequence[Answer], tokens: float | None
) -> None:
    """Print the first plan on each cluster as JSON, null if none fits."""
    found = []
    for changes, answer in zip(rows, answers, strict=True):
        cluster = answer.question.cluster
        best = None
        if answer.ranked:
            best = candidate_as_json(answer.question, answer.ranked[0], tokens)
        row = {
            "changed": dict(changes),
            "nodes": cluster.nodes,
            "devices": cluster.world_size,
            "best": best,
        }
        found.append(row)
    print(json.dumps({"version": VERSION, "what_if": found}, indent=2))


def _fitting_row(answer: Answer, base: Answer, tokens: float | None) -> list[str]:
    """Return the row of a number of hosts on which a plan fits.

    `base`: the first such answer, whose speed the gain is measured against.
    `tokens`: of the whole run.
    """
    cluster = answer.question.cluster
    first = answer.ranked[0]
    cells = main_cells(first)
    shown = [cells[head] for head in SHOWN]
    speed = first.estimate.tokens_per_s / base.ranked[0].estimate.tokens_per_s
    # The share of the speed that devices would have if twice as many were twice as fast.
    of_linear = speed * base.question.cluster.world_size / cluster.world_size
    if not tokens and not first.layout.steps:
        # The length of the run is not known, so the column shows the hours of a billion tokens.
        tokens = BILLION
    hours = number(first.hours(tokens))
    hosts = [str(cluster.nodes), str(cluster.world_size)]
    return [*hosts, first.name, *shown, f"{speed:.2f}", f"{of_linear:.0%}", hours]


def _refused_row(answer: Answer) -> list[str]:
    """Return the row of a number of hosts on which nothing fits: the nearest plan, without its speed."""
    cluster = answer.question.cluster
    hosts = [str(cluster.nodes), str(cluster.world_size)]
    gain = [UNKNOWN, UNKNOWN, UNKNOWN]
    return [*hosts, *_cells_of_nearest(answer), UNKNOWN, *gain]


def _cells_of_nearest(answer: Answer) -> tuple[str, str, str]:
    """Return name, verdict and memory of the plan that comes nearest to fitting."""
    nearest = _nearest_refused(answer)
    if nearest is None:
        return UNKNOWN, "no", UNKNOWN
    cells = main_cells(nearest)
    verdict, needs = (cells[head] for head in SHOWN[:2])
    return nearest.name, verdict, needs


def _nearest_refused(answer: Answer) -> Candidate | None:
    """Return the refused candidate that needs the least memory; None if rules refuse all."""
    candidates = [refused.best for refused in answer.refused if refused.best is not None]
    return min(candidates, key=lambda candidate: candidate.estimate.memory.reserved, default=None)

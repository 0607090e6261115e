"""The reports of `drumline plan --max-seq`, `--max-batch` and `--what-if`: how far a config can grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from drumline.config.cluster import MOST_NODES
from drumline.errors import PlanError, UserError
from drumline.plan.explain import checkpointing
from drumline.planner.report.output import VERSION, candidate_as_json
from drumline.planner.report.table import (
    BILLION,
    SHOWN,
    UNKNOWN,
    VERDICT,
    SizeLimit,
    main_cells,
    plain_table,
    show_headline,
)
from drumline.planner.search.advice import LargestFit, max_batch, max_length, what_if
from drumline.planner.search.answer import Answer, Candidate, Question, number


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
    return [candidate.name, f"{size.number:,}", *shown, checkpointing(candidate.layout)]


def parse_what_if(text: str) -> list[int]:
    """Return the numbers of hosts in the value of `--what-if`, such as `nodes=2,4,8`.

    Raises UserError for another value.
    """
    key, _, values = text.partition("=")
    parts = []
    for part in values.split(","):
        # A comma at the end makes an empty part.
        if part.strip():
            parts.append(part.strip())
    are_counts = all(part.isdecimal() and int(part) > 0 for part in parts)
    if key.strip() != "nodes" or not parts or not are_counts:
        raise UserError(
            f"{text!r} is no question",
            where="--what-if",
            fix="write nodes=2,4,8: the hosts to plan for instead",
        )
    numbers = [int(part) for part in parts]
    most = max(numbers)
    if most > MOST_NODES:
        raise UserError(
            f"{most} hosts are more than anybody has",
            where="--what-if",
            fix=f"at most {MOST_NODES}",
        )
    return numbers


def report_what_if(
    question: Question, hosts: Sequence[int], console: Console, tokens: float | None, as_json: bool
) -> None:
    """Print the first plan on each number of hosts, and what more devices gain.

    `tokens`: of the whole run; None: those of its steps.
    """
    answers = what_if(question, hosts)
    if as_json:
        _print_what_if_json(answers, tokens)
        return
    show_headline(answers[0].question, console)
    fitting = [answer for answer in answers if answer.ranked]
    rows = []
    for answer in answers:
        if answer.ranked:
            rows.append(_fitting_row(answer, fitting[0], tokens))
        else:
            rows.append(_refused_row(answer))
    is_known = any(answer.ranked[0].hours(tokens) is not None for answer in fitting)
    hours = "hours" if is_known else "hours /\n1B tokens"
    heads = ("hosts", "devices", "strategy", *SHOWN, "speed", "of\nlinear", hours)
    console.print(plain_table(console, heads, rows, spare=(hours, VERDICT, "devices")))


def _print_what_if_json(answers: Sequence[Answer], tokens: float | None) -> None:
    """Print the first plan on each number of hosts as JSON, null if none fits."""
    found = []
    for answer in answers:
        cluster = answer.question.cluster
        best = None
        if answer.ranked:
            best = candidate_as_json(answer.question, answer.ranked[0], tokens)
        found.append({"nodes": cluster.nodes, "devices": cluster.world_size, "best": best})
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
    nearest = _nearest_refused(answer)
    name = UNKNOWN
    verdict = "no"
    needs = UNKNOWN
    if nearest is not None:
        cells = main_cells(nearest)
        name = nearest.name
        verdict, needs = (cells[head] for head in SHOWN[:2])
    gain = [UNKNOWN, UNKNOWN, UNKNOWN]
    hosts = [str(cluster.nodes), str(cluster.world_size)]
    return [*hosts, name, verdict, needs, UNKNOWN, *gain]


def _nearest_refused(answer: Answer) -> Candidate | None:
    """Return the refused candidate that needs the least memory; None if rules refuse all."""
    candidates = [refused.best for refused in answer.refused if refused.best is not None]
    return min(candidates, key=lambda candidate: candidate.estimate.memory.reserved, default=None)

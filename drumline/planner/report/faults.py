"""The report of `drumline plan --mtbf-hours`: what faults cost the first plan, as tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

from rich.console import Console

from drumline.planner.faults import Pace, RunUnderFaults, run_under_faults
from drumline.planner.report.output import VERSION
from drumline.planner.report.table import plain_table, run_length_to_show, show_headline
from drumline.planner.search.advice import nothing_fits_error, smallest_changes
from drumline.planner.search.answer import Answer, Candidate, Question, number

# Numbers of devices of the table, besides that of the plan itself.
SIZES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000)
# Heads of its columns.
HEADS = (
    "devices",
    "faults\na day",
    "save every\nsteps",
    "seconds",
    "training",
    "if slow\nto restart",
    "spare\nhosts",
    "with\nrepair",
    "hours",
)


# Printed if `cluster.restart_seconds` is not set.
NOT_MEASURED = (
    "A restart is that of tiny models on CPUs; the range is from an idle machine to a busy one."
    " Set cluster.restart_seconds to what your runs take."
)
# Of the number of devices that is planned, one for each pace of restarts.
Paces = dict[Pace, RunUnderFaults]
Range = tuple[float | None, float | None]


class FaultsResult(NamedTuple):
    """What faults cost a run; the fields are the keys of the JSON.

    `every`, `in_memory_every`: steps between two saves.
    `goodput`: the share of time that is training.
    `available`: the share of time in which enough hosts work.
    `hours`, `cost`: of the run with faults; None if it never ends.
    `…_range`: the smallest and the largest value, by the shortest and the longest restarts that were
    measured (planner.faults).
    """

    devices: int
    every: int
    in_memory_every: int | None
    goodput: float
    goodput_range: Range
    spare_hosts: int
    available: float
    hours: float | None
    hours_range: Range
    cost: float | None
    cost_range: Range


def report_faults(answer: Answer, console: Console, tokens: float | None, as_json: bool) -> None:
    """Print what faults cost the first plan, and the same work per device on up to 100,000 devices.

    `tokens`: of the whole run. Raises PlanError if nothing fits.
    """
    if not answer.ranked:
        raise nothing_fits_error(answer, smallest_changes(answer))
    question = answer.question
    first = answer.ranked[0]
    cluster = question.cluster
    sizes = [None, *(size for size in SIZES if size > first.devices)]
    runs = [_paces(first, question, size) for size in sizes]
    length = run_length_to_show([first], tokens).tokens
    hours = first.hours(length) or 0.0
    outcomes = []
    for each in runs:
        outcomes.append(_outcome(each, hours, cluster.price_per_device_hour, first.devices))
    if as_json:
        values = [outcome._asdict() for outcome in outcomes]
        print(json.dumps({"version": VERSION, "faults": values}, indent=2))
        return
    show_headline(question, console)
    _show_saves(answer, runs[0], console)
    _show_hours(answer, runs[0]["median"], outcomes[0], tokens, console)
    _show_sizes(runs, outcomes, console)


def _paces(first: Candidate, question: Question, devices: int | None) -> Paces:
    """Return the first plan's run under faults with the shortest, the median and the longest restarts.

    `devices`: see `run_under_faults`.
    """
    paces: Paces = {}
    for pace in get_args(Pace):
        paces[pace] = run_under_faults(first, question.cluster, question.facts, devices, pace)
    return paces


def _outcome(runs: Paces, hours: float, price: float | None, devices: int) -> FaultsResult:
    """Return what faults cost a run that takes `hours` without faults on `devices` devices.

    `price`: of a device for an hour. Spare hosts are paid for, too.
    """
    usual = runs["median"]
    spares = usual.spares
    # More devices take less time for the same tokens.
    hours_without_faults = hours * devices / usual.devices
    paid_devices = usual.devices * (1 + spares / usual.hosts)
    spent: dict[Pace, float | None] = {}
    cost: dict[Pace, float | None] = {}
    for pace, each in runs.items():
        spent[pace] = _finite(each.hours(hours_without_faults))
        cost[pace] = _product(price, spent[pace], paid_devices)
    return FaultsResult(
        devices=usual.devices,
        every=usual.every,
        in_memory_every=usual.in_memory_every,
        goodput=usual.goodput(),
        goodput_range=(runs["longest"].goodput(), runs["shortest"].goodput()),
        spare_hosts=spares,
        available=usual.available(spares),
        hours=spent["median"],
        hours_range=(spent["shortest"], spent["longest"]),
        cost=cost["median"],
        cost_range=(cost["shortest"], cost["longest"]),
    )


def _finite(value: float) -> float | None:
    """Return the value; None for infinity, which JSON has not."""
    if math.isfinite(value):
        return value
    return None


def _product(price: float | None, hours: float | None, devices: float) -> float | None:
    """Return what devices cost for some hours; None if the price or the hours are not known."""
    if price is None or hours is None:
        return None
    return price * hours * devices


def _show_range(value: str, low: str, high: str) -> str:
    """Return a value with its range: `12.3 (11.6-13.4)`; without it if its ends look the same."""
    if low == high:
        return value
    return f"{value} ({low}-{high})"


def _numbers(value: float | None, ends: Range) -> str:
    """Return a number with its range."""
    return _show_range(number(value), number(ends[0]), number(ends[1]))


def _shares(runs: Paces, every: int | None = None) -> str:
    """Return the share of time that is training, with its range. `every`: steps between saves."""
    usual = runs["median"].goodput(every)
    low = runs["longest"].goodput(every)
    high = runs["shortest"].goodput(every)
    return _show_range(f"{usual:.2%}", f"{low:.2%}", f"{high:.2%}")


def _show_saves(answer: Answer, runs: Paces, console: Console) -> None:
    """Print what saves and faults cost, and the best interval between saves beside the user's."""
    first = answer.ranked[0]
    run = runs["median"]
    saved = f"a save on disk holds the steps up for {number(run.disk.stall)} s"
    if run.disk.lag:
        saved += f" and is there after {number(run.disk.lag)} s"
    restarts = (runs["shortest"].disk.restart, runs["longest"].disk.restart)
    lost = f"a fault costs {_numbers(run.disk.restart, restarts)} s and what was done since"
    console.print(
        f"{first.name}: {number(run.step)} s a step; {number(run.faults_a_day)} faults a day; {saved}; {lost}.",
        markup=False,
    )
    best = f"checkpoint.every={run.every}"
    if run.memory:
        best += f" checkpoint.in_memory_every={run.in_memory_every}"
    given = answer.question.config.checkpoint.every_steps
    yours = ""
    if given:
        yours = f" (yours, {given}: {_shares(runs, given)})"
    console.print(f"Best: {best}: {_shares(runs)} of the time is training{yours}.", markup=False)
    if answer.question.cluster.restart_seconds is None:
        console.print(NOT_MEASURED, style="dim")


def _show_hours(
    answer: Answer,
    run: RunUnderFaults,
    outcome: FaultsResult,
    tokens: float | None,
    console: Console,
) -> None:
    """Print hours and cost of the run without faults and with them. `tokens`: of the whole run."""
    first = answer.ranked[0]
    length = run_length_to_show([first], tokens).tokens
    hours = first.hours(length) or 0.0
    is_known = tokens is not None or first.hours() is not None
    unit = "" if is_known else " of a billion tokens"
    with_faults = _numbers(outcome.hours, outcome.hours_range)
    text = f"{number(hours)} without faults, {with_faults} with them"
    price = answer.question.cluster.price_per_device_hour
    if price is not None:
        cost = _numbers(outcome.cost, outcome.cost_range)
        text += f", cost {number(first.cost(price, length))} → {cost}"
    if run.spares:
        text += f", with {run.spares} spare hosts"
    console.print(f"Hours{unit}: {text}.\n")


def _show_sizes(runs: Sequence[Paces], outcomes: Sequence[FaultsResult], console: Console) -> None:
    """Print what faults cost on each number of devices, as a row of a table."""
    rows = []
    for paces, outcome in zip(runs, outcomes, strict=True):
        each = paces["median"]
        row = (
            f"{each.devices:,}",
            number(each.faults_a_day),
            f"{each.every:,}",
            number(each.every * each.step),
            f"{outcome.goodput:.2%}",
            f"{outcome.goodput_range[0]:.2%}",
            f"{each.spares:,}",
            f"{outcome.goodput * outcome.available:.2%}",
            number(outcome.hours),
        )
        rows.append(row)
    console.print(plain_table(console, HEADS, rows, spare=("seconds", "hours")))
    console.print(
        "More devices: as much to do and to save on each, so the work of a step grows with them.",
        style="dim",
        soft_wrap=True,
    )

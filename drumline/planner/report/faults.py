"""The report of `drumline plan --mtbf-hours`: what faults cost the first plan, as tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from drumline.planner.faults import RunUnderFaults, run_under_faults
from drumline.planner.report.output import VERSION
from drumline.planner.report.table import plain_table, run_length_to_show, show_headline
from drumline.planner.search.advice import nothing_fits_error, smallest_changes
from drumline.planner.search.answer import Answer, number

# Numbers of devices of the table, besides that of the plan itself.
SIZES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000)
# Heads of its columns.
HEADS = (
    "devices",
    "faults\na day",
    "save every\nsteps",
    "seconds",
    "training",
    "spare\nhosts",
    "with\nrepair",
    "hours",
)


class FaultsResult(NamedTuple):
    """What faults cost a run; the fields are the keys of the JSON.

    `every`, `in_memory_every`: steps between two saves.
    `goodput`: the share of time that is training.
    `available`: the share of time in which enough hosts work.
    `hours`, `cost`: of the run with faults; None if it never ends.
    """

    devices: int
    every: int
    in_memory_every: int | None
    goodput: float
    spare_hosts: int
    available: float
    hours: float | None
    cost: float | None


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
    runs = [run_under_faults(first, cluster, question.facts, size) for size in sizes]
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
    _show_hours(answer, runs[0], outcomes[0], tokens, console)
    _show_sizes(runs, outcomes, console)


def _outcome(run: RunUnderFaults, hours: float, price: float | None, devices: int) -> FaultsResult:
    """Return what faults cost a run that takes `hours` without faults on `devices` devices.

    `price`: of a device for an hour. Spare hosts are paid for, too.
    """
    spares = run.spares
    # More devices take less time for the same tokens.
    hours_without_faults = hours * devices / run.devices
    spent: float | None = run.hours(hours_without_faults)
    paid_devices = run.devices * (1 + spares / run.hosts)
    cost = None
    if spent is not None and not math.isfinite(spent):
        # JSON has no infinity.
        spent = None
    if price is not None and spent is not None:
        cost = price * spent * paid_devices
    return FaultsResult(
        devices=run.devices,
        every=run.every,
        in_memory_every=run.in_memory_every,
        goodput=run.goodput(),
        spare_hosts=spares,
        available=run.available(spares),
        hours=spent,
        cost=cost,
    )


def _show_saves(answer: Answer, run: RunUnderFaults, console: Console) -> None:
    """Print what saves and faults cost, and the best interval between saves beside the user's."""
    first = answer.ranked[0]
    saved = f"a save on disk holds the steps up for {number(run.disk.stall)} s"
    if run.disk.lag:
        saved += f" and is there after {number(run.disk.lag)} s"
    lost = f"a fault costs {number(run.disk.restart)} s and what was done since"
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
        yours = f" (yours, {given}: {run.goodput(given):.2%})"
    console.print(
        f"Best: {best}: {run.goodput():.2%} of the time is training{yours}.", markup=False
    )


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
    text = f"{number(hours)} without faults, {number(outcome.hours)} with them"
    price = answer.question.cluster.price_per_device_hour
    if price is not None:
        text += f", cost {number(first.cost(price, length))} → {number(outcome.cost)}"
    if run.spares:
        text += f", with {run.spares} spare hosts"
    console.print(f"Hours{unit}: {text}.\n")


def _show_sizes(
    runs: Sequence[RunUnderFaults], outcomes: Sequence[FaultsResult], console: Console
) -> None:
    """Print what faults cost on each number of devices, as a row of a table."""
    rows = []
    for each, outcome in zip(runs, outcomes, strict=True):
        goodput = each.goodput()
        row = (
            f"{each.devices:,}",
            number(each.faults_a_day),
            f"{each.every:,}",
            number(each.every * each.step),
            f"{goodput:.2%}",
            f"{each.spares:,}",
            f"{goodput * outcome.available:.2%}",
            number(outcome.hours),
        )
        rows.append(row)
    console.print(plain_table(console, HEADS, rows, spare=("seconds", "hours")))
    console.print(
        "More devices: as much to do and to save on each, so the work of a step grows with them.",
        style="dim",
        soft_wrap=True,
    )

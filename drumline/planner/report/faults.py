"""The report of `drumline plan --mtbf-hours`: what faults cost the first plan, as tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from drumline.planner.faults import Campaign, campaign
from drumline.planner.report.output import VERSION
from drumline.planner.report.table import billing, plain_table, show_headline
from drumline.planner.search.advice import refusal, smallest_changes
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


class CampaignResult(NamedTuple):
    """What a campaign comes to; the fields are the keys of the JSON.

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
    """Print the campaign of the first plan, and of as much a device on up to 100,000 devices.

    `tokens`: of the whole run. Raises PlanError if nothing fits.
    """
    if not answer.ranked:
        raise refusal(answer, smallest_changes(answer))
    question = answer.question
    first = answer.ranked[0]
    cluster = question.cluster
    sizes = [None, *(size for size in SIZES if size > first.devices)]
    campaigns = [campaign(first, cluster, question.facts, size) for size in sizes]
    length = billing([first], tokens).tokens
    hours = first.hours(length) or 0.0
    outcomes = []
    for each in campaigns:
        outcomes.append(_outcome(each, hours, cluster.price_per_device_hour, first.devices))
    if as_json:
        values = [outcome._asdict() for outcome in outcomes]
        print(json.dumps({"version": VERSION, "faults": values}, indent=2))
        return
    show_headline(question, console)
    _show_saves(answer, campaigns[0], console)
    _show_hours(answer, campaigns[0], outcomes[0], tokens, console)
    _show_sizes(campaigns, outcomes, console)


def _outcome(found: Campaign, hours: float, price: float | None, devices: int) -> CampaignResult:
    """Return what a campaign comes to, if the run takes `hours` without faults on `devices` devices.

    `price`: of a device for an hour. Spare hosts are paid for, too.
    """
    spares = found.spares
    # More devices take less time for the same tokens.
    hours_without_faults = hours * devices / found.devices
    spent: float | None = found.hours(hours_without_faults)
    paid_devices = found.devices * (1 + spares / found.hosts)
    cost = None
    if spent is not None and not math.isfinite(spent):
        # JSON has no infinity.
        spent = None
    if price is not None and spent is not None:
        cost = price * spent * paid_devices
    return CampaignResult(
        devices=found.devices,
        every=found.every,
        in_memory_every=found.in_memory_every,
        goodput=found.goodput(),
        spare_hosts=spares,
        available=found.available(spares),
        hours=spent,
        cost=cost,
    )


def _show_saves(answer: Answer, here: Campaign, console: Console) -> None:
    """Print what saves and faults cost, and the best interval between saves beside the user's."""
    first = answer.ranked[0]
    saved = f"a save on disk holds the steps up for {number(here.disk.stall)} s"
    if here.disk.lag:
        saved += f" and is there after {number(here.disk.lag)} s"
    lost = f"a fault costs {number(here.disk.restart)} s and what was done since"
    console.print(
        f"{first.name}: {number(here.step)} s a step; {number(here.faults_a_day)} faults a day; {saved}; {lost}.",
        markup=False,
    )
    best = f"checkpoint.every={here.every}"
    if here.memory:
        best += f" checkpoint.in_memory_every={here.in_memory_every}"
    given = answer.question.config.checkpoint.steps
    yours = ""
    if given:
        yours = f" (yours, {given}: {here.goodput(given):.2%})"
    console.print(
        f"Best: {best}: {here.goodput():.2%} of the time is training{yours}.", markup=False
    )


def _show_hours(
    answer: Answer, here: Campaign, outcome: CampaignResult, tokens: float | None, console: Console
) -> None:
    """Print hours and cost of the run without faults and with them. `tokens`: of the whole run."""
    first = answer.ranked[0]
    length = billing([first], tokens).tokens
    hours = first.hours(length) or 0.0
    is_known = tokens is not None or first.hours() is not None
    unit = "" if is_known else " of a billion tokens"
    text = f"{number(hours)} without faults, {number(outcome.hours)} with them"
    price = answer.question.cluster.price_per_device_hour
    if price is not None:
        text += f", cost {number(first.cost(price, length))} → {number(outcome.cost)}"
    if here.spares:
        text += f", with {here.spares} spare hosts"
    console.print(f"Hours{unit}: {text}.\n")


def _show_sizes(
    campaigns: Sequence[Campaign], outcomes: Sequence[CampaignResult], console: Console
) -> None:
    """Print the campaign on each number of devices as a row of a table."""
    rows = []
    for each, outcome in zip(campaigns, outcomes, strict=True):
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

"""`drumline plan --mtbf-hours`: what faults cost the first plan, as tables and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console

from drumline.planner.faults import Campaign, campaign
from drumline.planner.report.output import VERSION
from drumline.planner.report.table import plain_table, show_headline
from drumline.planner.search.advice import nothing_fits, refusal
from drumline.planner.search.answer import Answer, number

SIZES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000)


def report_faults(answer: Answer, console: Console, tokens: float | None, as_json: bool) -> None:
    """The campaign of the first plan, and of as much a device on up to 100,000 devices. Raises PlanError where nothing fits."""
    if not answer.ranked:
        raise refusal(answer, nothing_fits(answer))
    question, first = answer.question, answer.ranked[0]
    cluster = question.cluster
    sizes = [None, *(size for size in SIZES if size > first.devices)]
    campaigns = [campaign(first, cluster, question.facts, size) for size in sizes]
    here, known = campaigns[0], tokens is not None or first.hours() is not None
    length, price = (tokens if known else 1e9), cluster.price_per_device_hour
    hours = first.hours(length) or 0.0
    values = [_values(each, hours, price, first.devices) for each in campaigns]
    if as_json:
        print(json.dumps({"version": VERSION, "faults": values}, indent=2))
        return
    show_headline(question, console)
    saved = f"a save on disk holds the steps up for {number(here.disk.stall)} s"
    saved += f" and is there after {number(here.disk.lag)} s" if here.disk.lag else ""
    lost = f"a fault costs {number(here.disk.restart)} s and what was done since"
    console.print(
        f"{first.name}: {number(here.step)} s a step; {number(here.faults_a_day)} faults a day; {saved}; {lost}.",
        markup=False,
    )
    every = f"checkpoint.every={here.every}" + (
        f" checkpoint.in_memory_every={here.in_memory_every}" if here.memory else ""
    )
    given = question.config.checkpoint.steps
    yours = f" (yours, {given}: {here.goodput(given):.2%})" if given else ""
    console.print(
        f"Best: {every}: {here.goodput():.2%} of the time is training{yours}.", markup=False
    )
    unit = "" if known else " of a billion tokens"
    bill = (
        f", cost {number(first.cost(price, length))} → {number(values[0]['cost'])}"
        if price is not None
        else ""
    )
    spare = f", with {here.spares} spare hosts" if here.spares else ""
    console.print(
        f"Hours{unit}: {number(hours)} without faults, {number(values[0]['hours'])} with them{bill}{spare}.\n"
    )
    heads = (
        "devices",
        "faults\na day",
        "save every\nsteps",
        "seconds",
        "training",
        "spare\nhosts",
        "with\nrepair",
        "hours",
    )
    rows = []
    for each, one in zip(campaigns, values, strict=True):
        cells = (
            f"{each.devices:,}",
            number(each.faults_a_day),
            f"{each.every:,}",
            number(each.every * each.step),
            f"{each.goodput():.2%}",
        )
        rows.append(
            (
                *cells,
                f"{each.spares:,}",
                f"{each.goodput() * one['available']:.2%}",
                number(one["hours"]),
            )
        )
    console.print(plain_table(console, heads, rows, spare=("seconds", "hours")))
    console.print(
        "More devices: as much to do and to save on each, so the work of a step grows with them.",
        style="dim",
        soft_wrap=True,
    )


def _values(found: Campaign, hours: float, price: float | None, devices: int) -> dict[str, Any]:
    """`hours` without faults on `devices`."""
    taken, spares = found.hours(hours * devices / found.devices), found.spares
    paid = found.devices * (1 + spares / found.hosts)
    return {
        "devices": found.devices,
        "every": found.every,
        "in_memory_every": found.in_memory_every,
        "goodput": found.goodput(),
        "spare_hosts": spares,
        "available": found.available(spares),
        "hours": taken if math.isfinite(taken) else None,
        "cost": price * taken * paid if price is not None and math.isfinite(taken) else None,
    }

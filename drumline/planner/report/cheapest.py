"""The report of `drumline plan --for`: the cheapest of the offered hosts that are in time."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from drumline.errors import PlanError, UserError
from drumline.planner.report.output import VERSION, candidate_as_json
from drumline.planner.report.table import (
    NEEDS,
    UNKNOWN,
    VERDICT,
    headline,
    main_cells,
    plain_table,
)
from drumline.planner.search.answer import Question, number
from drumline.planner.search.cheapest import Rented, cheapest, rent

# The hours of each unit that a duration may have.
HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60}
DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhm])+")
PART = re.compile(r"(\d+(?:\.\d+)?)([dhm])")
OFFERS_FORM = "write a host and the price of one of its devices: 8xh100-80g=2.5,8xa100-80g=1.6"


class HostOffer(NamedTuple):
    """A host that is offered: its spec as `--cluster` has it, and the price of a device for an hour."""

    host: str
    price: float


def parse_duration(text: str) -> float:
    """Return the hours of a duration such as 24h, 3d or 1d12h. Raises UserError."""
    hours = 0.0
    if DURATION.fullmatch(text):
        for amount, unit in PART.findall(text):
            hours += float(amount) * HOURS[unit]
    if not 0 < hours <= 1e6:
        raise UserError(
            f"{text!r} is no duration",
            where="--for",
            fix="write hours or days: 24h, 90m, 3d, 1d12h",
        )
    return hours


def parse_offers(text: str) -> list[HostOffer]:
    """Return the offers in the value of `--offers`. Raises UserError for another form."""
    offers = []
    for part in text.split(","):
        host, _, price = part.partition("=")
        try:
            amount = float(price)
        except ValueError:
            amount = -1.0
        # Written this way round, so that nan is refused, too.
        if not host.strip() or not 0 <= amount <= 1e9:
            raise UserError(f"{part!r} is no offer", where="--offers", fix=OFFERS_FORM)
        offers.append(HostOffer(host.strip(), amount))
    return offers


def report_cheapest(
    questions: Sequence[Question],
    tokens: float | None,
    deadline: float,
    console: Console,
    as_json: bool,
) -> None:
    """Print how long the run takes on the offered hosts, and the cheapest that are in time.

    `questions`: one for each kind of host, with its price. `tokens`: of the whole run. `deadline`:
    hours. Raises PlanError, after the table is shown, if none is in time, and UserError if the length
    of the run is not known.
    """
    rentals: list[Rented] = []
    for question in questions:
        rentals += rent(question, tokens, deadline)
    _require_length(rentals)
    chosen = cheapest(rentals)
    if as_json:
        print(
            json.dumps({"version": VERSION, "for": _as_json(rentals, chosen, deadline)}, indent=2)
        )
    else:
        model, task, _ = headline(questions[0])
        console.print(f"{model}\n{task}", style="bold", markup=False, end="\n\n")
        _show(rentals, chosen, console)
    if chosen is None:
        raise _too_slow(rentals, deadline)


def _require_length(rentals: Sequence[Rented]) -> None:
    """Raise UserError if something fits and its hours are not known."""
    for each in rentals:
        if each.best is not None and each.hours is None:
            raise UserError(
                "the length of the run is not known",
                where="--for",
                fix="add --tokens, such as --tokens 10B",
            )


def _spec(rented: Rented) -> str:
    """Return the hosts as `--cluster` takes them."""
    cluster = rented.question.cluster
    return f"{cluster.nodes}x{cluster.per_node}x{cluster.device.name}"


def _show(rentals: Sequence[Rented], chosen: Rented | None, console: Console) -> None:
    """Print a row for each number of hosts that says something, and the choice."""
    rows = [_row(each) for each in _select(rentals)]
    heads = ("rented", "strategy", VERDICT, NEEDS, "hours", "in time", "device\nhours", "cost")
    console.print(plain_table(console, heads, rows, spare=(NEEDS, VERDICT, "device\nhours")))
    if chosen is None or chosen.best is None:
        return
    what = f"Cheapest: {_spec(chosen)}, {chosen.best.name}: {_hours(chosen)} hours"
    if chosen.cost is not None:
        what += f", cost {_cost(chosen)}"
    if chosen.in_time == "likely":
        what += "; at the slow end of its range it is late"
    console.print(f"\n{what}.", markup=False, soft_wrap=True)


def _select(rentals: Sequence[Rented]) -> list[Rented]:
    """Return what to show of each kind of host, the fewest first.

    These are the most hosts that are late before the first that are not, the fewest that are likely
    in time, the fewest that are surely, and the cheapest.
    """
    kinds: dict[tuple[str, int], list[Rented]] = {}
    for each in rentals:
        cluster = each.question.cluster
        kinds.setdefault((cluster.device.name, cluster.per_node), []).append(each)
    selected = []
    for alike in kinds.values():
        kept = [cheapest(alike)]
        for in_time in ("yes", "likely"):
            kept.append(next((each for each in alike if each.in_time == in_time), None))
        late = list(itertools.takewhile(lambda each: each.in_time == "no", alike))
        if late:
            kept.append(late[-1])
        selected += [each for each in alike if each in kept]
    return selected


def _row(rented: Rented) -> list[str]:
    """Return the cells of a number of hosts."""
    if rented.best is None:
        return [_spec(rented), UNKNOWN, "no", UNKNOWN, UNKNOWN, "no", UNKNOWN, UNKNOWN]
    cells = main_cells(rented.best)
    return [
        _spec(rented),
        rented.best.name,
        cells[VERDICT],
        cells[NEEDS],
        _hours(rented),
        rented.in_time,
        number(rented.device_hours),
        _cost(rented),
    ]


def _hours(rented: Rented) -> str:
    """Return the hours with their range: `20.1 (15.3-26.9)`."""
    ends = rented.hours_range
    if ends is None:
        return UNKNOWN
    return f"{number(rented.hours)} ({number(ends[0])}-{number(ends[1])})"


def _cost(rented: Rented) -> str:
    """Return the cost with its range; a dash without a price."""
    if rented.cost is None or rented.best is None:
        return UNKNOWN
    fast, slow = rented.best.estimate.seconds_range
    return f"{number(rented.cost)} ({number(fast * rented.cost)}-{number(slow * rented.cost)})"


def _too_slow(rentals: Sequence[Rented], deadline: float) -> PlanError:
    """Return the error that no number of hosts is in time, with the fastest one."""
    fitting = [each for each in rentals if each.hours is not None]
    if not fitting:
        return PlanError(
            "nothing fits on any of these hosts",
            where="--for",
            fix="see `drumline plan --cluster` with one of them for what comes nearest",
        )
    fastest = min(fitting, key=lambda each: each.hours or 0.0)
    return PlanError(
        f"none of these hosts is in time: {_spec(fastest)} takes {number(fastest.hours)} hours of"
        f" {number(deadline)}",
        where="--for",
        fix="allow more hours, train fewer tokens, or offer faster hosts by --offers",
    )


def _as_json(rentals: Sequence[Rented], chosen: Rented | None, deadline: float) -> dict[str, Any]:
    """Return all that was planned for, and the number of the cheapest in this list."""
    number_of_chosen = None
    if chosen is not None:
        number_of_chosen = rentals.index(chosen)
    rows = []
    for each in rentals:
        best = None
        if each.best is not None:
            best = candidate_as_json(each.question, each.best, each.tokens)
        row = {
            "cluster": _spec(each),
            "nodes": each.nodes,
            "devices": each.question.cluster.world_size,
            "price_per_device_hour": each.question.cluster.price_per_device_hour,
            "in_time": each.in_time,
            "hours": each.hours,
            "hours_range": each.hours_range,
            "device_hours": each.device_hours,
            "cost": each.cost,
            "best": best,
        }
        rows.append(row)
    return {"hours": deadline, "tried": rows, "cheapest": number_of_chosen}

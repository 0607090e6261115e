"""Predicted against measured: `drumline plan --check RUN`, and the results of `--probe`."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from drumline.core.explain import plan_line
from drumline.core.plan import Plan
from drumline.errors import UserError, printable
from drumline.planner.report.table import grouped
from drumline.planner.search.answer import Factors, Probe
from drumline.telemetry.truth import OFF, Comparison, Measurement, compare, notes

TRAIN = "train with this version: drumline train CONFIG.yaml"


def check(run: Path, as_json: bool = False) -> int:
    """Print the table. Returns 0, however large the differences. Raises UserError for a folder that is no run, or a run without
    measurements."""
    plan, measured = read_run(run)
    assert plan.predicted.estimate is not None
    rows = compare(plan.predicted.estimate, measured)
    if as_json:
        made = [
            {
                **row.model_dump(),
                "off": row.off if row.predicted or not row.measured else None,
                "warns": row.warns,
            }
            for row in rows
        ]
        print(
            json.dumps(
                {"rows": made, "notes": remarks(rows, measured), "measured": measured.model_dump()},
                indent=2,
            )
        )
        return 0
    console = Console(highlight=False)
    console.print(printable(plan_line(plan)), soft_wrap=True, markup=False)
    _show(rows, measured, console)
    off = [row.category for row in rows if row.warns]
    console.print(
        f"off by more than {OFF:.0%}: {', '.join(off)}"
        if off
        else f"nothing that counts is off by more than {OFF:.0%}"
    )
    return 0


def read_run(run: Path) -> tuple[Plan, Measurement]:
    """The plan of a run folder, with its estimate, and the run's last measurement. Raises UserError."""
    from drumline.telemetry.events import Step, last_measurement, read

    try:
        plan, events = Plan.load(run / "plan.json"), read(run / "events.jsonl")
        measured = last_measurement(events)
    except ValueError:
        raise UserError(
            "events.jsonl is not one of this version", where=str(run), fix=TRAIN
        ) from None
    if plan.predicted.estimate is None:
        raise UserError("plan.json has no estimate", where=str(run), fix=TRAIN)
    if measured is None:
        steps = max((event.step for event in events if isinstance(event, Step)), default=0)
        fix = "train for four steps or more: a step is counted after two"
        raise UserError(f"the run measured nothing in {steps} steps", where=str(run), fix=fix)
    return plan, measured


def _show(rows: list[Comparison], measured: Measurement, console: Console) -> None:
    """Predicted, measured, off by: in yellow beyond 15%, dim where it is only shown; and the lines under the table."""
    made = Table(box=box.SIMPLE_HEAD)
    for column in ("", "predicted", "measured", "off by"):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        style = "yellow" if row.warns else "dim" if only_shown(row) else ""
        made.add_row(
            row.category,
            row.show(row.predicted),
            row.show(row.measured),
            row.by_how_much(),
            style=style,
        )
    console.print(made)
    for remark in remarks(rows, measured):
        console.print(f"  {printable(remark)}", markup=False, soft_wrap=True)


def only_shown(row: Comparison) -> str:
    """Why there is no warning for a category that is off; empty where there is one, or where it is not off."""
    if row.warns or (abs(row.off) <= OFF and not row.note):
        return ""
    taken = (
        ", which the interpreter and its libraries may take"
        if row.category.startswith("host")
        else ""
    )
    return row.note or f"less than {row.show(row.slack)} apart{taken}"


def remarks(rows: list[Comparison], measured: Measurement) -> list[str]:
    """Lines under the table."""
    why = grouped((only_shown(row), row.category) for row in rows)
    return notes(measured) + [
        f"{'; '.join(categories)}: {reason}" for reason, categories in why.items() if reason
    ]


def show_probes(probes: tuple[Probe, ...], console: Console) -> None:
    """Predicted against measured of each candidate that was tried, and the factors that correct the estimates."""
    for probe in probes:
        if probe.measured is None or probe.factors is None:
            console.print(
                f"tried {probe.name}: {probe.failed}\n",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
            continue
        console.print(
            f"tried {probe.name} for {probe.measured.step} steps:", style="bold", markup=False
        )
        _show(compare(probe.predicted, probe.measured), probe.measured, console)
        console.print(
            f"its estimate times {describe_factors(probe.factors)}\n", markup=False, soft_wrap=True
        )
    if any(probe.factors for probe in probes):
        console.print(
            "Every plan below is corrected: these by their own factors, the others by the mean.\n",
            style="italic",
        )


def describe_factors(factors: Factors) -> str:
    """`live 1.21, seconds 3.4`: those that are not 1."""
    changed = [f"{name} {value:.3g}" for name, value in factors if abs(value - 1) > 5e-3]
    return ", ".join(changed) or "1: it was right"

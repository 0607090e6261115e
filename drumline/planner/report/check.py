"""The reports of `drumline plan --check RUN` and `--probe`: what was predicted beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from drumline.errors import UserError, printable
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import detect
from drumline.plan.explain import plan_line
from drumline.plan.plan import Plan
from drumline.planner.cluster import cluster_of_machine
from drumline.planner.cost import fitted
from drumline.planner.learned import learn
from drumline.planner.report.table import group_names
from drumline.planner.search.correction import Factors, Probe
from drumline.telemetry.plan_accuracy import OFF, Comparison, Measurement, compare, lessons, notes

# A factor that differs from 1 by less is printed as 1.
NEGLIGIBLE = 5e-3
TRAIN = "train with this version: drumline train CONFIG.yaml"


def check(run: Path, as_json: bool = False, learns: bool = False) -> int:
    """Print what was predicted of a run beside what it measured, and what that would change.

    `learns`: keep what it measured for later plans (planner.learned).

    Returns the exit code 0, however large the differences are. Raises UserError for a folder that is no run,
    and for a run without measurements.
    """
    plan, measured = read_run(run)
    assert plan.predicted.estimate is not None
    rows = compare(plan.predicted.estimate, measured)
    if learns and as_json:
        raise UserError(
            "--learn and --json cannot be combined", where="drumline plan", fix="leave one out"
        )
    if as_json:
        _print_json(rows, measured)
        return 0
    console = Console(highlight=False)
    console.print(printable(plan_line(plan)), soft_wrap=True, markup=False)
    _show(rows, measured, console)
    for line in lessons(rows, measured.by == "tracker", {"PRODUCTS": fitted.PRODUCTS}):
        console.print(line, markup=False, soft_wrap=True)
    off = [row.category for row in rows if row.warns]
    if off:
        console.print(f"off by more than {OFF:.0%}: {', '.join(off)}")
    else:
        console.print(f"nothing that counts is off by more than {OFF:.0%}")
    if learns:
        kept = learn(run, plan, measured, _cluster_here(plan))
        console.print(
            f"kept for later plans of {kept.devices}: {describe_factors(kept.factors)}",
            markup=False,
            soft_wrap=True,
        )
    return 0


def _cluster_here(plan: Plan) -> Cluster:
    """Return the devices of this machine that a run of the plan uses."""
    machine = detect()
    if plan.device == "cpu":
        machine = machine.without_devices()
    return cluster_of_machine(machine, plan.mesh.world_size)


def _print_json(rows: list[Comparison], measured: Measurement) -> None:
    """Print the rows, the remarks and the measurement as JSON."""
    made = []
    for row in rows:
        # A category that was measured and not predicted is off by infinity, which JSON lacks.
        off = row.off if row.predicted or not row.measured else None
        made.append({**row.model_dump(), "off": off, "warns": row.warns})
    content = {"rows": made, "notes": remarks(rows, measured), "measured": measured.model_dump()}
    print(json.dumps(content, indent=2))


def read_run(run: Path) -> tuple[Plan, Measurement]:
    """Return the plan of a run's folder, with its estimate, and the run's last measurement. Raise UserError."""
    from drumline.telemetry.events import Step, newest_measurement, read

    try:
        plan = Plan.load(run / "plan.json")
        events = read(run / "events.jsonl")
        measured = newest_measurement(events)
    except ValueError:
        raise UserError(
            "events.jsonl is not one of this version", where=str(run), fix=TRAIN
        ) from None
    if plan.predicted.estimate is None:
        raise UserError("plan.json has no estimate", where=str(run), fix=TRAIN)
    if measured is None:
        steps = [event.step for event in events if isinstance(event, Step)]
        raise UserError(
            f"the run measured nothing in {max(steps, default=0)} steps",
            where=str(run),
            fix="train for four steps or more: the third is instrumented",
        )
    return plan, measured


def _show(rows: list[Comparison], measured: Measurement, console: Console) -> None:
    """Print what was predicted, what was measured and by how much it is off, and remarks below the table.

    A row beyond 15% is yellow, one that is off without a warning is dim.
    """
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("", justify="left", no_wrap=True)
    for head in ("predicted", "measured", "off by"):
        made.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(
            row.category,
            row.show(row.predicted),
            row.show(row.measured),
            row.describe_difference(),
            style=_style(row),
        )
    console.print(made)
    for remark in remarks(rows, measured):
        console.print(f"  {printable(remark)}", markup=False, soft_wrap=True)


def _style(row: Comparison) -> str:
    """Return the style of a row of the table."""
    if row.warns:
        return "yellow"
    if only_shown(row):
        return "dim"
    return ""


def only_shown(row: Comparison) -> str:
    """Return why there is no warning for a category that is off; empty if there is one, or if it is not off."""
    if row.warns or abs(row.off) <= OFF:
        return ""
    if row.note:
        return row.note
    reason = f"less than {row.show(row.slack)} apart"
    if row.category.startswith("host"):
        reason += ", which the interpreter and its libraries may take"
    return reason


def remarks(rows: list[Comparison], measured: Measurement) -> list[str]:
    """Return the lines below the table: notes on the measurement, and why categories are only shown."""
    lines = notes(measured)
    by_reason = group_names((only_shown(row), row.category) for row in rows)
    for reason, categories in by_reason.items():
        if reason:
            lines.append(f"{'; '.join(categories)}: {reason}")
    return lines


def show_probes(probes: tuple[Probe, ...], console: Console) -> None:
    """Print predicted beside measured of each candidate that ran for a few steps, and the factors that follow.

    The factors correct the estimates of all plans.
    """
    for probe in probes:
        _show_probe(probe, console)
    if any(probe.factors for probe in probes):
        console.print(
            "Every plan below is corrected: these by their own factors, the others by the mean.\n",
            style="italic",
        )


def _show_probe(probe: Probe, console: Console) -> None:
    """Print predicted beside measured of a probe, or why it failed."""
    if probe.measured is None or probe.factors is None:
        console.print(
            f"tried {probe.name}: {probe.failed}\n", style="yellow", markup=False, soft_wrap=True
        )
        return
    console.print(
        f"tried {probe.name} for {probe.measured.step} steps:", style="bold", markup=False
    )
    _show(compare(probe.predicted, probe.measured), probe.measured, console)
    console.print(
        f"its estimate times {describe_factors(probe.factors)}\n", markup=False, soft_wrap=True
    )


def describe_factors(factors: Factors) -> str:
    """Return the factors that are not 1, as `live 1.21, seconds 3.4`."""
    changed = []
    for name, value in factors:
        if abs(value - 1) > NEGLIGIBLE:
            changed.append(f"{name} {value:.3g}")
    return ", ".join(changed) or "1: it was right"

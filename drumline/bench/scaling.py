"""`drumline bench`: how a config scales over processes, hosts and strategies, measured, beside what the planner says."""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.bench import pages
from drumline.bench.axes import as_name
from drumline.bench.pages import Rows, claim, write_pages
from drumline.bench.verify import spell
from drumline.core.batch import resolve_batch
from drumline.core.config import Config
from drumline.core.explain import size, strategy_name
from drumline.core.files import remove, write_whole
from drumline.core.load import Loaded, Request, override, reader
from drumline.core.plan import Plan
from drumline.core.signals import NOTHING_LOST
from drumline.errors import DrumlineError, UserError
from drumline.report.bars import OnProgress, bars
from drumline.telemetry.events import Event, Fault, Measured, Step, read

WARM = 4  # steps that are not counted: the first are slower, and one is under the tracker of memory and traffic
MARK = "bench.json"


@dataclass(frozen=True)
class Case:
    """`strategy`: as on the command line; empty: the config's own. `nodes`: hosts; None: this one."""

    strategy: str
    nproc: int
    nodes: int | None = None

    @property
    def world(self) -> int:
        return self.nproc * (self.nodes or 1)

    @property
    def name(self) -> str:
        text = f"{self.strategy or 'config'}-{f'{self.nodes}x' if self.nodes else ''}{self.nproc}"
        # A strategy of one's own is the path of a file.
        return as_name(text.replace(" ", "-").replace("=", ""))


@dataclass(frozen=True)
class Round:
    """Medians over the counted steps of one round. `communication`: the part of a step that ranks wait for one another; None: not measured.
    `memory`: bytes of the fullest device: what the allocator holds, on a CPU the peak of tensors."""

    samples_per_s: float
    tokens_per_s: float
    seconds: float
    communication: float | None
    memory: int | None


@dataclass
class Row:
    case: Case
    rounds: list[Round] = field(default_factory=list)
    strategy: str = ""  # what the plan runs
    predicted: tuple[float, float, float] | None = (
        None  # samples/s: the estimate, and the ends of its range
    )
    reason: str = ""  # why there are no rounds, or no more of them

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """(median, least, most) over the rounds."""
        values = [value for each in self.rounds if (value := getattr(each, name)) is not None]
        return (statistics.median(values), min(values), max(values)) if values else None

    def speed_up(self, base: Row) -> tuple[float, float, float] | None:
        """The same of the samples/s over those of `base`, round by round: what disturbed a round met both."""
        ratios = [
            mine.samples_per_s / other.samples_per_s
            for mine, other in zip(self.rounds, base.rounds, strict=False)
        ]
        return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


@dataclass(frozen=True)
class Options:
    """`steps`: counted ones of a round; `weak`: the global batch grows with the processes; `predict`: clusters."""

    nproc: tuple[int, ...]
    strategies: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    steps: int = 20
    rounds: int = 3
    weak: bool = False
    predict: tuple[str, ...] = ()
    to: Path | None = None


class DoesNotFit(DrumlineError):
    """By its plan."""


def bench(config: Path, overrides: list[str], options: Options) -> int:
    """Measure each case once a round, in turn; print the table, and write it. Returns 0; 1 where no case ran; 75 after a signal. Raises
    UserError for a config that cannot be loaded and a folder that holds something else."""
    read_config = reader(config)
    loaded, console = read_config(overrides), Console(highlight=False)
    launcher = loaded.config.launch
    if options.nodes and not launcher.number_of_hosts:
        fix = "set launch: {kind: ssh, hosts: […]} or slurm in the YAML, or ask the planner: --predict 2x8xh100-80g"
        raise UserError(
            f"launch.kind {launcher.kind} starts ranks on this host alone", where="--nodes", fix=fix
        )
    hosts = {
        nodes: launcher.on_hosts(nodes)
        for nodes in options.nodes or (launcher.number_of_hosts,)
        if nodes
    }
    shapes = [(nproc, nodes) for nodes in hosts or (None,) for nproc in options.nproc]
    cases = [Case(strategy, *shape) for strategy in options.strategies or ("",) for shape in shapes]
    spelling = {
        strategy: [spell(strategy)] if strategy else [] for strategy in options.strategies or ("",)
    }
    for given in spelling.values():
        # A strategy that there is not is a mistake, one that does not run is a row.
        read_config([*overrides, *given])
    folder = options.to or Path("runs") / f"{config.stem}-bench"
    if claim(folder, MARK, "bench"):
        for old in folder.glob("*-round*"):
            remove(old)
    least = min(case.world for case in cases)
    samples = resolve_batch(loaded.config, least).global_samples
    rows, code, loads = [Row(case) for case in cases], 0, list[float]()
    with bars(Console(stderr=True)) as on_progress:
        for number in range(options.rounds):
            loads.append(os.getloadavg()[0])
            for done, row in enumerate(rows):
                on_progress(f"round {number + 1}", done, len(rows))
                if row.reason or code:
                    continue
                total = samples * row.case.world // least if options.weak else samples
                short = _short(loaded.config, row.case, total, options.steps)
                given = [
                    *overrides,
                    *spelling[row.case.strategy],
                    *short,
                    *hosts.get(row.case.nodes or 0, []),
                ]
                code = _measure(
                    row,
                    read_config,
                    given,
                    folder / f"{row.case.name}-round{number + 1}",
                    on_progress,
                )
            on_progress(f"round {number + 1}", len(rows), len(rows))
    clusters = () if code else options.predict
    predictions = [
        _predict(config, overrides, cluster, samples / least if options.weak else 0)
        for cluster in clusters
    ]
    _show(config, rows, predictions, options, folder, loads, console)
    return NOTHING_LOST if code else int(not any(row.rounds for row in rows))


def _short(config: Config, case: Case, samples: int, steps: int) -> list[str]:
    """Overrides of a run of a few steps that leaves nothing behind, on so many processes, with this global batch."""
    turn = config.algorithm.steps_in_turn
    per_rank, micro = max(1, samples // case.world), config.batch.micro_batch
    fitting = (
        max(m for m in range(1, min(micro, per_rank) + 1) if per_rank % m == 0) if micro else None
    )
    return [
        f"batch={{global_samples: {samples}{f', micro_batch: {fitting}' if fitting else ''}}}",
        f"run.steps={turn * math.ceil((WARM + steps) / turn)}",
        "run.log_every=1",
        "run.report_to=[]",
        "checkpoint={export: none}",
        "eval={at_start: false}",
        "report.html=false",
        "launch.max_restarts=0",
        f"launch.nproc={case.nproc}",
    ]


def _measure(
    row: Row, read_config: Any, given: list[str], folder: Path, on_progress: OnProgress
) -> int:
    """One round of a case: a round of `row`, or its `reason`. Returns 75 after a signal, else 0."""
    from drumline.train.command import launch_ranks

    def unsaved(plan: Plan) -> Plan:
        row.strategy = row.case.strategy or strategy_name(plan)
        if (estimate := plan.predicted.estimate) is not None:
            rate = plan.batch.global_samples / estimate.seconds.total
            row.predicted = rate, rate / estimate.seconds_range[1], rate / estimate.seconds_range[0]
            if estimate.verdict == "no":
                what = f"does not fit: it needs {size(estimate.memory.reserved)} of {size(estimate.limit)}, by its plan"
                raise DoesNotFit(
                    what
                    if estimate.host_fits
                    else "does not fit into the memory of its hosts, by its plan"
                )
        return plan.measured_only()

    errors = io.StringIO()
    try:
        loaded: Loaded = read_config([*given, override("run.dir", folder)])
        with redirect_stderr(errors):
            _, code = launch_ranks(
                Request(loaded, loaded.config.launch.processes()), display=False, change=unsaved
            )
    except DrumlineError as error:
        row.reason = error.line()
        return 0
    if code == NOTHING_LOST:
        return code
    events = read(folder / "events.jsonl")
    if code or (seen := _round(events)) is None:
        lines = [
            line.removeprefix("error: ")
            for line in errors.getvalue().splitlines()
            if line.startswith("error: ")
        ]
        faults = [event.error for event in events if isinstance(event, Fault)]
        row.reason = (faults or lines or [f"no steps were measured; see {folder}"])[-1]
        return 0
    row.rounds.append(seen)
    return 0


def _round(events: list[Event]) -> Round | None:
    """None where there was no step after the first few."""
    steps = [event for event in events if isinstance(event, Step) and event.step > WARM]
    if not steps:
        return None
    waits, seconds = [event.comm_s for event in steps], sum(event.seconds for event in steps)
    memory = [
        event.metrics["memory"]
        for event in events
        if isinstance(event, Measured) and event.metrics.get("memory")
    ]
    return Round(
        samples_per_s=statistics.median(event.samples_per_s for event in steps),
        tokens_per_s=statistics.median(event.tokens_per_s for event in steps),
        seconds=statistics.median(event.seconds for event in steps),
        communication=None
        if None in waits or not seconds
        else sum(wait for wait in waits if wait is not None) / seconds,
        memory=memory[-1].get("reserved", memory[-1].get("peak")) if memory else None,
    )


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a cluster: its best plan there, or why there is none. `samples`, `tokens`: a second, and their ends."""

    cluster: str
    devices: int = 0
    name: str = ""
    samples: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tokens: float = 0.0
    memory: int = 0
    reason: str = ""


def _predict(config: Path, overrides: list[str], cluster: str, grows: float) -> Prediction:
    """`grows`: samples of the global batch for each device, under weak scaling."""
    from drumline.planner.public import plan

    # What is set for this machine would bind the planner.
    given = [
        *overrides,
        "strategy=auto",
        "launch=local",
        "run.device=auto",
    ]
    try:
        found = plan(config, given, cluster=cluster)
        if grows:
            batch = f"batch={{global_samples: {round(grows * found.answer.question.cluster.world_size)}}}"
            found = plan(config, [*given, batch], cluster=cluster)
        best = found.best
    except DrumlineError as error:
        return Prediction(cluster, reason=error.line())
    layout, estimate = best.candidate.layout, best.candidate.estimate
    rate, (low, high) = layout.batch.global_samples / estimate.seconds.total, estimate.seconds_range
    devices = layout.mesh.world_size * layout.devices_per_rank
    return Prediction(
        cluster,
        devices,
        best.name,
        (rate, rate / high, rate / low),
        estimate.tokens_per_s,
        estimate.memory.reserved,
    )


# ---------------------------------------------------------------------------------------------------------------- to look at


def _table(rows: Sequence[Row]) -> Rows:
    """The measured rows under their head."""
    nodes = any(row.case.nodes for row in rows)
    out = [
        [
            "strategy",
            "nodes × n" if nodes else "n",
            "samples/s",
            "tokens/s",
            "speed-up",
            "eff.",
            "memory",
            "comm.",
            "predicted",
        ]
    ]
    for row in rows:
        base, tokens, memory = _base(rows, row), row.spread("tokens_per_s"), row.spread("memory")
        where, shown = (
            f"{row.case.nodes} × {row.case.nproc}" if nodes else str(row.case.nproc),
            row.spread("samples_per_s"),
        )
        predicted = (
            f"{_figure(row.predicted[1])}–{_figure(row.predicted[2])}" if row.predicted else "–"
        )
        name = row.strategy or row.case.strategy or "config"
        if shown is None:
            out.append([name, where, *["–"] * 6, predicted])
            continue
        gain = row.speed_up(base) if base else None
        share = row.spread("communication")
        out.append(
            [
                name,
                where,
                _spread(shown),
                f"{tokens[0]:,.0f}" if tokens else "–",
                _spread(gain) if gain else "–",
                f"{gain[0] * base.case.world / row.case.world:.0%}" if gain and base else "–",
                size(memory[2]) if memory else "–",
                f"{share[0]:.0%}" if share else "–",
                predicted,
            ]
        )
    return out


def _base(rows: Sequence[Row], row: Row) -> Row | None:
    """The row of the same strategy on the fewest processes."""
    same = [each for each in rows if each.case.strategy == row.case.strategy and each.rounds]
    return min(same, key=lambda each: each.case.world) if same else None


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(of: tuple[float, float, float]) -> str:
    middle, low, high = map(_figure, of)
    return middle if low == high else f"{middle} ({low}–{high})"


def _predicted_table(predictions: Sequence[Prediction]) -> Rows:
    out = [["cluster", "devices", "samples/s", "tokens/s", "a device", "memory", "best plan"]]
    for each in predictions:
        if each.reason:
            out.append([each.cluster, *["–"] * 5, each.reason])
            continue
        middle, low, high = map(_figure, each.samples)
        a_device = _figure(each.tokens / each.devices)
        out.append(
            [
                each.cluster,
                str(each.devices),
                f"{middle} ({low}–{high})",
                f"{each.tokens:,.0f}",
                a_device,
                size(each.memory),
                each.name,
            ]
        )
    return out


def _show(
    config: Path,
    rows: list[Row],
    predictions: list[Prediction],
    options: Options,
    folder: Path,
    loads: list[float],
    console: Console,
) -> None:
    kind = (
        "weak scaling, the batch grows with n"
        if options.weak
        else "strong scaling, one global batch"
    )
    title = f"{config.name}: {kind}"
    tables = [("", _table(rows))]
    lines = [
        f"{row.strategy or row.case.strategy or 'config'} on {row.case.world}: {row.reason}"
        for row in rows
        if row.reason
    ]
    lines.append(
        f"Medians over rounds ({max((len(row.rounds) for row in rows), default=0)}) of {options.steps} steps, each case once a round"
        " (least–most); speed-up and eff. against the same strategy on the fewest processes, round by round; comm.: share of a step that"
        " ranks wait for one another (–: no clock, as in pipelines); predicted: samples/s, the range that the planner gives. Load before"
        f" each round: {', '.join(f'{each:.1f}' for each in loads)}."
    )
    if predictions:
        tables.append(("Predicted, not measured", _predicted_table(predictions)))
        lines.append(
            "Predicted: the planner's best plan for each cluster; nine of ten runs that it had not seen lay within its range."
        )
    for head, table_rows in tables:
        pages.show(console, head or title, table_rows, ("strategy", "cluster", "best plan"))
    for line in lines:
        console.print(line, markup=False)
    as_json = {
        "time": time.time(),
        "config": str(config),
        "options": {name: value for name, value in asdict(options).items() if name != "to"},
        "load": loads,
        "rows": [asdict(row) for row in rows],
        "predicted": [asdict(each) for each in predictions],
    }
    write_whole(folder / MARK, json.dumps(as_json, indent=1) + "\n")
    written = write_pages(
        folder, "bench", title, tables, lines, lambda figure: _draw(figure, rows, title)
    )
    console.print(f"written to {folder}: {written}, {MARK}", markup=False, soft_wrap=True)


def _draw(figure: Any, rows: Sequence[Row], title: str) -> None:
    """Speed-up over processes, a line a strategy, with the ends of the rounds, and what would be ideal."""
    axes = figure.subplots()
    done = [row for row in rows if row.rounds]
    for strategy in dict.fromkeys(row.case.strategy for row in done):
        mine = sorted(
            (row for row in done if row.case.strategy == strategy), key=lambda row: row.case.world
        )
        gains = [(row.case.world, gain) for row in mine if (gain := row.speed_up(mine[0]))]
        worlds, middle = [world for world, _ in gains], [gain[0] for _, gain in gains]
        ends = [[gain[0] - gain[1] for _, gain in gains], [gain[2] - gain[0] for _, gain in gains]]
        axes.errorbar(
            worlds, middle, yerr=ends, marker="o", capsize=3, label=mine[0].strategy or strategy
        )
    worlds = sorted({row.case.world for row in done})
    axes.plot(
        worlds,
        [world / worlds[0] for world in worlds] if worlds else [],
        "--",
        color="grey",
        label="ideal",
    )
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("processes")
    axes.set_ylabel("speed-up")
    axes.set_xticks(worlds)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)

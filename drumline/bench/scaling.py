"""`drumline bench`: measure how a config scales over processes, hosts and strategies.

Each measured case is printed beside what the planner predicts for it.
"""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from drumline.bench import pages
from drumline.bench.file_names import name_of_strategy_folder
from drumline.bench.pages import Rows, claim, write_pages
from drumline.bench.verify import strategy_override
from drumline.config.config import Config
from drumline.config.load import Loaded, Request, override, reader
from drumline.errors import DrumlineError, UserError
from drumline.plan.batch import resolve_batch
from drumline.plan.estimate import Estimate
from drumline.plan.explain import size, strategy_name
from drumline.plan.plan import Plan
from drumline.report.bars import bars
from drumline.system.files import remove, write_whole
from drumline.system.signals import EXIT_TEMPFAIL
from drumline.telemetry.events import Event, Fault, Measured, Step, read

# Steps at the start of a run that are not counted: the first are slower, and one of them is slowed
# down by the tracker of memory and traffic.
WARM_UP_STEPS = 4
# The file that every folder of a bench has; it holds the results as JSON.
MARK = "bench.json"
UNKNOWN = "–"
HEADS = ("samples/s", "tokens/s", "speed-up", "eff.", "memory", "comm.", "predicted")
PREDICTED_HEADS = (
    "cluster",
    "devices",
    "samples/s",
    "tokens/s",
    "a device",
    "memory",
    "best plan",
)
# Columns of text; the others hold numbers.
TEXT_COLUMNS = ("strategy", "cluster", "best plan")


class Spread(NamedTuple):
    """A value within its range: a median with the least and largest value, or a prediction."""

    middle: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread | None:
        """Return the median, the least and the largest value; None if there are no values."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class BenchCase:
    """What is measured: a strategy on a number of processes."""

    # The strategy as on the command line; empty for the config's own.
    strategy: str
    # Number of processes on each host.
    nproc: int
    # Number of hosts; None for this host alone.
    nodes: int | None = None

    @property
    def world(self) -> int:
        """The number of processes on all hosts together."""
        return self.nproc * (self.nodes or 1)

    @property
    def name(self) -> str:
        """The beginning of the names of its rounds' folders, such as `fsdp2-tp2-4`."""
        strategy = self.strategy or "config"
        hosts = ""
        if self.nodes:
            hosts = f"{self.nodes}x"
        return name_of_strategy_folder(f"{strategy}-{hosts}{self.nproc}")


@dataclass(frozen=True)
class Round:
    """What one run of a case measured: medians over its counted steps."""

    samples_per_s: float
    tokens_per_s: float
    # Seconds of a step.
    seconds: float
    # The share of a step in which ranks wait for one another; None if it was not measured.
    communication: float | None
    # Bytes on the fullest device: those that the allocator holds, on a CPU the peak of tensors.
    # None if memory was not measured.
    memory: int | None


@dataclass
class Row:
    """A row of the table: a case with its rounds."""

    case: BenchCase
    rounds: list[Round] = field(default_factory=list)
    # The name of the strategy that the plan has; empty until there is a plan.
    strategy: str = ""
    # Samples/s by the planner; None if it made no prediction.
    predicted: Spread | None = None
    # Why a round failed, after which no more rounds of the case are run; empty if none failed.
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the strategy in tables."""
        return self.strategy or self.case.strategy or "config"

    def spread(self, name: str) -> Spread | None:
        """Return the spread of a field of `Round` over the rounds; None if no round has a value."""
        values = []
        for each in self.rounds:
            value = getattr(each, name)
            if value is not None:
                values.append(value)
        return Spread.from_values(values)

    def speed_up(self, base: Row) -> Spread | None:
        """Return the spread of the ratio of this row's samples/s to those of `base`.

        The rows are compared round by round, since other work on the machine slows down a whole
        round.
        """
        ratios = []
        for mine, other in zip(self.rounds, base.rounds, strict=False):
            ratios.append(mine.samples_per_s / other.samples_per_s)
        return Spread.from_values(ratios)


@dataclass(frozen=True)
class Options:
    """The options of `drumline bench` on the command line."""

    # Numbers of processes on a host; each is a case.
    nproc: tuple[int, ...]
    # Strategies as `fsdp2 tp=2`; empty for the config's own.
    strategies: tuple[str, ...] = ()
    # Numbers of hosts; each is a case. Empty for those of the config.
    nodes: tuple[int, ...] = ()
    # Counted steps of a round.
    steps: int = 20
    rounds: int = 3
    # Whether the global batch grows with the number of processes.
    weak: bool = False
    # Clusters to predict for, without a measurement.
    predict: tuple[str, ...] = ()
    # The folder to write to; None for one below runs/.
    to: Path | None = None


class DoesNotFit(DrumlineError):
    """The error for a case that needs more memory than there is, by its plan."""


@dataclass(frozen=True)
class Settings:
    """What the runs of all cases share."""

    # A function that loads the config with the overrides that it is given.
    read_config: Callable[[list[str]], Loaded]
    # The config without a case's overrides.
    config: Config
    # The overrides on the command line.
    overrides: list[str]
    options: Options
    # Strategy → its overrides.
    strategies: dict[str, list[str]]
    # Number of hosts → its overrides.
    hosts: dict[int, list[str]]
    # The folder of the bench.
    folder: Path
    # Samples of the global batch of the case with the fewest processes.
    samples: int
    # The number of processes of that case.
    fewest_processes: int

    def overrides_of(self, case: BenchCase) -> list[str]:
        """Return all overrides of a run of a case, except for that of its folder."""
        samples = self.samples
        # Weak scaling keeps the number of samples of each process.
        if self.options.weak:
            samples = samples * case.world // self.fewest_processes
        return [
            *self.overrides,
            *self.strategies[case.strategy],
            *_overrides_of_short_run(self.config, case, samples, self.options.steps),
            *self.hosts.get(case.nodes or 0, []),
        ]


def bench(config: Path, overrides: list[str], options: Options) -> int:
    """Measure each case once in each round, print the table and write it; return the exit code.

    The cases take turns, so that other work that slows the machine down for a while disturbs all of
    them.

    The exit code is 0, or 1 if no case ran, or 75 after a signal. Raises ConfigError for a config
    that cannot be loaded, and EnvironmentFault for a folder that holds something else.
    """
    console = Console(highlight=False)
    read_config = reader(config)
    loaded = read_config(overrides)
    hosts = _host_overrides(loaded.config, options)
    strategies: dict[str, list[str]] = {}
    for strategy in options.strategies or ("",):
        strategies[strategy] = []
        # Without a name the config's own is measured, which needs no override.
        if strategy:
            strategies[strategy].append(strategy_override(strategy))
    for strategy_overrides in strategies.values():
        # An unknown strategy ends the bench now. One that does not run is a row with the reason.
        read_config([*overrides, *strategy_overrides])
    cases = _cases(options, list(strategies), list(hosts))
    folder = options.to or Path("runs") / f"{config.stem}-bench"
    is_earlier_bench = claim(folder, MARK, "bench")
    if is_earlier_bench:
        for old in folder.glob("*-round*"):
            remove(old)
    fewest_processes = min(case.world for case in cases)
    samples = resolve_batch(loaded.config, fewest_processes).global_samples
    settings = Settings(
        read_config=read_config,
        config=loaded.config,
        overrides=overrides,
        options=options,
        strategies=strategies,
        hosts=hosts,
        folder=folder,
        samples=samples,
        fewest_processes=fewest_processes,
    )
    rows = [Row(case) for case in cases]
    load_averages: list[float] = []
    code = _measure_rounds(rows, settings, load_averages)
    predictions = []
    if code == 0:
        samples_a_device = 0.0
        if options.weak:
            samples_a_device = samples / fewest_processes
        for cluster in options.predict:
            predictions.append(_predict(config, overrides, cluster, samples_a_device))
    _show(config, rows, predictions, options, folder, load_averages, console)
    if code:
        return EXIT_TEMPFAIL
    has_measured = any(row.rounds for row in rows)
    return int(not has_measured)


def _host_overrides(config: Config, options: Options) -> dict[int, list[str]]:
    """Return number of hosts → the overrides that choose so many.

    It is empty if the launcher starts ranks on this host alone. Raises UserError if --nodes is
    given for such a launcher.
    """
    launcher = config.launch
    if options.nodes and not launcher.number_of_hosts:
        raise UserError(
            f"launch.kind {launcher.kind} starts ranks on this host alone",
            where="--nodes",
            fix="set launch: {kind: ssh, hosts: […]}, slurm or ray in the YAML, or ask the planner: --predict 2x8xh100-80g",
        )
    hosts = {}
    for nodes in options.nodes or (launcher.number_of_hosts,):
        if nodes:
            hosts[nodes] = launcher.overrides_for_hosts(nodes)
    return hosts


def _cases(options: Options, strategies: Sequence[str], hosts: Sequence[int]) -> list[BenchCase]:
    """Return a case for each strategy on each number of hosts and processes."""
    cases = []
    for strategy in strategies:
        for nodes in hosts or (None,):
            for nproc in options.nproc:
                cases.append(BenchCase(strategy, nproc, nodes))
    return cases


def _measure_rounds(rows: Sequence[Row], settings: Settings, load_averages: list[float]) -> int:
    """Measure all rounds, and add their results to `rows`. Return 75 after a signal, else 0.

    Args:
        rows: A row for each case.
        settings: What all runs share.
        load_averages: The load average of this machine before each round is appended: other work
        makes
            the runs slower.
    """
    code = 0
    with bars(Console(stderr=True)) as on_progress:
        for number in range(1, settings.options.rounds + 1):
            load_averages.append(os.getloadavg()[0])
            for done, row in enumerate(rows):
                on_progress(f"round {number}", done, len(rows))
                if row.reason or code:
                    continue
                folder = settings.folder / f"{row.case.name}-round{number}"
                code = _measure(row, settings, folder)
            on_progress(f"round {number}", len(rows), len(rows))
    return code


def _overrides_of_short_run(config: Config, case: BenchCase, samples: int, steps: int) -> list[str]:
    """Return the overrides of a run of a few steps without exports, reports and restarts.

    Args:
        config: The user's config.
        case: What is measured.
        samples: Samples of the global batch.
        steps: The number of counted steps.
    """
    batch = f"global_samples: {samples}"
    micro_batch = config.batch.micro_batch
    if micro_batch:
        # The largest micro-batch up to the user's own that divides the samples of a rank.
        per_rank = max(1, samples // case.world)
        micro_batch = min(micro_batch, per_rank)
        while per_rank % micro_batch != 0:
            micro_batch -= 1
        batch += f", micro_batch: {micro_batch}"
    # Algorithms with rollouts train several steps on each, and a run ends with a whole turn.
    turn = config.algorithm.steps_per_rollout
    turns = math.ceil((WARM_UP_STEPS + steps) / turn)
    return [
        f"batch={{{batch}}}",
        f"run.steps={turn * turns}",
        "run.log_every=1",
        "run.report_to=[]",
        "checkpoint={export: none}",
        "eval={at_start: false}",
        "report.html=false",
        "launch.max_restarts=0",
        f"launch.nproc={case.nproc}",
    ]


def _measure(row: Row, settings: Settings, folder: Path) -> int:
    """Run one round of a case. Add it to the rounds of `row`, or set the row's `reason` if it fails.

    Return 75 after a signal, else 0.
    """
    from drumline.train.command import launch_ranks

    def change_plan(plan: Plan) -> Plan:
        row.strategy = row.case.strategy or strategy_name(plan)
        _note_prediction(row, plan)
        return plan.measurement_plan()

    overrides = [*settings.overrides_of(row.case), override("run.dir", folder)]
    errors = io.StringIO()
    try:
        loaded = settings.read_config(overrides)
        request = Request(loaded, loaded.config.launch.processes())
        with redirect_stderr(errors):
            _, code = launch_ranks(request, display=False, change=change_plan)
    except DrumlineError as error:
        row.reason = error.line()
        return 0
    if code == EXIT_TEMPFAIL:
        return code
    events = read(folder / "events.jsonl")
    measured = None
    if code == 0:
        measured = _summarise(events)
    if measured is None:
        row.reason = _find_failure(events, errors.getvalue(), folder)
    else:
        row.rounds.append(measured)
    return 0


def _note_prediction(row: Row, plan: Plan) -> None:
    """Set the predicted samples/s of a row from its plan.

    Raise DoesNotFit for a plan that needs too much memory.
    """
    estimate = plan.predicted.estimate
    if estimate is None:
        return
    row.predicted = _samples_per_s(plan.batch.global_samples, estimate)
    if estimate.verdict != "no":
        return
    if not estimate.host_fits:
        raise DoesNotFit("does not fit into the memory of its hosts, by its plan")
    needs = f"{size(estimate.memory.reserved)} of {size(estimate.limit)}"
    raise DoesNotFit(f"does not fit: it needs {needs}, by its plan")


def _samples_per_s(samples: int, estimate: Estimate) -> Spread:
    """Return the predicted samples/s and their range. `samples`: samples of a step."""
    rate = samples / estimate.seconds.total
    # Factors by which the seconds of a step may differ from the estimate.
    fastest, slowest = estimate.seconds_range
    return Spread(rate, rate / slowest, rate / fastest)


def _find_failure(events: list[Event], errors: str, folder: Path) -> str:
    """Return why a run measured nothing: its last fault, or else the last error that it printed."""
    faults = [event.error for event in events if isinstance(event, Fault)]
    if faults:
        return faults[-1]
    mark = "error: "
    lines = [line for line in errors.splitlines() if line.startswith(mark)]
    if lines:
        return lines[-1].removeprefix(mark)
    return f"no steps were measured; see {folder}"


def _summarise(events: list[Event]) -> Round | None:
    """Return the medians over the counted steps of a run; None if no step counts."""
    steps = [event for event in events if isinstance(event, Step) and event.step > WARM_UP_STEPS]
    if not steps:
        return None
    return Round(
        samples_per_s=statistics.median(step.samples_per_s for step in steps),
        tokens_per_s=statistics.median(step.tokens_per_s for step in steps),
        seconds=statistics.median(step.seconds for step in steps),
        communication=_share_of_waiting(steps),
        memory=_bytes_of_fullest_device(events),
    )


def _share_of_waiting(steps: list[Step]) -> float | None:
    """Return the share of the steps' seconds in which ranks wait for one another.

    None if it was not measured in any one of the steps.
    """
    seconds = sum(step.seconds for step in steps)
    waited = 0.0
    for step in steps:
        if step.comm_s is None:
            return None
        waited += step.comm_s
    if not seconds:
        return None
    return waited / seconds


def _bytes_of_fullest_device(events: list[Event]) -> int | None:
    """Return the bytes on the fullest device by the last measurement; None without a measurement."""
    last = None
    for event in events:
        if isinstance(event, Measured) and event.metrics.get("memory"):
            last = event.metrics["memory"]
    if last is None:
        return None
    return last.get("reserved", last.get("peak"))


@dataclass(frozen=True)
class Prediction:
    """What the planner predicts for a cluster: its best plan there, or why there is none."""

    # The cluster as on the command line.
    cluster: str
    # Number of devices that the plan uses.
    devices: int = 0
    # Name of the plan.
    name: str = ""
    # Samples/s.
    samples: Spread = Spread(0.0, 0.0, 0.0)
    # Tokens/s.
    tokens: float = 0.0
    # Bytes that a device needs.
    memory: int = 0
    # Why there is no plan; empty if there is one.
    reason: str = ""


def _predict(
    config: Path, overrides: list[str], cluster: str, samples_a_device: float
) -> Prediction:
    """Return what the planner predicts for a cluster.

    Args:
        config: The path of the user's config.
        overrides: The overrides on the command line.
        cluster: The cluster as on the command line.
        samples_a_device: Samples of the global batch for each device under weak scaling; 0 under
            strong scaling.
    """
    from drumline.planner.public import plan

    # These keys of the config are set for this machine, and would restrict the planner.
    all_overrides = [
        *overrides,
        "strategy=auto",
        "launch=local",
        "run.device=auto",
    ]
    try:
        found = plan(config, all_overrides, cluster=cluster)
        if samples_a_device:
            # Only the planner knows how many devices a cluster of this name has.
            world_size = found.answer.question.cluster.world_size
            samples = round(samples_a_device * world_size)
            batch = f"batch={{global_samples: {samples}}}"
            found = plan(config, [*all_overrides, batch], cluster=cluster)
        best = found.best
    except DrumlineError as error:
        return Prediction(cluster, reason=error.line())
    layout = best.candidate.layout
    estimate = best.candidate.estimate
    return Prediction(
        cluster=cluster,
        devices=best.candidate.devices,
        name=best.name,
        samples=_samples_per_s(layout.batch.global_samples, estimate),
        tokens=estimate.tokens_per_s,
        memory=estimate.memory.reserved,
    )


def _measured_table(rows: Sequence[Row]) -> Rows:
    """Return the table of what was measured, with its head as the first row."""
    has_hosts = any(row.case.nodes for row in rows)
    processes_head = "n"
    if has_hosts:
        processes_head = "nodes × n"
    cells = [["strategy", processes_head, *HEADS]]
    for row in rows:
        processes = str(row.case.nproc)
        if has_hosts:
            processes = f"{row.case.nodes} × {processes}"
        predicted = UNKNOWN
        if row.predicted is not None:
            low = _figure(row.predicted.low)
            high = _figure(row.predicted.high)
            predicted = f"{low}–{high}"
        cells.append([row.name, processes, *_measured_cells(row, rows), predicted])
    return cells


def _measured_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the measured cells of a row. `rows`: all rows, among them the base of the speed-up."""
    samples = row.spread("samples_per_s")
    if samples is None:
        return [UNKNOWN] * 6
    tokens_cell = speed_up_cell = efficiency_cell = memory_cell = waiting_cell = UNKNOWN
    tokens = row.spread("tokens_per_s")
    if tokens is not None:
        tokens_cell = f"{tokens.middle:,.0f}"
    base = _smallest_of_strategy(rows, row)
    gain = None
    if base is not None:
        gain = row.speed_up(base)
    if base is not None and gain is not None:
        # The speed-up as a share of the ideal one, in which each process is as fast as in the base.
        efficiency = gain.middle * base.case.world / row.case.world
        speed_up_cell = _describe_spread(gain)
        efficiency_cell = f"{efficiency:.0%}"
    memory = row.spread("memory")
    if memory is not None:
        memory_cell = size(memory.high)
    waiting = row.spread("communication")
    if waiting is not None:
        waiting_cell = f"{waiting.middle:.0%}"
    samples_cell = _describe_spread(samples)
    return [samples_cell, tokens_cell, speed_up_cell, efficiency_cell, memory_cell, waiting_cell]


def _smallest_of_strategy(rows: Sequence[Row], row: Row) -> Row | None:
    """Return the measured row of the same strategy with the fewest processes; None if there is none."""
    same = [each for each in rows if each.case.strategy == row.case.strategy and each.rounds]
    return min(same, key=lambda each: each.case.world, default=None)


def _figure(value: float) -> str:
    """Return a number with three significant digits, or as an integer from 100: 0.123, 12.3, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _describe_spread(spread: Spread) -> str:
    """Return a value with its range as text, such as `12.3 (11.8–12.9)`.

    The range is left out if both of its ends are written the same.
    """
    low = _figure(spread.low)
    high = _figure(spread.high)
    if low == high:
        return _figure(spread.middle)
    return f"{_figure(spread.middle)} ({low}–{high})"


def _predicted_table(predictions: Sequence[Prediction]) -> Rows:
    """Return the table of predictions for other clusters, with its head as the first row."""
    cells = [list(PREDICTED_HEADS)]
    for each in predictions:
        if each.reason:
            cells.append([each.cluster, *[UNKNOWN] * 5, each.reason])
            continue
        samples = each.samples
        ends = f"{_figure(samples.low)}–{_figure(samples.high)}"
        row = [
            each.cluster,
            str(each.devices),
            f"{_figure(samples.middle)} ({ends})",
            f"{each.tokens:,.0f}",
            _figure(each.tokens / each.devices),
            size(each.memory),
            each.name,
        ]
        cells.append(row)
    return cells


def _show(
    config: Path,
    rows: list[Row],
    predictions: list[Prediction],
    options: Options,
    folder: Path,
    load_averages: list[float],
    console: Console,
) -> None:
    """Print the tables with their remarks, and write them as pages with a figure, and as JSON.

    Args:
        config: The path of the user's config.
        rows: What was measured.
        predictions: What is predicted for other clusters.
        options: The options on the command line.
        folder: The folder to write to.
        load_averages: The load average of this machine before each round.
        console: The console to print to.
    """
    kind = "strong scaling, one global batch"
    if options.weak:
        kind = "weak scaling, the batch grows with n"
    title = f"{config.name}: {kind}"
    tables = [("", _measured_table(rows))]
    if predictions:
        tables.append(("Predicted, not measured", _predicted_table(predictions)))
    lines = _remarks(rows, predictions, options, load_averages)
    for head, table_rows in tables:
        pages.show(console, head or title, table_rows, TEXT_COLUMNS)
    for line in lines:
        console.print(line, markup=False)
    values = asdict(options)
    # JSON has no paths, and the file itself is in this folder.
    del values["to"]
    content = {
        "time": time.time(),
        "config": str(config),
        "options": values,
        "load": load_averages,
        "rows": [asdict(row) for row in rows],
        "predicted": [asdict(each) for each in predictions],
    }
    write_whole(folder / MARK, json.dumps(content, indent=1) + "\n")
    written = write_pages(
        folder, "bench", title, tables, lines, lambda figure: _draw(figure, rows, title)
    )
    console.print(f"written to {folder}: {written}, {MARK}", markup=False, soft_wrap=True)


def _remarks(
    rows: Sequence[Row],
    predictions: Sequence[Prediction],
    options: Options,
    load_averages: Sequence[float],
) -> list[str]:
    """Return the lines below the tables: why cases did not run, and what the columns mean."""
    lines = []
    for row in rows:
        if row.reason:
            lines.append(f"{row.name} on {row.case.world}: {row.reason}")
    rounds = max((len(row.rounds) for row in rows), default=0)
    load = ", ".join(f"{each:.1f}" for each in load_averages)
    lines.append(
        f"Medians over rounds ({rounds}) of {options.steps} steps, each case once a round"
        " (least–most); speed-up and eff. against the same strategy on the fewest processes, round by round; comm.: share of a step that"
        " ranks wait for one another (–: no clock, as in pipelines); predicted: samples/s, the range that the planner gives. Load before"
        f" each round: {load}."
    )
    if predictions:
        lines.append(
            "Predicted: the planner's best plan for each cluster; nine of ten runs that it had not seen lay within its range."
        )
    return lines


def _draw(figure: Any, rows: Sequence[Row], title: str) -> None:
    """Draw speed-up against processes: a line with its range for each strategy, and the ideal line."""
    axes = figure.subplots()
    measured = [row for row in rows if row.rounds]
    for strategy in dict.fromkeys(row.case.strategy for row in measured):
        of_strategy = [row for row in measured if row.case.strategy == strategy]
        _draw_strategy(axes, sorted(of_strategy, key=lambda row: row.case.world))
    worlds = sorted({row.case.world for row in measured})
    ideal = [world / worlds[0] for world in worlds]
    axes.plot(worlds, ideal, "--", color="grey", label="ideal")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("processes")
    axes.set_ylabel("speed-up")
    axes.set_xticks(worlds)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _draw_strategy(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the line of one strategy. `rows`: its rows, that with the fewest processes first."""
    worlds = []
    speed_ups = []
    below = []
    above = []
    for row in rows:
        gain = row.speed_up(rows[0])
        if gain is not None:
            worlds.append(row.case.world)
            speed_ups.append(gain.middle)
            below.append(gain.middle - gain.low)
            above.append(gain.high - gain.middle)
    label = rows[0].strategy or rows[0].case.strategy
    axes.errorbar(worlds, speed_ups, yerr=[below, above], marker="o", capsize=3, label=label)

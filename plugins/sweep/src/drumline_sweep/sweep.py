"""`drumline sweep`: train a config with many values, and show which are best.

The values are a grid, drawn at random, or chosen by Optuna. The results are a table, the best first, and
a figure.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.bench import pages
from drumline.bench.pages import claim, write_pages
from drumline.config.config import Config
from drumline.config.load import Loaded, refused
from drumline.config.run import EvalConfig
from drumline.errors import ConfigError, EnvironmentFault, UserError
from drumline.foreign import judged, read_object
from drumline.hardware.detect import detect
from drumline.report.bars import notes
from drumline.system.files import write_whole
from drumline.system.signals import NOTHING_LOST
from drumline_sweep.axes import (
    SEED,
    Axis,
    Point,
    axes_of,
    check,
    folder_name,
    overrides_of,
    points,
    short_names,
)
from drumline_sweep.optuna_study import Study
from drumline_sweep.trials import Outcome, Trial, Trials, outcome

STATE = "sweep.json"
# A key with numbers whose largest is so many times the smallest has a logarithmic axis in the figure.
LOG_AXIS_RATIO = 8
# Characters of a value below the figure.
LONGEST_TICK = 20


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    `random`, `optuna`: how many points; None: the grid. `jobs`: trials at a time. `to`: the folder.
    """

    random: int | None = None
    optuna: int | None = None
    jobs: int | None = None
    slurm: bool = False
    to: Path | None = None
    dry_run: bool = False


class Sweep:
    """What a sweep tries, and where."""

    def __init__(self, config: Path, given: list[str], options: Options) -> None:
        """Read the arguments `key=…`. Raises UserError and its kinds for any mistake in them."""
        if options.random is not None and options.optuna is not None:
            raise UserError(
                "--random and --optuna cannot be combined",
                where="drumline sweep",
                fix="give one of them",
            )
        self.options = options
        self.config = config
        # Overrides of all trials: keys with one value, too.
        self.common: list[str] = []
        if options.slurm:
            self.common += ["launch.kind=slurm", "launch.detach=true"]
        axes = []
        for axis in axes_of(given):
            if len(axis.values) == 1:
                self.common.append(f"{axis.key}={axis.values[0]}")
            else:
                axes.append(axis)
        self.axes = tuple(axes)
        self.loaded: Loaded = check(str(config), self.common, self.axes)
        if not self.axes:
            raise UserError(
                "there is nothing to sweep over",
                where="drumline sweep",
                fix="give a key with values: optimizer.lr=1e-5,3e-5",
            )
        # The axes besides the seed.
        self.searched = tuple(axis for axis in self.axes if axis.key != SEED)
        self.seeds = _seeds(self.axes)
        if not self.searched and (options.random or options.optuna):
            raise UserError(
                "there is nothing to draw but seeds",
                where="drumline sweep",
                fix="give another key with values or a range",
            )
        self.names = short_names(self.axes)
        self.folder = options.to or Path("runs") / f"{config.stem}-sweep"
        self.eval: EvalConfig = self.loaded.config.eval

    def trial(self, point: Point, seed: Point) -> Trial:
        """Return the trial of a point with a seed."""
        whole = (*point, *seed)
        return Trial(whole, self.folder / folder_name(whole, self.names))

    def trials(self, points: Iterable[Point]) -> Iterator[Trial]:
        """Yield the trials of some points, each point with all seeds."""
        for point in points:
            for seed in self.seeds:
                yield self.trial(point, seed)

    def points(self) -> list[Point]:
        """Return the points of the grid, or those drawn at random."""
        if not self.searched:
            return [()]
        number = self.options.random
        found = list(points(self.searched, number, self.loaded.config.run.seed, len(self.seeds)))
        if number is not None and len(found) < number:
            notes([f"--random {number}: there are {len(found)} different points"])
        return found

    def claim(self) -> None:
        """Make the folder, and write what the sweep is of.

        Raises EnvironmentFault for a folder that holds something else, and what `known_names` raises.
        """
        claim(self.folder, STATE, "sweep")
        state = {"config": self.loaded.config.model_dump(mode="json"), "keys": self.known_names()}
        write_whole(self.folder / STATE, json.dumps(state), private=True)

    def known_names(self) -> dict[str, str]:
        """Return the keys by their names in the folders of trials, of this sweep and those before it there.

        Raises ConfigError if earlier sweeps are of another config, or name another key so: then their
        trials are no trials of this one.
        """
        state = self.folder / STATE
        fix = "name another folder with --to"
        own_names = {name: key for key, name in self.names.items()}
        if not state.exists():
            return own_names
        earlier = read_object(state, EnvironmentFault, fix)
        if not earlier:
            return own_names
        with judged("is not of this version", str(state), ConfigError, fix):
            earlier_config = Config.model_validate(earlier.get("config"))
            earlier_names = dict[str, str](earlier.get("keys", {}))
        changes, keys = refused(earlier_config, self.loaded.config, ())
        if keys:
            raise ConfigError(
                f"the sweep there is of another config: {changes}", where=str(self.folder), fix=fix
            )
        for name, key in own_names.items():
            earlier_key = earlier_names.get(name, key)
            if earlier_key != key:
                raise ConfigError(
                    f"the sweep there is of another key: {name}=… is {earlier_key} there, and {key} here",
                    where=str(self.folder),
                    fix=fix,
                )
        return earlier_names | own_names


def _seeds(axes: Sequence[Axis]) -> tuple[Point, ...]:
    """Return the seeds of each point: of the axis `run.seed`, or the config's own."""
    for axis in axes:
        if axis.key != SEED:
            continue
        if not axis.values:
            raise UserError(
                "run.seed has a range",
                where="drumline sweep",
                fix="write seeds out: run.seed=0,1,2",
            )
        return tuple(((SEED, value),) for value in axis.values)
    return ((),)


def sweep(config: Path, given: list[str], options: Options) -> int:
    """Run the trials that have not finished, and show all.

    Returns the exit code: 0, 1 if no trial finished, or 75 after a signal.
    """
    planned = Sweep(config, given, options)
    if options.dry_run:
        return _dry_run(planned)
    trials = Trials(config, planned.common, _jobs(options), options.slurm, _gpus(planned))
    first: list[Trial] = []
    if options.optuna is None:
        first = list(planned.trials(planned.points()))
    planned.claim()
    study = None
    if options.optuna:
        seed = planned.loaded.config.run.seed
        study = Study(planned.folder, planned.searched, options.optuna, planned.eval, seed)
    progress = Progress(planned, first, study)
    signal_number = trials.run(progress.due(), progress.end)
    outcomes = progress.outcomes()
    show(planned, outcomes, Console(highlight=False))
    if signal_number:
        what = "stopped"
        if options.slurm:
            what = "the jobs go on"
        print(f"{what}: the same command goes on with the sweep", file=sys.stderr)
        return NOTHING_LOST
    if any(each.value is not None for each in outcomes):
        return 0
    return 1


def _jobs(options: Options) -> int | None:
    """Return how many trials run at a time; None: all."""
    if options.jobs is not None:
        return options.jobs
    if options.slurm:
        return None
    return 1


def _gpus(planned: Sweep) -> int:
    """Return the number of this machine's GPUs if the trials run on them, else 0."""
    config = planned.loaded.config
    if config.run.device == "cpu" or config.launch.kind != "local" or planned.options.slurm:
        return 0
    return len(detect().devices)


class Progress:
    """The trials of a sweep while it runs.

    `first`: the trials that are known before it begins. `study`: chooses further points.
    """

    def __init__(self, planned: Sweep, first: list[Trial], study: Study | None) -> None:
        self.sweep = planned
        self.first = first
        self.study = study
        self.found: dict[Trial, Outcome] = {}
        # Trials in the order of the results.
        self.listed: dict[Trial, None] = dict.fromkeys(first)

    def due(self) -> Iterator[Trial]:
        """Yield the trials that have not finished."""
        trials: Iterable[Trial] = self.first
        if self.study is not None:
            trials = self.sweep.trials(self.study.points())
        for trial in trials:
            seen = self._outcome(trial)
            if seen.state == "finished" or trial in self.found:
                self._record(trial, seen)
            elif self.study is None or trial not in self.listed:
                self.listed[trial] = None
                yield trial
            self.listed[trial] = None

    def end(self, trial: Trial, code: int) -> None:
        """Record and print the outcome of a trial that has ended with an exit code."""
        seen = outcome(trial, self.sweep.eval, code)
        self._record(trial, seen)
        result = seen.reason or seen.state
        if seen.value is not None:
            result = f"{self.sweep.eval.metric} {seen.value:.4g}"
        print(
            f"[{len(self.found)} of {len(self.listed)}] {trial.folder.name}: {result}",
            file=sys.stderr,
            flush=True,
        )

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all trials."""
        return [self._outcome(trial) for trial in self.listed]

    def _outcome(self, trial: Trial) -> Outcome:
        """Return the outcome of a trial that this sweep has run, or that its folder shows."""
        return self.found.get(trial) or outcome(trial, self.sweep.eval)

    def _record(self, trial: Trial, seen: Outcome) -> None:
        """Keep an outcome, and tell the study what is known of its point."""
        self.found[trial] = seen
        if self.study is not None:
            point = point_of(trial)
            of_point = [self.found.get(each) for each in self.sweep.trials([point])]
            self.study.tell(of_point, point)


def point_of(trial: Trial) -> Point:
    """Return the point of a trial, without its seed."""
    return tuple(pair for pair in trial.point if pair[0] != SEED)


def _dry_run(planned: Sweep) -> int:
    """Print what would run. Returns the exit code."""
    planned.known_names()
    options = planned.options
    if options.optuna is not None:
        print(
            f"{options.optuna} points of Optuna × {len(planned.seeds)} seeds, into {planned.folder}"
        )
        return 0
    trials = list(planned.trials(planned.points()))
    for trial in trials:
        state = outcome(trial, planned.eval).state
        print(f"{state:<12} {' '.join(overrides_of(trial.point))}")
    print(f"{len(trials)} trials, into {planned.folder}")
    return 0


@dataclass(frozen=True)
class Group:
    """The trials of a point, over its seeds."""

    point: Point
    outcomes: tuple[Outcome, ...]

    @property
    def finished(self) -> list[Outcome]:
        """The outcomes that have a value."""
        return [each for each in self.outcomes if each.value is not None]

    @property
    def values(self) -> list[float]:
        """The values of the trials that finished."""
        return [each.value for each in self.outcomes if each.value is not None]

    @property
    def mean(self) -> float:
        """The mean of `values`."""
        return statistics.fmean(self.values)


def groups_of(outcomes: Sequence[Outcome], mode: str) -> list[Group]:
    """Return the points, the best first. Those of which no trial finished are at the end.

    `mode`: min or max, which value is the best.
    """
    by_point: dict[Point, list[Outcome]] = {}
    for each in outcomes:
        by_point.setdefault(point_of(each.trial), []).append(each)
    finished = []
    unfinished = []
    for point, of_point in by_point.items():
        group = Group(point, tuple(of_point))
        if group.values:
            finished.append(group)
        else:
            unfinished.append(group)
    sign = 1
    if mode != "min":
        sign = -1
    finished.sort(key=lambda group: sign * group.mean)
    return finished + unfinished


def rows_of(planned: Sweep, groups: Sequence[Group]) -> list[list[str]]:
    """Return the table: its head, then for each point the values of the keys, the metric, and what it took."""
    has_seeds = len(planned.seeds) > 1
    spread = ["step"]
    if has_seeds:
        spread = ["min to max", "seeds"]
    keys = [planned.names[axis.key] for axis in planned.searched]
    rows = [["", *keys, planned.eval.metric, *spread, "seconds", "tokens/s"]]
    for number, group in enumerate(groups, start=1):
        given = [value for _, value in group.point]
        if not group.values:
            empty = [""] * len(spread)
            rows.append(["–", *given, group.outcomes[0].state, *empty, "", ""])
            continue
        if has_seeds:
            extremes = f"{min(group.values):.4g} to {max(group.values):.4g}"
            beside = [extremes, f"{len(group.values)} of {len(group.outcomes)}"]
        else:
            beside = [str(group.finished[0].at)]
        seconds = statistics.fmean(each.seconds for each in group.finished)
        speed = _mean_speed(group)
        rows.append([str(number), *given, f"{group.mean:.4g}", *beside, f"{seconds:.0f}", speed])
    return rows


def _mean_speed(group: Group) -> str:
    """Return the mean tokens per second of the trials that finished, as a text."""
    speeds = [each.tokens_per_s for each in group.finished if each.tokens_per_s is not None]
    if not speeds:
        return "–"
    return f"{statistics.fmean(speeds):,.0f}"


def show(planned: Sweep, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, and write it with its figure into the sweep's folder."""
    options = planned.eval
    groups = groups_of(outcomes, options.mode)
    rows = rows_of(planned, groups)
    better = "higher"
    if options.mode == "min":
        better = "lower"
    title = f"{options.metric} ({better} is better), {planned.config.name}"
    pages.show(console, title, rows, [planned.names[axis.key] for axis in planned.searched])
    failed = []
    for each in outcomes:
        if each.value is None and each.state != "not started":
            failed.append(f"{each.trial.folder.name}: {each.reason or each.state}")
    for line in failed:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if groups and groups[0].values:
        best = groups[0]
        what = " ".join(overrides_of(best.point)) or "the config"
        folder = _best_trial(best, options.mode).folder
        console.print(f"best: {what} in {folder}", markup=False, soft_wrap=True)
    results = json.dumps([_as_json(each) for each in outcomes], indent=1)
    write_whole(planned.folder / "results.json", results)

    def draw_groups(figure: Any) -> None:
        draw(figure, planned, groups)

    written = write_pages(
        planned.folder, "sweep", f"Sweep of {title}", [("", rows)], failed, draw_groups
    )
    console.print(
        f"written to {planned.folder}: {written}, results.json", markup=False, soft_wrap=True
    )


def _best_trial(group: Group, mode: str) -> Trial:
    """Return the trial of a group with the best value."""

    def value(finished: Outcome) -> float:
        assert finished.value is not None
        return finished.value

    if mode == "min":
        return min(group.finished, key=value).trial
    return max(group.finished, key=value).trial


def _as_json(each: Outcome) -> dict[str, Any]:
    """Return an outcome as a dictionary for results.json."""
    own = {name: value for name, value in vars(each).items() if name != "trial"}
    return {"run": str(each.trial.folder), "overrides": dict(each.trial.point), **own}


def draw(figure: Any, planned: Sweep, groups: Sequence[Group]) -> None:
    """Draw the metric over each key: a point a trial, and a line through their means."""
    axes = planned.searched or planned.axes
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        _draw_panel(panel, axis, groups, planned)
    panels[0].set_ylabel(planned.eval.metric)


def _draw_panel(panel: Any, axis: Axis, groups: Sequence[Group], planned: Sweep) -> None:
    """Draw the metric over one key into a panel of matplotlib."""
    by_text: dict[str, list[float]] = {}
    texts = []
    values = []
    for group in groups:
        for each in group.outcomes:
            if each.value is not None:
                text = dict(each.trial.point)[axis.key]
                texts.append(text)
                values.append(each.value)
                by_text.setdefault(text, []).append(each.value)
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        numbers = {text: float(place) for place, text in enumerate(axis.values)}
        ticks = [text[:LONGEST_TICK] for text in axis.values]
        panel.set_xticks(range(len(ticks)), ticks, rotation=20, ha="right")
    else:
        if _needs_log_axis(numbers.values()):
            panel.set_xscale("log")
    panel.plot([numbers[text] for text in texts], values, "o", alpha=0.6)
    means = sorted((numbers[text], statistics.fmean(each)) for text, each in by_text.items())
    panel.plot(
        [number for number, _ in means],
        [mean for _, mean in means],
        "-",
        color="black",
        linewidth=1,
    )
    panel.set_xlabel(planned.names[axis.key])
    panel.grid(alpha=0.3)


def _needs_log_axis(numbers: Collection[float]) -> bool:
    """Return whether numbers are so far apart that they are drawn on a logarithmic axis."""
    if not numbers or min(numbers) <= 0:
        return False
    return max(numbers) >= LOG_AXIS_RATIO * min(numbers)

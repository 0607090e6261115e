"""`drumline sweep`: a config with many values, as a grid, drawn at random, or by Optuna; its table, the best first, and its figure."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from drumline.bench import pages
from drumline.bench.axes import (
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
from drumline.bench.optuna_study import Study
from drumline.bench.pages import claim, write_pages
from drumline.bench.trials import Outcome, Trial, Trials, outcome
from drumline.core.config import Config
from drumline.core.files import write_whole
from drumline.core.load import Loaded, refused
from drumline.core.run import EvalConfig
from drumline.core.signals import NOTHING_LOST
from drumline.errors import ConfigError, EnvironmentFault, UserError
from drumline.foreign import judged, read_object
from drumline.hardware.detect import detect
from drumline.report.bars import notes

STATE = "sweep.json"


@dataclass(frozen=True)
class Options:
    """`random`, `optuna`: how many points; None: the grid. `jobs`: trials at a time. `to`: the folder."""

    random: int | None = None
    optuna: int | None = None
    jobs: int | None = None
    slurm: bool = False
    to: Path | None = None
    dry_run: bool = False


class Sweep:
    """The trials of a sweep in its folder."""

    def __init__(self, config: Path, given: list[str], options: Options) -> None:
        """Raises UserError and its kinds for whatever is wrong of it, before anything is started."""
        if options.random is not None and options.optuna is not None:
            raise UserError(
                "--random and --optuna cannot be combined",
                where="drumline sweep",
                fix="give one of them",
            )
        axes = axes_of(given)
        self.options, self.config = options, config
        job = ["launch.kind=slurm", "launch.detach=true"] * options.slurm
        self.common = [
            *job,
            *(f"{axis.key}={axis.values[0]}" for axis in axes if len(axis.values) == 1),
        ]
        self.axes = tuple(axis for axis in axes if len(axis.values) != 1)
        self.loaded: Loaded = check(str(config), self.common, self.axes)
        if not self.axes:
            raise UserError(
                "there is nothing to sweep over",
                where="drumline sweep",
                fix="give a key with values: optimizer.lr=1e-5,3e-5",
            )
        seeds = next((axis for axis in self.axes if axis.key == SEED), None)
        if seeds is not None and not seeds.values:
            raise UserError(
                "run.seed has a range",
                where="drumline sweep",
                fix="write seeds out: run.seed=0,1,2",
            )
        self.searched = tuple(axis for axis in self.axes if axis is not seeds)
        if not self.searched and (options.random or options.optuna):
            raise UserError(
                "there is nothing to draw but seeds",
                where="drumline sweep",
                fix="give another key with values or a range",
            )
        self.seeds: tuple[Point, ...] = (
            tuple(((SEED, value),) for value in seeds.values) if seeds else ((),)
        )
        self.names = short_names(self.axes)
        self.folder = options.to or Path("runs") / f"{config.stem}-sweep"
        self.eval: EvalConfig = self.loaded.config.eval

    def trial(self, point: Point, seed: Point) -> Trial:
        return Trial((*point, *seed), self.folder / folder_name((*point, *seed), self.names))

    def points(self) -> list[Point]:
        if not self.searched:
            return [()]
        number = self.options.random
        found = list(points(self.searched, number, self.loaded.config.run.seed, len(self.seeds)))
        notes(
            [f"--random {number}: there are {len(found)} different points"]
            * (number is not None and len(found) < number)
        )
        return found

    def claim(self) -> None:
        """Make the folder. Raises EnvironmentFault for one that holds something else; as `known`."""
        claim(self.folder, STATE, "sweep")
        state = {"config": self.loaded.config.model_dump(mode="json"), "keys": self.known()}
        write_whole(self.folder / STATE, json.dumps(state), private=True)

    def known(self) -> dict[str, str]:
        """Name in the folders of trials → key, of this sweep and those before it there. Raises ConfigError where they are of another
        config, or name another key so: their trials are no trials of this one."""
        state, fix = self.folder / STATE, "name another folder with --to"
        of = {name: key for key, name in self.names.items()}
        if not state.exists() or not (known := read_object(state, EnvironmentFault, fix)):
            return of
        with judged("is not of this version", str(state), ConfigError, fix):
            old, before = (
                Config.model_validate(known.get("config")),
                dict[str, str](known.get("keys", {})),
            )
        changes, keys = refused(old, self.loaded.config, ())
        if keys:
            raise ConfigError(
                f"the sweep there is of another config: {changes}", where=str(self.folder), fix=fix
            )
        if differing := [
            f"{name}=… is {before[name]} there, and {key} here"
            for name, key in of.items()
            if before.get(name, key) != key
        ]:
            raise ConfigError(
                f"the sweep there is of another key: {differing[0]}",
                where=str(self.folder),
                fix=fix,
            )
        return before | of


def sweep(config: Path, given: list[str], options: Options) -> int:
    """Run what has not finished, and show all. Returns 0, 1 where no trial finished, or 75 after a signal."""
    made, console = Sweep(config, given, options), Console(highlight=False)
    if options.dry_run:
        return _dry_run(made)
    here = made.loaded.config.run.device != "cpu" and made.loaded.config.launch.kind == "local"
    jobs = options.jobs if options.jobs is not None else None if options.slurm else 1
    trials = Trials(
        config,
        made.common,
        jobs,
        options.slurm,
        len(detect().devices) if here and not options.slurm else 0,
    )
    first = (
        []
        if options.optuna is not None
        else [made.trial(point, seed) for point in made.points() for seed in made.seeds]
    )
    made.claim()
    study = (
        Study(made.folder, made.searched, options.optuna, made.eval, made.loaded.config.run.seed)
        if options.optuna
        else None
    )
    found: dict[Trial, Outcome] = {}
    listed: dict[Trial, None] = dict.fromkeys(first)  # in their order

    def tell(trial: Trial, seen: Outcome) -> None:
        found[trial] = seen
        if study is not None:
            study.tell(
                [found.get(made.trial(point_of(trial), seed)) for seed in made.seeds],
                point_of(trial),
            )

    def ended(trial: Trial, code: int) -> None:
        seen = outcome(trial, made.eval, code)
        tell(trial, seen)
        value = (
            seen.reason or seen.state
            if seen.value is None
            else f"{made.eval.metric} {seen.value:.4g}"
        )
        print(
            f"[{len(found)} of {len(listed)}] {trial.folder.name}: {value}",
            file=sys.stderr,
            flush=True,
        )

    def due() -> Iterator[Trial]:
        for trial in (
            first
            if study is None
            else (made.trial(point, seed) for point in study.points() for seed in made.seeds)
        ):
            seen = found.get(trial) or outcome(trial, made.eval)
            if seen.state == "finished" or trial in found:
                tell(trial, seen)
            elif study is None or trial not in listed:
                listed[trial] = None
                yield trial
            listed[trial] = None

    number = trials.run(due(), ended)
    outcomes = [found.get(trial) or outcome(trial, made.eval) for trial in listed]
    show(made, outcomes, console)
    if number:
        print(
            f"{'the jobs go on' if options.slurm else 'stopped'}: the same command goes on with the sweep",
            file=sys.stderr,
        )
        return NOTHING_LOST
    return int(not any(each.value is not None for each in outcomes))


def point_of(trial: Trial) -> Point:
    """The point of a trial, without its seed."""
    return tuple(pair for pair in trial.point if pair[0] != SEED)


def _dry_run(made: Sweep) -> int:
    """Print what would run."""
    made.known()
    if made.options.optuna is not None:
        print(
            f"{made.options.optuna} points of Optuna × {len(made.seeds)} seeds, into {made.folder}"
        )
        return 0
    trials = [made.trial(point, seed) for point in made.points() for seed in made.seeds]
    for trial in trials:
        print(f"{outcome(trial, made.eval).state:<12} {' '.join(overrides_of(trial.point))}")
    print(f"{len(trials)} trials, into {made.folder}")
    return 0


@dataclass(frozen=True)
class Group:
    """The trials of a point, over its seeds; `values` of those that finished."""

    point: Point
    outcomes: tuple[Outcome, ...]

    @property
    def values(self) -> list[float]:
        return [each.value for each in self.outcomes if each.value is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def groups_of(outcomes: Sequence[Outcome], mode: str) -> list[Group]:
    """The best first; those of which no trial finished at the end."""
    by_point: dict[Point, list[Outcome]] = {}
    for each in outcomes:
        by_point.setdefault(point_of(each.trial), []).append(each)
    groups = [Group(point, tuple(each)) for point, each in by_point.items()]
    sign = 1 if mode == "min" else -1
    return sorted(
        groups, key=lambda group: (not group.values, sign * group.mean if group.values else 0.0)
    )


def rows_of(made: Sweep, groups: Sequence[Group]) -> list[list[str]]:
    """The table: the keys, the metric, where it was, what it took."""
    seeds = len(made.seeds) > 1
    spread = ["min to max", "seeds"] if seeds else ["step"]
    rows = [
        [
            "",
            *(made.names[axis.key] for axis in made.searched),
            made.eval.metric,
            *spread,
            "seconds",
            "tokens/s",
        ]
    ]
    for number, group in enumerate(groups, start=1):
        values, done = group.values, [each for each in group.outcomes if each.value is not None]
        given = [value for _, value in group.point]
        if not values:
            rows.append(["–", *given, group.outcomes[0].state, *[""] * len(spread), "", ""])
            continue
        beside = (
            [f"{min(values):.4g} to {max(values):.4g}", f"{len(values)} of {len(group.outcomes)}"]
            if seeds
            else [str(done[0].at)]
        )
        seconds = statistics.fmean(each.seconds for each in done)
        speed = [each.tokens_per_s for each in done if each.tokens_per_s is not None]
        rows.append(
            [
                str(number),
                *given,
                f"{group.mean:.4g}",
                *beside,
                f"{seconds:.0f}",
                f"{statistics.fmean(speed):,.0f}" if speed else "–",
            ]
        )
    return rows


def show(made: Sweep, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, and write it with its figure into the sweep's folder."""
    options = made.eval
    groups = groups_of(outcomes, options.mode)
    rows = rows_of(made, groups)
    title = f"{options.metric} ({'lower' if options.mode == 'min' else 'higher'} is better), {made.config.name}"
    pages.show(console, title, rows, [made.names[axis.key] for axis in made.searched])
    failed = [
        f"{each.trial.folder.name}: {each.reason or each.state}"
        for each in outcomes
        if each.value is None and each.state != "not started"
    ]
    for line in failed:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    best = next(iter(groups), None)
    if best is not None and best.values:
        first = min(
            best.outcomes,
            key=lambda each: (
                each.value is None,
                each.value if options.mode == "min" else -(each.value or 0),
            ),
        )
        console.print(
            f"best: {' '.join(overrides_of(best.point)) or 'the config'} in {first.trial.folder}",
            markup=False,
            soft_wrap=True,
        )
    write_whole(
        made.folder / "results.json", json.dumps([_as_json(each) for each in outcomes], indent=1)
    )
    written = write_pages(
        made.folder,
        "sweep",
        f"Sweep of {title}",
        [("", rows)],
        failed,
        lambda figure: draw(figure, made, groups),
    )
    console.print(
        f"written to {made.folder}: {written}, results.json", markup=False, soft_wrap=True
    )


def _as_json(each: Outcome) -> dict[str, Any]:
    own = {name: value for name, value in vars(each).items() if name != "trial"}
    return {"run": str(each.trial.folder), "overrides": dict(each.trial.point), **own}


def draw(figure: Any, made: Sweep, groups: Sequence[Group]) -> None:
    """The metric over each key: a point a trial, their mean as a line where the key is a number."""
    done = [group for group in groups if group.values]
    axes = made.searched or made.axes
    for place, (panel, axis) in enumerate(
        zip(figure.subplots(1, len(axes), sharey=True, squeeze=False)[0], axes, strict=True)
    ):
        _panel(panel, axis, done, made)
        if place == 0:
            panel.set_ylabel(made.eval.metric)


def _panel(panel: Any, axis: Axis, done: Sequence[Group], made: Sweep) -> None:
    seen = [
        (dict(each.trial.point)[axis.key], each.value)
        for group in done
        for each in group.outcomes
        if each.value is not None
    ]
    try:
        numbers: dict[str, float] = {text: float(text) for text, _ in seen}
    except ValueError:
        texts = list(axis.values)
        numbers = {text: float(place) for place, text in enumerate(texts)}
        panel.set_xticks(range(len(texts)), [text[:20] for text in texts], rotation=20, ha="right")
    else:
        if (
            numbers
            and min(numbers.values()) > 0
            and max(numbers.values()) >= 8 * min(numbers.values())
        ):
            panel.set_xscale("log")
    panel.plot([numbers[text] for text, _ in seen], [value for _, value in seen], "o", alpha=0.6)
    means = sorted(
        (numbers[text], statistics.fmean(v for t, v in seen if t == text))
        for text in {text for text, _ in seen}
    )
    panel.plot([x for x, _ in means], [y for _, y in means], "-", color="black", linewidth=1)
    panel.set_xlabel(made.names[axis.key])
    panel.grid(alpha=0.3)

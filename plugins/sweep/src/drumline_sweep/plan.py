"""What a sweep tries, and in which folder: its axes, points, seeds and trials."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.bench.pages import claim
from drumline.config.config import Config
from drumline.config.load import Loaded, refused_changes
from drumline.config.run import EvalConfig
from drumline.errors import ConfigError, EnvironmentFault, UserError
from drumline.foreign import read_object, translate_exceptions
from drumline.report.bars import notes
from drumline.system.files import write_whole
from drumline_sweep.axes import (
    SEED,
    Axis,
    Point,
    axes_of,
    check,
    folder_name,
    points,
    short_names,
)
from drumline_sweep.trials import Trial

STATE = "sweep.json"
COMMAND = "drumline sweep"
FIX = "name another folder with --to"


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
                where=COMMAND,
                fix="give one of them",
            )
        self.options = options
        self.config = config
        # Overrides of all trials: keys with one value, too.
        self.common: list[str] = []
        if options.slurm:
            self.common += ["launch.kind=slurm", "launch.detach=true"]
        self.axes: list[Axis] = []
        # The axes besides the seed.
        self.searched: list[Axis] = []
        self._sort_axes(given)
        self.loaded: Loaded = check(str(config), self.common, self.axes)
        self.eval: EvalConfig = self.loaded.config.eval
        self._require_axes()
        self.seeds = _seeds(self.axes)
        self.names = short_names(self.axes)
        self.folder = Path("runs") / f"{config.stem}-sweep"
        if options.to is not None:
            self.folder = options.to

    def _sort_axes(self, given: list[str]) -> None:
        """Sort the arguments into overrides of all trials, and axes."""
        for axis in axes_of(given):
            if len(axis.values) == 1:
                self.common.append(f"{axis.key}={axis.values[0]}")
                continue
            self.axes.append(axis)
            if axis.key != SEED:
                self.searched.append(axis)

    def _require_axes(self) -> None:
        """Raise UserError if there is nothing to try, or nothing to draw."""
        if not self.axes:
            raise UserError(
                "there is nothing to sweep over",
                where=COMMAND,
                fix="give a key with values: optimizer.lr=1e-5,3e-5",
            )
        draws = self.options.random or self.options.optuna
        if draws and not self.searched:
            raise UserError(
                "there is nothing to draw but seeds",
                where=COMMAND,
                fix="give another key with values or a range",
            )

    def trial(self, point: Point, seed: Point) -> Trial:
        """Return the trial of a point with a seed."""
        whole = (*point, *seed)
        name = folder_name(whole, self.names)
        return Trial(whole, self.folder / name)

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
        seed = self.loaded.config.run.seed
        seeds = len(self.seeds)
        found = list(points(self.searched, number, seed, seeds))
        if number is not None and len(found) < number:
            notes([f"--random {number}: there are {len(found)} different points"])
        return found

    def claim(self) -> None:
        """Make the folder, and write what the sweep is of.

        Raises EnvironmentFault for a folder that holds something else, and what `known_names`
        raises.
        """
        claim(self.folder, STATE, "sweep")
        config = self.loaded.config.model_dump(mode="json")
        state = {"config": config, "keys": self.known_names()}
        write_whole(self.folder / STATE, json.dumps(state), private=True)

    def known_names(self) -> dict[str, str]:
        """Return the keys by their names in the folders of trials.

        They are of this sweep and of those before it in its folder. Raises ConfigError if earlier
        sweeps are of another config, or name another key so: then their trials are no trials of
        this one.
        """
        own_names = {name: key for key, name in self.names.items()}
        state = self.folder / STATE
        if not state.exists():
            return own_names
        earlier = read_object(state, EnvironmentFault, FIX)
        if not earlier:
            return own_names
        with translate_exceptions("is not of this version", str(state), ConfigError, FIX):
            config = Config.model_validate(earlier.get("config"))
            names = dict[str, str](earlier.get("keys", {}))
        self._refuse_other_config(config)
        self._refuse_other_keys(names, own_names)
        return names | own_names

    def _refuse_other_config(self, earlier: Config) -> None:
        """Raise ConfigError if the earlier sweep in the folder is of another config."""
        changes = refused_changes(earlier, self.loaded.config, ())
        if changes.keys:
            raise ConfigError(
                f"the sweep there is of another config: {changes.description}",
                where=str(self.folder),
                fix=FIX,
            )

    def _refuse_other_keys(
        self,
        earlier_names: dict[str, str],
        own_names: dict[str, str],
    ) -> None:
        """Raise ConfigError if a name in the folder stands for another key than here."""
        for name, key in own_names.items():
            earlier_key = earlier_names.get(name, key)
            if earlier_key != key:
                there = f"{name}=… is {earlier_key} there, and {key} here"
                raise ConfigError(
                    f"the sweep there is of another key: {there}",
                    where=str(self.folder),
                    fix=FIX,
                )


def _seeds(axes: Sequence[Axis]) -> list[Point]:
    """Return the seeds of each point: of the axis `run.seed`, or the config's own."""
    for axis in axes:
        if axis.key != SEED:
            continue
        if not axis.values:
            raise UserError(
                "run.seed has a range",
                where=COMMAND,
                fix="write seeds out: run.seed=0,1,2",
            )
        return [((SEED, value),) for value in axis.values]
    return [()]

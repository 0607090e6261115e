"""Points that Optuna chooses.

Its study is kept in the sweep's folder, so a sweep that was stopped goes on from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drumline.config.run import EvalConfig
from drumline.errors import ConfigError, EnvironmentFault
from drumline.foreign import translate_exceptions
from drumline_sweep.axes import Axis, Point
from drumline_sweep.trials import Outcome

FILE = "optuna.log"
OTHER_STUDY = "the study there is of other keys or values"
FIX = "name another folder with --to"


class Study:
    """The study of a sweep: it chooses points and learns from their results."""

    def __init__(
        self,
        folder: Path,
        axes: Sequence[Axis],
        number: int,
        options: EvalConfig,
        seed: int,
    ) -> None:
        """Open the study in a folder, or begin one. `number`: of points altogether.

        Raises EnvironmentFault without Optuna, ConfigError for a study that cannot be read.
        """
        self.optuna = _import_optuna()
        self.axes = axes
        self.number = number
        # Point → the numbers of its trials in the study, which may choose it twice.
        self.numbers: dict[Point, list[int]] = {}
        direction = "maximize"
        if options.mode == "min":
            direction = "minimize"
        self.study = self._open(folder, direction)
        # Not the seed alone: a sweep that goes on would draw what it has drawn.
        trials_before = len(self._trials())
        sampler = self.optuna.samplers.TPESampler(seed=seed + trials_before)
        self.study.sampler = sampler

    def _open(self, folder: Path, direction: str) -> Any:
        """Return Optuna's study in a folder. Raises ConfigError if it cannot be read."""
        storages = self.optuna.storages
        file = str(folder / FILE)
        with translate_exceptions("the study there cannot be read", file, ConfigError, FIX):
            journal = storages.journal.JournalFileBackend(file)
            return self.optuna.create_study(
                study_name="sweep",
                storage=storages.JournalStorage(journal),
                direction=direction,
                load_if_exists=True,
            )

    def _trials(self) -> list[Any]:
        """Return the trials that the study knows."""
        trials: list[Any] = self.study.get_trials(deepcopy=False)
        return trials

    def points(self) -> Iterator[Point]:
        """Yield the points that an earlier sweep began or finished, then new ones.

        The study chooses the new ones by the results so far. Raises ConfigError for a study of
        other keys or values.
        """
        known = []
        for trial in self._trials():
            known.append(self._point(trial.params, trial.number))
        yield from known
        distributions = {}
        for axis in self.axes:
            distributions[axis.key] = self._distribution(axis)
        for _ in range(self.number - len(known)):
            with translate_exceptions(OTHER_STUDY, FILE, ConfigError, FIX):
                new = self.study.ask(distributions)
            yield self._point(new.params, new.number)

    def _point(self, params: dict[str, Any], number: int) -> Point:
        """Return the point of the study's trial `number`, and note the number.

        `params`: key → value. Raises ConfigError if they are not of this sweep's keys and values.
        """
        keys = [axis.key for axis in self.axes]
        if set(params) != set(keys):
            raise ConfigError(OTHER_STUDY, where=FILE, fix=FIX)
        pairs = []
        for axis in self.axes:
            value = str(params[axis.key])
            if axis.values and value not in axis.values:
                raise ConfigError(OTHER_STUDY, where=FILE, fix=FIX)
            pairs.append((axis.key, value))
        point = tuple(pairs)
        self.numbers.setdefault(point, []).append(number)
        return point

    def _distribution(self, axis: Axis) -> Any:
        """Return what Optuna draws the values of an axis from."""
        kinds = self.optuna.distributions
        if axis.values:
            return kinds.CategoricalDistribution(axis.values)
        if axis.whole:
            low = int(axis.low)
            high = int(axis.high)
            return kinds.IntDistribution(low, high, log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def tell(self, outcomes: Sequence[Outcome | None], point: Point) -> None:
        """Tell the study the mean over the seeds of a point, once all its trials have ended.

        It is a failure if one of them has no value.
        """
        values = []
        for each in outcomes:
            if each is None or each.state == "preempted":
                return
            if each.value is not None:
                values.append(each.value)
        has_failed = len(values) < len(outcomes)
        known = self._trials()
        for number in self.numbers[point]:
            if known[number].state.is_finished():
                continue
            if has_failed:
                failure = self.optuna.trial.TrialState.FAIL
                self.study.tell(number, state=failure)
            else:
                mean = statistics.fmean(values)
                self.study.tell(number, mean)


def _import_optuna() -> Any:
    """Return the module optuna. Raises EnvironmentFault if it is not installed."""
    try:
        import optuna
        import optuna.storages.journal
    except ImportError:
        raise EnvironmentFault(
            "the package optuna is missing",
            where="--optuna",
            fix="pip install 'drumline-sweep[optuna]'",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

"""Points that Optuna chooses.

Its study is kept in the sweep's folder, so a sweep that was stopped goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from drumline.config.run import EvalConfig
from drumline.errors import ConfigError, EnvironmentFault
from drumline.foreign import judged
from drumline_sweep.axes import Axis, Point
from drumline_sweep.trials import Outcome

FILE = "optuna.log"
OTHER_STUDY = "the study there is of other keys or values"
FIX = "name another folder with --to"


class Study:
    """The study of a sweep: it chooses points and learns from their results."""

    def __init__(
        self, folder: Path, axes: Sequence[Axis], number: int, options: EvalConfig, seed: int
    ) -> None:
        """Open the study in a folder, or begin one. `number`: of points altogether.

        Raises EnvironmentFault without Optuna, ConfigError for a study that cannot be read.
        """
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise EnvironmentFault(
                "the package optuna is missing", where="--optuna", fix="pip install optuna"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna
        self.axes = axes
        self.number = number
        # Point → the numbers of its trials in the study, which may choose it twice.
        self.numbers: dict[Point, list[int]] = {}
        direction: Literal["minimize", "maximize"] = "maximize"
        if options.mode == "min":
            direction = "minimize"
        file = str(folder / FILE)
        with judged("the study there cannot be read", file, ConfigError, FIX):
            self.study = optuna.create_study(
                study_name="sweep",
                storage=JournalStorage(JournalFileBackend(file)),
                direction=direction,
                load_if_exists=True,
            )
        # Not the seed alone: a sweep that goes on would draw what it has drawn.
        trials_before = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = optuna.samplers.TPESampler(seed=seed + trials_before)

    def points(self) -> Iterator[Point]:
        """Yield the points that an earlier sweep began or finished, then new ones.

        The study chooses the new ones by the results so far. Raises ConfigError for a study of other keys
        or values.
        """
        known = []
        for trial in self.study.get_trials(deepcopy=False):
            known.append(self._point(trial.params, trial.number))
        yield from known
        for _ in range(self.number - len(known)):
            with judged(OTHER_STUDY, FILE, ConfigError, FIX):
                new = self.study.ask({axis.key: self._distribution(axis) for axis in self.axes})
            yield self._point(new.params, new.number)

    def _point(self, params: dict[str, Any], number: int) -> Point:
        """Return the point of the study's trial `number`, and note the number."""
        if params.keys() != {axis.key for axis in self.axes}:
            raise ConfigError(OTHER_STUDY, where=FILE, fix=FIX)
        point = tuple((axis.key, str(params[axis.key])) for axis in self.axes)
        for axis, (_, value) in zip(self.axes, point, strict=True):
            if axis.values and value not in axis.values:
                raise ConfigError(OTHER_STUDY, where=FILE, fix=FIX)
        self.numbers.setdefault(point, []).append(number)
        return point

    def _distribution(self, axis: Axis) -> Any:
        """Return what Optuna draws the values of an axis from."""
        kinds = self.optuna.distributions
        if axis.values:
            return kinds.CategoricalDistribution(axis.values)
        if axis.whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def tell(self, outcomes: Sequence[Outcome | None], point: Point) -> None:
        """Tell the study the mean over the seeds of a point, once all its trials have ended.

        It is a failure if one of them has no value.
        """
        ended = [each for each in outcomes if each is not None]
        if len(ended) < len(outcomes) or any(each.state == "preempted" for each in ended):
            return
        values = [each.value for each in ended if each.value is not None]
        known = self.study.get_trials(deepcopy=False)
        for number in self.numbers[point]:
            if known[number].state.is_finished():
                continue
            if len(values) == len(ended):
                self.study.tell(number, sum(values) / len(values))
            else:
                self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)

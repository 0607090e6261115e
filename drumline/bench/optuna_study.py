"""Points that Optuna chooses, kept in the sweep's folder: a sweep goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drumline.bench.axes import Axis, Point
from drumline.bench.trials import Outcome
from drumline.core.run import EvalConfig
from drumline.errors import ConfigError, EnvironmentFault
from drumline.foreign import judged

FILE = "optuna.log"


class Study:
    def __init__(
        self, folder: Path, axes: Sequence[Axis], number: int, options: EvalConfig, seed: int
    ) -> None:
        """Raises EnvironmentFault without Optuna, and ConfigError for a study of something else."""
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise EnvironmentFault(
                "the package optuna is missing", where="--optuna", fix="pip install optuna"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.axes, self.number = optuna, axes, number
        self.numbers: dict[
            Point, list[int]
        ] = {}  # point → the numbers of its trials in the study, which may choose it twice
        with judged(
            "the study there cannot be read",
            str(folder / FILE),
            ConfigError,
            "name another folder with --to",
        ):
            self.study = optuna.create_study(
                study_name="sweep",
                storage=JournalStorage(JournalFileBackend(str(folder / FILE))),
                direction="minimize" if options.mode == "min" else "maximize",
                load_if_exists=True,
            )
        # Not the seed alone: a sweep that goes on would draw what it has drawn.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=seed + len(self.study.get_trials(deepcopy=False))
        )

    def points(self) -> Iterator[Point]:
        """First those that an earlier sweep began or finished, then new ones, which the study chooses by the results so far."""
        known = [
            self._point(trial.params, trial.number)
            for trial in self.study.get_trials(deepcopy=False)
        ]
        yield from known
        for _ in range(self.number - len(known)):
            with judged(
                "the study there is of other keys or values",
                str(FILE),
                ConfigError,
                "name another folder with --to",
            ):
                trial = self.study.ask({axis.key: self._distribution(axis) for axis in self.axes})
            yield self._point(trial.params, trial.number)

    def _point(self, params: dict[str, Any], number: int) -> Point:
        same = params.keys() == {axis.key for axis in self.axes}
        if not same or any(
            axis.values and str(params[axis.key]) not in axis.values for axis in self.axes
        ):
            raise ConfigError(
                "the study there is of other keys or values",
                where=FILE,
                fix="name another folder with --to",
            )
        point = tuple((axis.key, str(params[axis.key])) for axis in self.axes)
        self.numbers.setdefault(point, []).append(number)
        return point

    def _distribution(self, axis: Axis) -> Any:
        kinds = self.optuna.distributions
        if axis.values:
            return kinds.CategoricalDistribution(axis.values)
        if axis.whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def tell(self, outcomes: Sequence[Outcome | None], point: Point) -> None:
        """The mean over the seeds, once all have ended; a failure where one of them has no number."""
        seen = [each for each in outcomes if each is not None]
        values = [each.value for each in seen if each.value is not None]
        if len(seen) < len(outcomes) or any(each.state == "preempted" for each in seen):
            return
        known = self.study.get_trials(deepcopy=False)
        for number in (each for each in self.numbers[point] if not known[each].state.is_finished()):
            if len(values) == len(seen):
                self.study.tell(number, sum(values) / len(values))
            else:
                self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)

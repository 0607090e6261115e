"""The trials of a sweep while it runs: which are due, and what is known of those that ended."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from drumline_sweep.axes import SEED, Point
from drumline_sweep.optuna_study import Study
from drumline_sweep.plan import Sweep
from drumline_sweep.trials import Outcome, Trial, outcome


class Progress:
    """The trials of a sweep while it runs.

    `first`: the trials that are known before it begins. `study`: chooses further points.
    """

    def __init__(
        self,
        sweep: Sweep,
        first: list[Trial],
        study: Study | None,
    ) -> None:
        self.sweep = sweep
        self.first = first
        self.study = study
        # Outcomes of trials that have ended.
        self.ended: dict[Trial, Outcome] = {}
        # Trials in the order of the results.
        self.listed: dict[Trial, None] = dict.fromkeys(first)

    def due(self) -> Iterator[Trial]:
        """Yield the trials that have not finished.

        A point that the study chooses again is not trained again: its result is reported to the
        study once more.
        """
        trials: Iterable[Trial] = self.first
        if self.study is not None:
            trials = self.sweep.trials(self.study.points())
        for trial in trials:
            seen = self._outcome(trial)
            is_known = trial in self.listed
            self.listed[trial] = None
            if seen.state == "finished" or trial in self.ended:
                self._record(trial, seen)
            elif self.study is None or not is_known:
                yield trial

    def end(self, trial: Trial, code: int) -> None:
        """Record and print the outcome of a trial that has ended with an exit code."""
        seen = outcome(trial, self.sweep.eval, code)
        self._record(trial, seen)
        result = seen.reason or seen.state
        if seen.value is not None:
            result = f"{self.sweep.eval.metric} {seen.value:.4g}"
        count = f"[{len(self.ended)} of {len(self.listed)}]"
        print(
            f"{count} {trial.folder.name}: {result}",
            file=sys.stderr,
            flush=True,
        )

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all trials."""
        found = []
        for trial in self.listed:
            found.append(self._outcome(trial))
        return found

    def _outcome(self, trial: Trial) -> Outcome:
        """Return the outcome of a trial that this sweep has run, or that its folder shows."""
        seen = self.ended.get(trial)
        if seen is not None:
            return seen
        return outcome(trial, self.sweep.eval)

    def _record(self, trial: Trial, seen: Outcome) -> None:
        """Keep an outcome, and tell the study what is known of its point."""
        self.ended[trial] = seen
        if self.study is None:
            return
        point = point_of(trial)
        of_point = []
        for each in self.sweep.trials([point]):
            of_point.append(self.ended.get(each))
        self.study.tell(of_point, point)


def point_of(trial: Trial) -> Point:
    """Return the point of a trial, without its seed."""
    pairs = []
    for key, value in trial.point:
        if key != SEED:
            pairs.append((key, value))
    return tuple(pairs)

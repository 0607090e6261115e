"""After how many seconds a collective fails: soon within a step, later between steps.

The watcher of heartbeats (`system.heartbeat`) finds and ends ranks that hang long before these
limits, which are for runs without a watcher. NCCL's time runs from when the host begins a
collective, so it includes all that the device has to do before.
"""

from __future__ import annotations

from drumline.dist.timeouts import set_timeout
from drumline.plan.plan import Plan
from drumline.system.network import LONG_SECONDS, START_SECONDS, STEP_SECONDS

TIMES = 3.0  # a collective may take this multiple of the longest step


class CollectiveTimeout:
    """Sets the limit of collectives on this rank.

    All ranks call each method at the same step with the same numbers, so they agree.
    """

    def __init__(self, plan: Plan) -> None:
        """Set the limit for the time until the first step."""
        self.least = STEP_SECONDS
        first_limit = START_SECONDS
        if _may_wait_within_steps(plan):
            self.least = START_SECONDS
            first_limit = LONG_SECONDS
        self.longest = 0.0  # seconds of a step
        if plan.predicted.estimate is not None:
            self.longest = plan.predicted.estimate.seconds.total
        self.last = 0  # the last step before which other work was done
        self._set(first_limit)

    def before_long_work(self, step: int) -> None:
        """Set the limit for work that takes long on some rank: an evaluation, a save, a rollout.

        `step`: steps done. The limit holds until the next step is over on all ranks, because the
        ranks that are ready first wait in that step for the others.
        """
        self.last = step
        self._set(LONG_SECONDS)

    def after_step(self, step: int, seconds: list[float]) -> None:
        """Set the limit of the steps that follow.

        `step`: as `PendingStep.step`; `seconds`: of the step before it on each rank.
        """
        self.longest = max(self.longest, *seconds)
        if step > self.last:
            self._set(self.least)

    def _set(self, least: float) -> None:
        set_timeout(max(least, TIMES * self.longest))


def _may_wait_within_steps(plan: Plan) -> bool:
    """Whether one rank may be held up in a step for longer than a step usually takes.

    That may be by compiling, by waiting for a streaming dataset, or by callbacks of the user.
    """
    config = plan.config
    return config.compile.enabled or config.data.stream is not None or bool(config.run.callbacks)

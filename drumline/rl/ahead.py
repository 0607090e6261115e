"""Sample rollouts in the background, one at a time, each with the weights of a fixed optimizer step.

With `algorithm.ahead: N`, rollout r is sampled with the weights that rollout r − 1 − N left behind, and
the first N + 1 rollouts with the initial weights. It depends on no clock, so a run that is killed and
resumed learns from the same episodes.

The sampler holds one version of the weights. A request that is under way when weights change would mix
two versions, so the next version is handed over only when all requests of the rollout before are
finished. Training does not wait for that. The weights are set aside when their step is done, in host
memory or as files that servers read (`transport: folder`). Before each later step, and when a rollout's
completions have been read, all ranks ask each other whether the sampler is free. The time of a hand-over
depends on the clock, but what is sampled by it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from drumline.dist.reduce import gather_from_ranks
from drumline.rl.generate import Completion
from drumline.rl.restarts import CheckedSampling

# Hands over the weights, and starts to sample in the background. Collective.
StartSampling = Callable[[], CheckedSampling]


class ScheduledSampling:
    """A handle to the completions of a rollout that is being sampled or waits for its turn."""

    def __init__(self, start_next: Callable[[], None]) -> None:
        """Create the handle; nothing is sampled yet.

        `start_next`: see `BackgroundSampling.start_next`.
        """
        self._start_next = start_next
        # None: its turn has not come yet.
        self.sampling: CheckedSampling | None = None

    def finish(self) -> list[Completion]:
        """Return all completions, in the order of the requests, on every rank. Collective.

        Rollouts that come before it are sampled first. Otherwise like `CheckedSampling.finish`.
        """
        while self.sampling is None:
            self._start_next()
        return self.sampling.finish()


class WaitingRollout(NamedTuple):
    """A rollout that is to be sampled later, by weights that were set aside for it."""

    start_sampling: StartSampling
    scheduled: ScheduledSampling


class BackgroundSampling:
    """Samples rollouts in the background, one at a time, in the order in which they were added.

    All ranks add the same rollouts, and call the collective methods in the same order.
    """

    def __init__(self) -> None:
        # The rollout whose sampling was started last; None before the first.
        self._current: CheckedSampling | None = None
        self._waiting: deque[WaitingRollout] = deque()

    def is_free(self) -> bool:
        """Return whether a rollout that is added now could be started at once. Collective."""
        return not self._waiting and self._is_finished_everywhere()

    def add(self, start_sampling: StartSampling) -> ScheduledSampling:
        """Add a rollout at the end of the queue, and return the handle to its completions."""
        scheduled = ScheduledSampling(self.start_next)
        self._waiting.append(WaitingRollout(start_sampling, scheduled))
        return scheduled

    def start_next_if_free(self) -> None:
        """Start the next rollout if the one before it is finished on all ranks. Collective.

        It does not wait, and costs nothing if no rollout is waiting.
        """
        if self._waiting and self._is_finished_everywhere():
            self.start_next()

    def start_next(self) -> None:
        """Wait until the rollout before is sampled, and start the next one. Collective."""
        self.finish()
        # The rollout's weights are freed when `start_sampling` has handed them over.
        start_sampling, scheduled = self._waiting.popleft()
        self._current = start_sampling()
        scheduled.sampling = self._current

    def finish(self) -> None:
        """Wait until the rollout that was started last is sampled. Collective.

        Raises what `CheckedSampling.finish` does. Servers are checked for the weights of this rollout,
        which must happen before they get others.
        """
        if self._current is not None:
            self._current.finish()

    def _is_finished_everywhere(self) -> bool:
        """Return whether no rank samples any longer. Collective, unless all ranks know it already."""
        if self._current is None or self._current.is_checked:
            return True
        return all(gather_from_ranks(self._current.is_finished))

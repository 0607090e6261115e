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

Servers load weights in the background (`hand_over.Loading`). Meanwhile the ranks prepare the rollout that
is learned from, or learn. Whether the servers are done is asked at the same places, and between
micro-batches of the preparation. Then sampling begins. Weights that the policy has at that moment are
compared with the sampler first (`sampler_check`), so they must have arrived before the first step that
changes the policy (`finish_comparison`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from drumline.dist.reduce import gather_from_ranks
from drumline.rl.generate import Completion
from drumline.rl.restarts import CheckedSampling

# Starts to sample in the background; the sampler has the weights. Collective.
StartSampling = Callable[[], CheckedSampling]


class WeightTransfer(Protocol):
    """Weights on their way to what samples, such as `hand_over.Loading`."""

    @property
    def is_finished(self) -> bool:
        """Whether this rank need not wait for them any longer."""
        ...

    def finish(self) -> None:
        """Wait until they have arrived. Collective."""
        ...


# Begins to hand over weights. Returns None if they have arrived already. Collective.
HandOverWeights = Callable[[], WeightTransfer | None]


class ScheduledSampling:
    """A handle to the completions of a rollout that is being sampled or waits for its turn.

    Attributes:
        sampling: Samples the completions; None: its turn has not come yet.
        sampler_gap: `SamplerCheck.gap` of its weights; None: not measured, or not yet.
    """

    def __init__(self, start_next: Callable[[], None]) -> None:
        """Create the handle; nothing is sampled yet.

        `start_next`: see `BackgroundSampling.start_next`.
        """
        self._start_next = start_next
        self.sampling: CheckedSampling | None = None
        self.sampler_gap: float | None = None

    def finish(self) -> list[Completion]:
        """Return all completions, in the order of the requests, on every rank. Collective.

        Rollouts that come before it are sampled first. Otherwise like `CheckedSampling.finish`.
        """
        while self.sampling is None:
            self._start_next()
        return self.sampling.finish()


@dataclass
class WaitingRollout:
    """A rollout that is to be sampled once the sampler is free and has its weights."""

    hand_over: HandOverWeights
    start_sampling: StartSampling
    # Compares the sampler with the policy before sampling starts, and returns the gap. None: the policy
    # will have changed by then. Collective.
    compare: Callable[[], float | None] | None
    scheduled: ScheduledSampling


class BackgroundSampling:
    """Samples rollouts in the background, one at a time, in the order in which they were added.

    All ranks add the same rollouts, and call the collective methods in the same order.
    """

    def __init__(self) -> None:
        # The rollout whose sampling was started last; None before the first.
        self._current: CheckedSampling | None = None
        self._waiting: deque[WaitingRollout] = deque()
        # The rollout whose weights are on their way, and these weights.
        self._next: WaitingRollout | None = None
        self._transfer: WeightTransfer | None = None

    @property
    def is_loading(self) -> bool:
        """Whether weights are on their way to the sampler. It is the same on all ranks."""
        return self._transfer is not None

    def is_free(self) -> bool:
        """Return whether a rollout that is added now could be started at once. Collective."""
        has_next = self.is_loading or bool(self._waiting)
        return not has_next and self._is_finished_everywhere()

    def add(
        self,
        start_sampling: StartSampling,
        hand_over: HandOverWeights = lambda: None,
        compare: Callable[[], float | None] | None = None,
    ) -> ScheduledSampling:
        """Add a rollout at the end of the queue, and return the handle to its completions.

        The arguments are those of WaitingRollout.
        """
        scheduled = ScheduledSampling(self.start_next)
        self._waiting.append(WaitingRollout(hand_over, start_sampling, compare, scheduled))
        return scheduled

    def start_next_if_free(self) -> None:
        """Begin with the next rollout as far as that needs no waiting. Collective.

        If the rollout before is finished on all ranks, its weights are sent. If they have arrived, its sampling
        starts. This costs nothing if no rollout is waiting.
        """
        if self._transfer is not None:
            if all(gather_from_ranks(self._transfer.is_finished)):
                self._start_sampling()
        elif self._waiting and self._is_finished_everywhere():
            self.begin_next()

    def begin_next(self) -> None:
        """Wait until the rollout before is sampled, and begin to hand over the weights of the next one.

        If they are there at once, its sampling starts. Collective.
        """
        self._finish_current()
        # The rollout's weights are freed when they have been handed over.
        self._next = self._waiting.popleft()
        self._transfer = self._next.hand_over()
        if self._transfer is None:
            self._start_sampling()

    def start_next(self) -> None:
        """Wait until the rollout before is sampled, and start the next one. Collective."""
        if self._transfer is None:
            self.begin_next()
        if self._transfer is not None:
            self._start_sampling()

    def finish_comparison(self) -> None:
        """Wait for weights that are compared with the policy as it is now, and start to sample. Collective."""
        if self._next is not None and self._next.compare is not None:
            self._start_sampling()

    def finish(self) -> None:
        """Wait until the rollout that was begun last is sampled. Collective.

        Raises what `CheckedSampling.finish` does. Servers are checked for the weights of this rollout,
        which must happen before they get others.
        """
        if self._transfer is not None:
            self._start_sampling()
        self._finish_current()

    def _start_sampling(self) -> None:
        """Wait for the weights on their way, compare them, and start to sample. Collective."""
        rollout = self._next
        assert rollout is not None, "the caller has begun with it"
        if self._transfer is not None:
            self._transfer.finish()
        self._next = None
        self._transfer = None
        if rollout.compare is not None:
            rollout.scheduled.sampler_gap = rollout.compare()
        self._current = rollout.start_sampling()
        rollout.scheduled.sampling = self._current

    def _finish_current(self) -> None:
        """Wait until the rollout whose sampling was started last is sampled. Collective."""
        if self._current is not None:
            self._current.finish()

    def _is_finished_everywhere(self) -> bool:
        """Return whether no rank samples any longer. Collective, unless all ranks know it already."""
        if self._current is None or self._current.is_checked:
            return True
        return all(gather_from_ranks(self._current.is_finished))

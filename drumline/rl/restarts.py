"""Sample again what came from servers that did not have the policy's weights.

A server may be restarted between two hand-overs so quickly that no request fails. It then samples from the
weights that it was started with.
"""

from __future__ import annotations

from collections.abc import Callable

from drumline.errors import DrumlineError
from drumline.rl.generate import (
    WHERE,
    Completion,
    DistributedSampling,
    Generator,
    LostWeights,
    Request,
)

# After this many samplings of the same requests the run ends with an error.
MOST_SAMPLINGS = 3


def restore_none() -> list[str]:
    """Return no urls: for a generator without servers, and for servers that keep their own weights."""
    return []


class CheckedSampling:
    """Samples a list of requests on all ranks, like DistributedSampling, by the policy's weights.

    Before its completions count, each server is asked for the version of its weights. If one of them does
    not have the present ones, it gets them, and all requests are sampled again. So they are if a generator
    says that it has lost its weights. Their random numbers are the same, so the completions are those that
    there would have been without the restart.
    """

    def __init__(
        self,
        generator: Generator,
        requests: list[Request],
        step: int,
        in_background: bool = False,
        restore_weights: Callable[[], list[str]] = restore_none,
    ) -> None:
        """Start to sample. The first arguments are those of `DistributedSampling`.

        `restore_weights`: hands the present weights over again to servers that do not have them, and
        returns their urls. Collective.
        """
        self.generator = generator
        self.requests = requests
        self.step = step
        self.restore_weights = restore_weights
        self._first_sampling = DistributedSampling(generator, requests, step, in_background)
        self._completions: list[Completion] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this rank's requests are sampled, or sampling has failed."""
        return self._first_sampling.is_finished

    @property
    def is_checked(self) -> bool:
        """Whether `finish` has returned, which tells every rank that all of them are finished."""
        return self._completions is not None

    def finish(self) -> list[Completion]:
        """Return all completions, in the order of the requests, on every rank. Collective.

        Raises DataError or PlanError if a request cannot be completed, and DrumlineError if the last
        server fails, one refuses a request, or one has other weights each time.
        """
        if self._completions is None:
            self._completions = self._sample_until_checked()
        return self._completions

    def _sample_until_checked(self) -> list[Completion]:
        """Return the completions of the first sampling whose servers all had the present weights."""
        sampling = self._first_sampling
        samplings = 1
        while True:
            completions: list[Completion] | None = None
            loss: LostWeights | None = None
            try:
                completions = sampling.result
            except LostWeights as error:
                loss = error
            outdated = self.restore_weights()
            if completions is not None and not outdated:
                return completions
            if loss is not None and not outdated:
                # The weights are there, so that it is something else.
                raise loss
            if samplings == MOST_SAMPLINGS:
                raise DrumlineError(
                    f"{outdated[0]} had other weights than it was handed, {samplings} times in a row",
                    where=f"{WHERE}.url",
                    fix="give this run servers of its own, each with an address of its own",
                )
            sampling = DistributedSampling(self.generator, self.requests, self.step)
            samplings += 1

"""Checks for faults that raise no error.

These are a loss that jumps (`Spikes`), copies of weights that differ between ranks (`WeightCheck`),
and ranks that begin different collectives (`CollectiveCheck`).

Checking changes no number of a run, except that a policy for spikes (`health.on_spike`) other than
`note` skips updates.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch

from drumline.config.run import HealthConfig
from drumline.dist.reduce import SumReducer, gather_from_ranks
from drumline.engine.engine import CompositeEngine, Engine
from drumline.engine.norms import local
from drumline.errors import DrumlineError, TrainingStopped
from drumline.plan.copies import same_weights
from drumline.plan.plan import Plan
from drumline.telemetry import flight as recorder
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import Spike, WeightsDiffer
from drumline.train.state import PendingStep

# The fewest losses by which a spike is judged.
FEWEST = 20
# The least standard deviation, as a part of the mean. Otherwise any change of a loss that hardly
# moves would be a spike.
LEAST_DEVIATION = 0.01
# Bytes of an element → the integer type that holds its bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The odd multiplier of SplitMix64, from the golden ratio, as an int64.
ODD = 0x9E3779B97F4A7C15 - 2**64
# A step begins several collectives of each library; so many of the last ones are compared.
COMPARED_COLLECTIVES = recorder.RECENT * 5


class GoBack(Exception):
    """The run goes back to its newest checkpoint, and passes over a batch.

    `position`: the end of that batch.
    """

    def __init__(self, position: int) -> None:
        super().__init__(
            f"back to the newest checkpoint, without the batch that ends at {position}"
        )
        self.position = position


class Spikes:
    """Detects losses far above those before them, and applies the policy `health.on_spike`.

    A loss is a spike if z = (loss − mean) / standard deviation, over a window of losses, exceeds
    `spike_zscore`.
    """

    def __init__(self, health: HealthConfig, emit: Emit) -> None:
        self.health = health
        self.emit = emit
        self.losses: deque[float] = deque(maxlen=health.spike_window)
        # Ends of batches that a rollback has passed over.
        self.passed_over: set[int] = set()
        self.rollbacks = 0

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what a checkpoint holds of `state()`."""
        self.losses.extend(saved.get("losses", ()))
        self.passed_over.update(saved.get("passed_over", ()))
        self.rollbacks = saved.get("rollbacks", 0)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as functions that `TrainState.dump` calls."""
        if self.health.on_spike == "none":
            return {}
        return {
            "losses": lambda: list(self.losses),
            "passed_over": lambda: sorted(self.passed_over),
            "rollbacks": lambda: self.rollbacks,
        }

    def limit(self) -> float | None:
        """Return the largest loss that is not a spike; None if spikes are not looked for, or not yet."""
        if self.health.on_spike == "none" or len(self.losses) < FEWEST:
            return None
        mean = statistics.fmean(self.losses)
        deviation = statistics.pstdev(self.losses, mean)
        deviation = max(deviation, LEAST_DEVIATION * abs(mean))
        return mean + self.health.spike_zscore * deviation

    def allows(
        self, pending: PendingStep, loss_sum: torch.Tensor, finite: torch.Tensor
    ) -> torch.Tensor:
        """Return whether the update may be made, as a bool scalar on the device.

        The host does not wait for the device. The current limit is stored in `pending`, for `judge`.
        `finite`: a bool scalar, whether loss and norm are finite.
        """
        pending.limit = self.limit()
        if pending.position in self.passed_over:
            return torch.zeros_like(finite)
        if pending.limit is None or self.health.on_spike == "note":
            return finite
        return finite & (loss_sum <= pending.limit * pending.denominator)

    def judge(self, pending: PendingStep, skips: int, can_go_back: bool) -> int:
        """Apply the policy to a step whose numbers are finite, once they are on the host.

        Returns the new count of consecutive steps that were skipped because of a spike. It is 0
        after a normal step, and after a batch that a rollback passes over on purpose. `skips`: the
        count before this step. `can_go_back`: whether there is a checkpoint to go back to.

        Raises TrainingStopped after too many spikes, and GoBack if the policy is to roll back.
        """
        if pending.position in self.passed_over:
            return 0
        if not self._is_spike(pending):
            self.losses.append(pending.loss)
            return 0
        policy = self.health.on_spike
        if policy == "rollback" and not can_go_back:
            policy = "skip"
        self._emit_spike(pending, policy)
        if policy == "note":
            self.losses.append(pending.loss)
            return 0
        if policy == "rollback":
            self.rollbacks += 1
        spikes = max(skips + 1, self.rollbacks)
        if spikes > self.health.max_skips:
            raise TrainingStopped(
                f"loss {pending.loss:.4g} at step {pending.step}"
                f" ({spikes} spikes, health.max_skips is {self.health.max_skips})",
                where="health.on_spike",
                fix="look at the samples of the `spike` events in events.jsonl; lower optimizer.lr",
            )
        if policy == "rollback":
            raise GoBack(pending.position)
        return skips + 1

    def _is_spike(self, pending: PendingStep) -> bool:
        """Whether the loss exceeds the limit. Compares sums, as `allows` does on the device."""
        if pending.limit is None:
            return False
        return pending.total["loss"] > pending.limit * pending.denominator

    def _emit_spike(self, pending: PendingStep, policy: str) -> None:
        assert pending.limit is not None
        event = Spike(
            step=pending.step,
            policy=policy,
            loss=pending.loss,
            mean=statistics.fmean(self.losses),
            deviation=statistics.pstdev(self.losses),
            limit=pending.limit,
            sample_ids=pending.sample_ids.tolist(),
        )
        self.emit(event)


class WeightCheck:
    """Checks that ranks that should hold the same weights do (`health.check_weights_every`)."""

    def __init__(self, plan: Plan, engine: Engine, reducer: SumReducer, emit: Emit) -> None:
        self.every = plan.config.health.check_weights_every
        self.engine = engine
        self.reducer = reducer
        self.emit = emit
        # Sets of ranks that should hold the same weights.
        self.sets: list[list[int]] = []
        if self.every:
            self.sets = same_weights(plan.config.strategy, plan.mesh)
        # The last step after which all sets held the same weights; None before the first check.
        self.last_agreed_step: int | None = None

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def check(self, step: int) -> None:
        """Compare the weights after `step` steps. Collective.

        Raises DrumlineError, on all ranks, if they differ.
        """
        if self.every is None or self.last_agreed_step == step:
            return
        checksums = [int(value) for value in gather_from_ranks(int(checksum(self.engine)))]
        differing: list[int] = []
        for ranks in self.sets:
            differing += outvoted_ranks({rank: checksums[rank] for rank in ranks})
        differing.sort()
        if not differing:
            self.last_agreed_step = step
            return
        self.emit(WeightsDiffer(step=step, ranks=differing, agreed=self.last_agreed_step))
        what = self._describe(differing, step)
        if self.reducer.rank != differing[0]:
            what = f"failed on another rank: {what}"
        raise DrumlineError(
            what,
            where="health.check_weights_every",
            fix="go on from the newest checkpoint: the ranks agreed on it",
        )

    def _describe(self, differing: list[int], step: int) -> str:
        """Return the error message: which ranks differ from what, and since when."""
        ranks = ", ".join(str(rank) for rank in differing)
        who = f"rank {ranks}" if len(differing) == 1 else f"ranks {ranks}"
        largest_set = max(len(ranks) for ranks in self.sets)
        copies = "each other"
        if len(differing) < largest_set:
            copies = "the other copies"
        since = "since the start"
        if self.last_agreed_step is not None:
            since = f"since step {self.last_agreed_step}"
        return (
            f"the weights of {who} differ from {copies} after step {step}:"
            f" they changed {since} by a fault of memory, device or network"
        )


def outvoted_ranks(sums: dict[int, int]) -> list[int]:
    """Return the ranks whose number is not the most frequent one.

    If two numbers are equally frequent, all ranks are returned. `sums`: a number for each rank.
    """
    by_frequency = Counter(sums.values()).most_common()
    most_frequent, count = by_frequency[0]
    if len(by_frequency) > 1 and by_frequency[1][1] == count:
        return list(sums)
    return [rank for rank, value in sums.items() if value != most_frequent]


@torch.no_grad()
def checksum(engine: Engine) -> torch.Tensor:
    """Return an int64 scalar of all bits of this rank's weights.

    Any single flipped bit changes it.
    """
    engines: Iterable[Engine] = [engine]
    if isinstance(engine, CompositeEngine):
        engines = engine.engines.values()
    total: torch.Tensor | None = None
    for each in engines:
        for parameter in each.model.parameters():  # type: ignore[attr-defined]
            flat = local(parameter.detach()).contiguous().view(-1)
            bits = flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
            # Multiplying makes the order of the weights count, and loses no bit, as ODD is odd.
            total = bits if total is None else total * ODD + bits
    if total is None:
        return torch.zeros((), dtype=torch.int64)
    return total


class CollectiveCheck:
    """Compares the collectives that the ranks begin in a step (`health.check_collectives`)."""

    def __init__(self, on: bool) -> None:
        self.on = on
        # For each library the number of its last collective that was compared.
        self.seen: dict[str, int] = {}

    def check(self) -> None:
        """Compare what was begun since the last call. Collective.

        Raises DrumlineError, on all ranks, if the ranks began different collectives.
        """
        if not self.on:
            return
        mine = recorder.recent(self.seen, most=COMPARED_COLLECTIVES)
        ranks = dict(enumerate(gather_from_ranks(mine)))
        # Read again, so that the next check does not compare the collective of this comparison.
        self.seen |= recorder.largest_ids(recorder.recent(self.seen, most=COMPARED_COLLECTIVES))
        difference = recorder.first_difference(ranks)
        if difference:
            _, what = recorder.blame(difference, ranks)
            raise DrumlineError(
                what,
                where="health.check_collectives",
                fix="make all ranks begin the same ones in the same order",
            )

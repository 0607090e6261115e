"""Faults that raise no error: a loss that jumps, ranks whose weights are not the same any more, collectives that do not belong together.
What is watched here changes no number of a run, unless its policy says so."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from typing import Any

import torch

from drumline.core.copies import same_weights
from drumline.core.plan import Plan
from drumline.core.run import HealthConfig
from drumline.dist.reduce import Gather, from_all
from drumline.errors import DrumlineError, TrainingStopped
from drumline.parallel.engine import CompositeEngine, Engine
from drumline.parallel.norms import local
from drumline.telemetry import flight as recorder
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import Spike, WeightsDiffer
from drumline.train.state import Flight

FEWEST = 20  # losses that a mean and a deviation are made of
LEAST_DEVIATION = (
    0.01  # of the mean: a loss that hardly moves has almost none, and any step would stand out
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = 0x9E3779B97F4A7C15 - 2**64  # of the golden ratio, as SplitMix64 has it


class GoBack(Exception):
    """The run goes on from its newest checkpoint, and passes over the batch that ends at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"back to the newest checkpoint, without the batch that ends at {position}"
        )
        self.position = position


class Spikes:
    """Losses that lie far above those before them: z = (loss − mean) / standard deviation over a window is more than `spike_zscore`."""

    def __init__(self, health: HealthConfig, emit: Emit) -> None:
        self.health, self.emit = health, emit
        self.losses: deque[float] = deque(maxlen=health.spike_window)
        self.passed_over: set[int] = set()  # ends of batches that a rollback left behind
        self.rollbacks = 0

    def take_up(self, known: dict[str, Any]) -> None:
        """Go on from what a checkpoint has (`state`)."""
        self.losses.extend(known.get("losses", ()))
        self.passed_over.update(known.get("passed_over", ()))
        self.rollbacks = known.get("rollbacks", 0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it: functions that are asked when it is saved."""
        if self.health.on_spike == "none":
            return {}
        return {
            "losses": lambda: list(self.losses),
            "passed_over": lambda: sorted(self.passed_over),
            "rollbacks": lambda: self.rollbacks,
        }

    def limit(self) -> float | None:
        """The largest loss that is none; None where nothing is watched, or too little is known."""
        if self.health.on_spike == "none" or len(self.losses) < FEWEST:
            return None
        mean = statistics.fmean(self.losses)
        return mean + self.health.spike_zscore * max(
            statistics.pstdev(self.losses, mean), LEAST_DEVIATION * abs(mean)
        )

    def allows(self, flight: Flight, loss_sum: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Whether the update is made, on the device: by policy, and not for a batch that is passed over. Notes the limit in `flight`."""
        flight.limit = self.limit()
        if flight.position in self.passed_over:
            return torch.zeros_like(finite)
        if flight.limit is None or self.health.on_spike == "note":
            return finite
        return finite & (loss_sum <= flight.limit * flight.denominator)

    def judge(self, flight: Flight, skips: int, can_go_back: bool) -> int:
        """How many steps in a row were skipped, with this one, whose numbers are on the host and finite; `skips`: before it. Raises
        TrainingStopped after too many, and GoBack."""
        if flight.position in self.passed_over:
            return 0
        if flight.limit is None or not flight.total["loss"] > flight.limit * flight.denominator:
            self.losses.append(flight.loss)
            return 0
        mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        policy = (
            "skip"
            if self.health.on_spike == "rollback" and not can_go_back
            else self.health.on_spike
        )
        self.emit(
            Spike(
                step=flight.step, policy=policy, loss=flight.loss, mean=mean, deviation=deviation, limit=flight.limit,
                sample_ids=flight.sample_ids.tolist(),
            )
        )  # fmt: skip
        if policy == "note":
            self.losses.append(flight.loss)
            return 0
        self.rollbacks += policy == "rollback"
        if max(skips + 1, self.rollbacks) > self.health.max_skips:
            what = f"loss {flight.loss:.4g} at step {flight.step}, {max(skips + 1, self.rollbacks)} of such"
            fix = "look at the samples of the `spike` events in events.jsonl; lower optimizer.lr"
            raise TrainingStopped(what, where="health.on_spike", fix=fix)
        if policy == "rollback":
            raise GoBack(flight.position)
        return skips + 1


class Weights:
    """Whether the ranks that should hold the same weights do."""

    def __init__(self, plan: Plan, engine: Engine, gather: Gather, emit: Emit) -> None:
        self.every, self.engine, self.gather, self.emit = (
            plan.config.health.check_weights_every,
            engine,
            gather,
            emit,
        )
        self.sets = same_weights(plan.config.strategy, plan.mesh) if self.every else []
        self.agreed: int | None = None  # the last step

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def check(self, step: int) -> None:
        """Raises DrumlineError, on all ranks, where the weights after `step` steps differ. Collective."""
        if self.every is None or self.agreed == step:
            return
        sums = [int(value) for value in from_all(int(checksum(self.engine)))]
        differing = sorted(
            rank for ranks in self.sets for rank in odd_ones({rank: sums[rank] for rank in ranks})
        )
        if not differing:
            self.agreed = step
            return
        self.emit(WeightsDiffer(step=step, ranks=differing, agreed=self.agreed))
        who = ("rank " if len(differing) == 1 else "ranks ") + ", ".join(map(str, differing))
        copies = "the other copies" if len(differing) < max(map(len, self.sets)) else "each other"
        since = "since the start" if self.agreed is None else f"since step {self.agreed}"
        what = f"the weights of {who} differ from {copies} after step {step}: they changed {since} by a fault of memory, device or network"
        if self.gather.rank != differing[0]:
            what = f"failed on another rank: {what}"
        raise DrumlineError(
            what,
            where="health.check_weights_every",
            fix="go on from the newest checkpoint: the ranks agreed on it",
        )


def odd_ones(sums: dict[int, int]) -> list[int]:
    """The ranks whose number is not that of most; all where there is no majority."""
    (most, count), *rest = Counter(sums.values()).most_common()
    if rest and rest[0][1] == count:
        return list(sums)
    return [rank for rank, value in sums.items() if value != most]


@torch.no_grad()
def checksum(engine: Engine) -> torch.Tensor:
    """int64, of all bits of this rank's weights: any one that is flipped changes it."""
    engines = engine.engines.values() if isinstance(engine, CompositeEngine) else [engine]
    total: torch.Tensor | None = None
    for each in engines:
        for parameter in each.model.parameters():  # type: ignore[attr-defined]
            part = local(parameter.detach()).contiguous().view(-1)
            added = part.view(INTEGERS[part.element_size()]).sum(dtype=torch.int64)
            total = added if total is None else total * ODD + added
    return torch.zeros((), dtype=torch.int64) if total is None else total


class Collectives:
    """Whether all ranks began the same collectives in a step: the debug mode `health.check_collectives`."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.seen: dict[str, int] = {}  # by library

    def check(self) -> None:
        """Compare what was begun since the last call. Raises DrumlineError, on all ranks. Collective."""
        if not self.on:
            return
        mine = recorder.recent(self.seen, most=recorder.RECENT * 5)
        ranks = dict(enumerate(from_all(mine)))
        self.seen |= recorder.newest(recorder.recent(self.seen, most=recorder.RECENT * 5))
        if found := recorder.first_difference(ranks):
            _, what = recorder.blame(found, ranks)
            raise DrumlineError(
                what,
                where="health.check_collectives",
                fix="make all ranks begin the same ones in the same order",
            )

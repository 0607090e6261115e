"""An engine without a model, for tests of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from drumline.engine.engine import DeviceSums, Extract, IsWanted, Sums, is_any
from drumline.telemetry.memory_tracker import MemoryStats


class FakeEngine:
    """One weight w, loss Σ (w − token)² / 2 over a micro-batch's learned targets.

    `fail_at` maps a count of forward_backward calls to the loss returned there, to play NaN.
    """

    router_load = None

    def __init__(self, fail_at: dict[int, float] | None = None) -> None:
        self.weight = torch.zeros((), dtype=torch.float64)
        self.gradient = 0.0
        self.calls = 0
        self.skipped = 0
        self.fail_at = fail_at or {}

    def forward_backward(
        self, micro_batches: list[Any], objective: Any, denominator: float
    ) -> DeviceSums:
        sums = self.evaluate(micro_batches, objective)
        self.gradient = (
            sum(float((self.weight - _learned(b)).sum()) for b in micro_batches) / denominator
        )
        self.calls += 1
        if self.calls in self.fail_at:
            sums["loss"] = self.gradient = self.fail_at[self.calls]
        return {key: torch.tensor(value, dtype=torch.float64) for key, value in sums.items()}

    def begin_step(self, lr: float) -> None:
        pass

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        losses = [float(((self.weight - _learned(b)) ** 2).sum() / 2) for b in micro_batches]
        return {"loss": sum(losses), "tokens": 1.0, "correct": 0.0}

    def infer(
        self, micro_batches: Iterable[Any], extract: Extract, adapter: bool = True
    ) -> list[torch.Tensor]:
        return [extract(self.weight, batch) for batch in micro_batches]

    def whole_weights(self, is_wanted: IsWanted = is_any) -> Iterator[tuple[str, torch.Tensor]]:
        if is_wanted("weight"):
            yield "weight", self.weight

    def unsharded_model(self) -> None:
        return None

    def grad_norm(self) -> torch.Tensor:
        return torch.tensor(abs(self.gradient), dtype=torch.float64)

    def step(self, lr: float, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        self.weight -= torch.where(finite, lr * self.gradient, 0.0)
        self.skipped += not finite

    def uses_loss_scale(self) -> bool:
        return False

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"model.weight": self.weight}

    def state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.calls = state["calls"]

    def memory_stats(self) -> MemoryStats:
        return MemoryStats(self.weight.nbytes, 0, 0)

    def exposed_communication(self) -> float | None:
        return 0.0


def _learned(batch: Any) -> torch.Tensor:
    targets = batch.targets_BT
    return targets[targets != -100].double()

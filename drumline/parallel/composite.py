"""Trainable models side by side as one engine: a policy, and a value model of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from drumline.parallel.engine import DeviceSums, Engine, Read, Sums
from drumline.telemetry.memory_tracker import MemoryStats

POLICY = "policy"
T = TypeVar("T")
N = TypeVar("N", float, torch.Tensor)


class CompositeEngine:
    """An Engine over the engines of several roles. Objectives are by role (role → objective), sums are added up, the norm is that of all
    gradients together, and so clipping is.

    Calls for one model (infer, whole_weights, unsharded_model, an objective that is no mapping) go to the policy. Canonical names of
    another role's tensors have the role before them: `value/model.<fqn>`, so that an export or a run without it finds the policy's alone.
    """

    def __init__(self, engines: dict[str, Engine], rates: Mapping[str, float]) -> None:
        """`engines`: by role, `policy` among them. `rates`: learning rate of a role as a part of the policy's, where it is another."""
        self.engines, self.rates = engines, rates
        self.policy = engines[POLICY]

    def forward_backward(self, micro_batches: list[Any], objective: Any, denominator: float) -> DeviceSums:
        assert objective.keys() == self.engines.keys(), "each trainable model has an objective"
        return _added(engine.forward_backward(micro_batches, objective[role], denominator) for role, engine in self.engines.items())

    def evaluate(self, micro_batches: Iterable[Any], objective: Any) -> Sums:
        if not isinstance(objective, Mapping):
            return self.policy.evaluate(micro_batches, objective)
        batches = list(micro_batches)
        return _added(self.engines[role].evaluate(batches, wanted) for role, wanted in objective.items())

    def infer(self, micro_batches: Iterable[Any], read: Read, adapter: bool = True) -> list[torch.Tensor]:
        return self.policy.infer(micro_batches, read, adapter)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.policy.whole_weights()

    def unsharded_model(self) -> nn.Module | None:
        return self.policy.unsharded_model()

    def grad_norm(self) -> torch.Tensor:
        return torch.stack([engine.grad_norm() for engine in self.engines.values()]).square().sum().sqrt()

    def step(self, lr: float | None, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        for role, engine in self.engines.items():
            engine.step(lr and lr * self.rates.get(role, 1.0), grad_norm, finite)

    def rescales(self) -> bool:
        return any(engine.rescales() for engine in self.engines.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            name if role == POLICY else f"{role}/{name}": tensor
            for role, engine in self.engines.items()
            for name, tensor in engine.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        return self.policy.state() | {"roles": {role: engine.state() for role, engine in self.engines.items() if role != POLICY}}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for role, engine in self.engines.items():
            own = state if role == POLICY else {**state.get("roles", {}).get(role, {}), "step": state["step"]}
            engine.load_state(own, of_role(tensors, role))

    def memory_stats(self) -> MemoryStats:
        return sum((engine.memory_stats() for engine in self.engines.values()), MemoryStats(0, 0, 0))

    def exposed_communication(self) -> float | None:
        waits = [engine.exposed_communication() for engine in self.engines.values()]
        return None if None in waits else math.fsum(wait for wait in waits if wait is not None)


def of_role(named: Mapping[str, T], role: str) -> dict[str, T]:
    """The tensors of a role, under the names that its own engine has for them."""
    if role == POLICY:
        return {name: value for name, value in named.items() if "/" not in name}
    return {name.removeprefix(f"{role}/"): value for name, value in named.items() if name.startswith(f"{role}/")}


def _added(parts: Iterable[dict[str, N]]) -> dict[str, N]:
    """The losses of all roles are one; other sums of one name are added up as well."""
    total: dict[str, N] = {}
    for sums in parts:
        for key, value in sums.items():
            total[key] = total[key] + value if key in total else value
    return total

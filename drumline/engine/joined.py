"""Several optimizers that are stepped as one, each over parameters of its own."""

from __future__ import annotations

from typing import Any

import torch


class JoinedOptimizer:
    """Several optimizers as one, with the attributes and methods of an optimizer that engines use.

    `found_inf`: is handed to each of them before its step. Those that read it skip the step if it
    is 1.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts. They are the parts' own, so a rate that is set here counts."""
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            groups += part.param_groups
        return groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all parts by parameter. Each parameter belongs to one part."""
        states: dict[torch.Tensor, Any] = {}
        for part in self.parts:
            states.update(part.state)
        return states

    def step(self) -> None:
        for part in self.parts:
            part.found_inf = self.found_inf  # type: ignore[attr-defined]
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

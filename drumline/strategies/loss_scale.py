"""Loss scaling for fp16 (Micikevicius et al. 2018): small gradients are kept above fp16's zero while they are made."""

from __future__ import annotations

from typing import Any

import torch

from drumline.vendor.torch import foreach_mul_

# As torch.amp.GradScaler: doubled after so many steps without an overflow, halved at one.
GROWTH_INTERVAL = 2000


class LossScale:
    """torch.amp.GradScaler takes no mixture of plain and sharded gradients, and each of its ranks would judge by its own part. Here the
    global norm tells of an overflow, the same on all ranks, so the scale is one number on the host. 1 where it is not enabled."""

    def __init__(self, initial: float, enabled: bool) -> None:
        self.enabled, self.value, self.good_steps = enabled, initial if enabled else 1.0, 0

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Bring this rank's parts of the gradients back, in place; once a step."""
        if self.enabled and gradients:
            foreach_mul_(gradients, 1.0 / self.value)

    def good(self) -> None:
        """A step was taken."""
        self.good_steps += 1
        if self.enabled and self.good_steps % GROWTH_INTERVAL == 0:
            self.value *= 2.0

    def overflow(self) -> None:
        """A step was skipped."""
        self.good_steps = 0
        if self.enabled:
            self.value /= 2.0

    def state(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing where the state is of a run in another precision."""
        if self.enabled and "good_steps" in state:
            self.value, self.good_steps = float(state["scale"]), int(state["good_steps"])

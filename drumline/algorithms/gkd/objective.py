"""On-policy distillation (GKD, Agarwal et al. 2024, "On-Policy Distillation of Language Models").

The loss is the divergence from the teacher (`models.divergence`), summed over the tokens of completions.
The model's own completions are data: no gradient goes through their sampling.
"""

from __future__ import annotations

from typing import Any

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.distill.objective import teacher_divergence
from drumline.algorithms.gkd.spec import GKDConfig
from drumline.algorithms.policy import KLController


class OnPolicyDistillation(Algorithm):
    """The divergence from the teacher, summed over the tokens of completions.

    The metric `kl` is KL(teacher ‖ model) at the temperature of the loss, in nats, whatever
    divergence is learned.
    """

    def __init__(self, spec: GKDConfig) -> None:
        self.spec = spec
        # There is no reference model to keep near to.
        self.kl = KLController(0.0)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the summed divergence, and the sums of KL and of tokens."""
        return LossOut(*teacher_divergence(self.spec, outputs, batch))

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over the tokens of held-out completions."""
        tokens = max(1.0, sums["tokens"])
        return {"loss": sums["loss"] / tokens, "kl": sums["kl"] / tokens}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean KL of a token."""
        return {"kl": sums["kl"] / max(1.0, sums["tokens"])}

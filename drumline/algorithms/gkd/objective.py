"""On-policy distillation (GKD, Agarwal et al. 2024, "On-Policy Distillation of Language Models").

The loss is the divergence between model and teacher (`models.divergence`) at each token of a completion.
Completions are treated as data: no gradient goes through their sampling.
"""

from __future__ import annotations

from typing import Any

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.distill.objective import teacher_divergence
from drumline.algorithms.gkd.spec import GKDConfig
from drumline.algorithms.policy import KLController


class OnPolicyDistillation(Algorithm):
    """The divergence between model and teacher, summed over the tokens of completions.

    The metric `kl` is KL(teacher ‖ model) in nats, at the temperature of the loss. It is the same
    quantity for every value of the key `divergence`, so runs can be compared by it.
    """

    def __init__(self, spec: GKDConfig) -> None:
        self.spec = spec
        # Rollouts read this from every algorithm. 0: there is no penalty and no reference model.
        self.kl = KLController(0.0)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the divergence summed over tokens, the sum of KL and the number of tokens."""
        return LossOut(*teacher_divergence(self.spec, outputs, batch))

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss and KL of a token of held-out completions."""
        tokens = max(1.0, sums["tokens"])
        return {"loss": sums["loss"] / tokens, "kl": sums["kl"] / tokens}

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean KL of a token of the step."""
        return {"kl": sums["kl"] / max(1.0, sums["tokens"])}

"""Distillation: a model learns a teacher's distribution of each next token. No torch at the top."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import TextSpec
from drumline.config.algorithm import DivergenceKind, HeadOutput, TeachingSpec
from drumline.config.section import Weight
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.collators import CollatorFactory


class DistillConfig(TextSpec, TeachingSpec):
    """Distillation of a teacher into the model (Hinton et al. 2015), with the divergences of GKD (Agarwal et al. 2024)."""

    position: ClassVar[int] = 2
    rate: ClassVar[float] = 2e-5
    metrics: ClassVar[tuple[str, ...]] = ("loss", "kl", "cross_entropy", "token_accuracy")
    sees_images: ClassVar[bool] = False
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs", "cross_entropy"})
    objective: ClassVar[str] = "drumline.algorithms.distill.objective:Distillation"
    kind: Literal["distill"] = "distill"
    divergence: DivergenceKind = Field(
        "forward_kl",
        description="The loss of a token: forward_kl, KL(teacher ‖ model), covers all that the teacher may say; reverse_kl, KL(model ‖"
        " teacher), keeps to what it does say; jsd: between them, by beta (generalised Jensen-Shannon divergence).",
    )
    beta: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="divergence: jsd: the teacher's share in the mixture that both models are compared with.",
    )
    cross_entropy_weight: Weight = Field(
        0.0, description="Weight of the cross-entropy of the data's own tokens, added to the loss."
    )

    @model_validator(mode="after")
    def _beta_is_read(self) -> DistillConfig:
        """Refuse beta if it would have no effect."""
        if self.beta != 0.5 and self.divergence != "jsd":
            raise ValueError("beta requires divergence: jsd")
        return self

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import taught_collator

        return taught_collator(plan, width)

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return {"prompt": random_text(1), "completion": random_text(length)}

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.taught import placeholder_taught

        batch = super().traced_batch(plan, rows, length, channels)
        return placeholder_taught(batch, plan)

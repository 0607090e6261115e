"""Distillation: a model learns a teacher's distribution of each next token. No torch at the top."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import TextSpec
from drumline.config.algorithm import HeadOutput, TeachingSpec
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
    log_probs: Literal["precomputed", "live"] = Field(
        "precomputed",
        description="The teacher's log-probs: precomputed once before training and kept beside the token cache, or live in"
        " every step, which top_k: 0 requires.",
    )
    cross_entropy_weight: Weight = Field(
        0.0, description="Weight of the cross-entropy of the data's own tokens, added to the loss."
    )

    @model_validator(mode="after")
    def _keeps_few_numbers(self) -> DistillConfig:
        """Refuse to keep a whole vocabulary for each token."""
        if self.top_k == 0 and self.log_probs == "precomputed":
            raise ValueError(
                "top_k: 0 is the whole vocabulary for each token, which no disk holds: set log_probs: live, or a top_k above 0"
            )
        return self

    @model_validator(mode="after")
    def _asks_servers_once(self) -> DistillConfig:
        """Refuse to ask servers in every step: the rows do not change."""
        if self.served_teacher is not None and self.log_probs == "live":
            raise ValueError(
                "a server is asked once, before the first step: leave log_probs at precomputed"
            )
        return self

    @property
    def has_second_loss(self) -> bool:
        """Whether the rows' own tokens are learned, too: the key `cross_entropy_weight`."""
        return self.cross_entropy_weight > 0

    @property
    def asks_teacher_live(self) -> bool:
        """Whether the teacher answers in every step: the key `log_probs`."""
        return self.log_probs == "live"

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import taught_collator

        return taught_collator(plan, width)

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return {"prompt": random_text(1), "completion": random_text(length)}

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.taught import TaughtBatch, placeholder_teacher

        batch = super().traced_batch(plan, rows, length, channels)
        return TaughtBatch(**vars(batch), teacher=placeholder_teacher(batch, plan))

"""Kahneman-Tversky optimisation: from answers that are labelled good or bad, one by one. No torch at the top."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import JudgedSpec
from drumline.config.algorithm import ReferencedSpec, ReferenceKind, Trained
from drumline.config.model import Model
from drumline.config.section import Above0


class KTOConfig(JudgedSpec, ReferencedSpec):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024): from single answers that are labelled good or bad."""

    position: ClassVar[int] = 3
    rate: ClassVar[float] = 5e-7
    metrics: ClassVar[tuple[str, ...]] = (
        "loss",
        "kl",
        "margin",
        "reward_chosen",
        "reward_rejected",
        "log_prob_chosen",
        "log_prob_rejected",
    )
    objective: ClassVar[str] = "drumline.algorithms.kto.objective:build"
    kind: Literal["kto"] = "kto"
    beta: Above0 = Field(0.1, description="How closely the policy is held to the reference.")
    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="kto: rewards are compared with a KL that is estimated over the global batch."
        " apo_zero_unpaired: with 0 (D'Oosterlinck et al. 2024), which needs no KL.",
    )
    desirable_weight: Above0 = Field(1.0, description="Weight of the losses of good answers.")
    undesirable_weight: Above0 = Field(1.0, description="Weight of the losses of bad answers.")
    reference: Literal["auto", "precomputed", "live", "adapter"] = Field(
        "auto",
        description="Log-probs of the reference: live from a frozen copy, from the policy with its"
        " adapter switched off, or (loss: apo_zero_unpaired) precomputed once before training."
        " auto: adapter under LoRA, else live, and precomputed for apo_zero_unpaired.",
    )
    reference_model: Model | None = Field(
        None, description="Another reference than the model that training starts from."
    )

    @model_validator(mode="after")
    def _reference_is_known(self) -> KTOConfig:
        """Refuse precomputed log-probabilities for `kto`, which pairs prompts and answers in a batch."""
        if self.reference == "precomputed" and self.loss == "kto":
            raise ValueError(
                "reference: precomputed requires loss: apo_zero_unpaired; the KL of kto is of answers"
                " that change with each batch: use live"
            )
        return self

    @property
    def needs_mismatched_pairs(self) -> bool:
        """Whether a batch also has each prompt with the answer of another sample, for the KL."""
        return self.loss == "kto"

    @property
    def extra_forwards(self) -> int:
        """The number of first passes of the policy in a step: 1 for the KL, else 0."""
        if self.loss == "kto":
            return 1
        return 0

    @property
    def reference_forwards(self) -> int:
        """The number of forward passes of the reference in a step: one more for the KL's answers."""
        return 1 + self.extra_forwards

    def reference_of(self, config: Trained) -> ReferenceKind:
        """Return the kind of reference. It is never `precomputed` for the KL, but `live`."""
        kind = super().reference_of(config)
        if kind == "precomputed" and self.loss == "kto":
            return "live"
        return kind

"""Direct preference optimisation and its kin. No torch at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import PairSpec
from drumline.core.algorithm import Asked, ChunkedSpec, ReferencedSpec
from drumline.core.model import ModelConfig
from drumline.core.section import Above0, Weight

if TYPE_CHECKING:
    from drumline.algorithms.dpo.objective import DPO


class DPOConfig(PairSpec, ReferencedSpec, ChunkedSpec):
    """Direct preference optimisation (Rafailov et al. 2023) and its kin."""

    position: ClassVar[int] = 3
    rate: ClassVar[float] = 5e-7
    metrics: ClassVar[tuple[str, ...]] = (*PairSpec.metrics, "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected")
    asks: ClassVar[frozenset[Asked]] = frozenset({"log_probs"})
    kind: Literal["dpo"] = "dpo"
    beta: Above0 = Field(0.1, description="How closely the policy is held to the reference.")
    loss: Literal["sigmoid", "ipo", "hinge"] = Field(
        "sigmoid", description="sigmoid: DPO; ipo: (Δ − 1/2β)² (Azar et al. 2023); hinge: max(0, 1 − βΔ) (SLiC, Zhao et al. 2023)."
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="sigmoid: assumed share of swapped pairs (conservative DPO).")
    sft_weight: Weight = Field(0.0, description="Weight of the chosen answer's mean negative log-likelihood.")
    reference: Literal["auto", "precomputed", "live", "adapter"] = Field(
        "auto",
        description="Log-probs of the reference: precomputed once before training and kept on disk, live from a frozen copy, or from the"
        " policy with its adapter switched off. auto: adapter under LoRA, else precomputed.",
    )
    reference_model: ModelConfig | None = Field(None, description="Another reference than the model that training starts from.")

    @model_validator(mode="after")
    def _smooths_sigmoid(self) -> DPOConfig:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError("label_smoothing is of loss: sigmoid")
        return self

    def build(self) -> DPO:
        from drumline.algorithms.dpo.objective import DPO

        return DPO(
            beta=self.beta,
            loss={self.loss: 1.0},
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            chunk=self.loss_chunk,
        )

"""Direct preference optimisation and its variants. No torch at the top."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import AnswerPairSpec
from drumline.config.algorithm import ReferencedSpec
from drumline.config.model import Model
from drumline.config.section import MOST_WEIGHT, Above0, Weight

Loss = Literal[
    "sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "aot", "aot_unpaired",
]  # fmt: skip
# Losses that read `label_smoothing`. exo_pair requires it: its formula has log ε.
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
# Losses that sort the pairs of the global batch, in a first pass.
SORTED = ("aot", "aot_unpaired")
# Losses of Δ or Δ̄ alone, in which `f_divergence` may transform the scores.
OF_DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


class DPOConfig(AnswerPairSpec, ReferencedSpec):
    """Direct preference optimisation (Rafailov et al. 2023) and its variants."""

    position: ClassVar[int] = 3
    rate: ClassVar[float] = 5e-7
    objective: ClassVar[str] = "drumline.algorithms.dpo.objective:build"
    kind: Literal["dpo"] = "dpo"
    beta: Above0 = Field(0.1, description="How closely the policy is held to the reference.")
    loss: Loss = Field(
        "sigmoid",
        description="sigmoid: DPO; hinge: SLiC; ipo, sigmoid_norm: of scores divided by the answers' tokens; robust: to swapped pairs;"
        " exo_pair: EXO; nca_pair: NCA; bco_pair: BCO without its shift; sppo_hard: SPPO; apo_zero, apo_down: APO; discopop: DiscoPOP; aot,"
        " aot_unpaired: by rank in the global batch. Formulas and papers: drumline/algorithms/pair_losses.py.",
    )
    loss_weights: dict[Loss, Above0] | None = Field(
        None,
        min_length=1,
        description="A weighted sum of losses in place of `loss`: {sigmoid: 0.8, bco_pair: 0.2}.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description=f"{', '.join(SMOOTHED)}: assumed share of swapped pairs (conservative DPO).",
    )
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = Field(
        "reverse_kl",
        description="What the policy is held to the reference by (f-DPO, Wang et al. 2024), in losses of a difference of scores.",
    )
    f_alpha: float = Field(
        0.5, ge=-MOST_WEIGHT, le=MOST_WEIGHT, description="f_divergence: alpha_divergence: its α."
    )
    discopop_tau: Above0 = Field(0.05, description="loss: discopop: its temperature τ.")
    sft_weight: Weight = Field(
        0.0, description="Weight of the chosen answer's mean negative log-likelihood."
    )
    reference: Literal["auto", "precomputed", "live", "adapter"] = Field(
        "auto",
        description="Log-probs of the reference: precomputed once before training and kept on disk, live from a frozen copy, or from the"
        " policy with its adapter switched off. auto: adapter under LoRA, else precomputed.",
    )
    reference_model: Model | None = Field(
        None, description="Another reference than the model that training starts from."
    )

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each loss, by name."""
        if self.loss_weights:
            return {str(kind): weight for kind, weight in self.loss_weights.items()}
        # One loss is a sum of one, with the weight 1.
        return {self.loss: 1.0}

    @model_validator(mode="after")
    def _options_match_losses(self) -> DPOConfig:
        """Refuse label_smoothing, f_divergence and loss if they would have no effect."""
        losses = self.weights.keys()
        if self.loss_weights and self.loss != "sigmoid":
            raise ValueError("loss_weights names the losses: leave out loss")
        if self.label_smoothing and losses.isdisjoint(SMOOTHED):
            raise ValueError(f"label_smoothing requires loss: {' or '.join(SMOOTHED)}")
        if "exo_pair" in losses and not self.label_smoothing:
            raise ValueError(
                "loss: exo_pair requires label_smoothing above 0; its authors take 0.001"
            )
        if self.f_divergence != "reverse_kl" and not losses <= set(OF_DIFFERENCES):
            raise ValueError(f"f_divergence requires loss: {' or '.join(OF_DIFFERENCES)}")
        return self

    @property
    def extra_forwards(self) -> int:
        """The number of first passes of the policy in a step: 1 if a loss sorts the pairs, else 0."""
        if any(kind in SORTED for kind in self.weights):
            return 1
        return 0

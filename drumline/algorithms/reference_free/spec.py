"""Odds ratio and simple preference optimisation: from pairs, without a reference model. No torch at the top."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.algorithms.specs import AnswerPairSpec
from drumline.config.section import Above0, Weight


class ORPOConfig(AnswerPairSpec):
    """Odds ratio preference optimisation (Hong et al. 2024): likelihood of the chosen answer, and odds against the rejected one."""

    position: ClassVar[int] = 3
    rate: ClassVar[float] = 8e-6
    objective: ClassVar[str] = "drumline.algorithms.reference_free.objective:orpo"
    kind: Literal["orpo"] = "orpo"
    beta: Above0 = Field(
        0.1,
        description="Weight of the odds ratio beside the chosen answer's likelihood: λ of the paper.",
    )


class SimPOConfig(AnswerPairSpec):
    """Simple preference optimisation (Meng et al. 2024): answers' mean log-probabilities, a target margin apart."""

    position: ClassVar[int] = 4
    rate: ClassVar[float] = 1e-6
    objective: ClassVar[str] = "drumline.algorithms.reference_free.objective:simpo"
    kind: Literal["simpo"] = "simpo"
    beta: Above0 = Field(
        2.0,
        description="How much a difference of mean log-probabilities counts; the authors take 2.0 to 2.5.",
    )
    gamma: Weight = Field(
        1.0, description="Target margin of β × that difference; the authors take 0.3 to 1.6."
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Assumed share of swapped pairs.")
    sft_weight: Weight = Field(
        0.0,
        description="Weight of the chosen answer's mean negative log-likelihood (CPO-SimPO; TRL's cpo_alpha).",
    )

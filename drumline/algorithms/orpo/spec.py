"""Odds ratio preference optimisation: from pairs, without a reference model. No torch at the top."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.algorithms.specs import AnswerPairSpec
from drumline.core.section import Above0


class ORPOConfig(AnswerPairSpec):
    """Odds ratio preference optimisation (Hong et al. 2024): likelihood of the chosen answer, and odds against the rejected one."""

    position: ClassVar[int] = 4
    rate: ClassVar[float] = 8e-6
    objective: ClassVar[str] = "drumline.algorithms.reference_free:orpo"
    kind: Literal["orpo"] = "orpo"
    beta: Above0 = Field(0.1, description="Weight of the odds ratio beside the chosen answer's likelihood: λ of the paper.")

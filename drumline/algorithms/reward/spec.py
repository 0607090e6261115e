"""Reward models from preference pairs. No torch at the top."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.algorithms.specs import PairSpec
from drumline.config.algorithm import HeadOutput
from drumline.config.model import Head
from drumline.config.section import MOST_WEIGHT, Weight


class RewardModelConfig(PairSpec):
    """Bradley-Terry (1952) on pairs: −log σ(r(chosen) − r(rejected) − margin); r is a linear head on the last token."""

    position: ClassVar[int] = 2
    sees_images: ClassVar[bool] = True
    rate: ClassVar[float] = 1e-5
    metrics: ClassVar[tuple[str, ...]] = (
        *PairSpec.metrics,
        "chosen",
        "rejected",
        "chosen_std",
        "rejected_std",
        "calibration_error",
    )
    writes: ClassVar[bool] = False
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset()
    objective: ClassVar[str] = "drumline.algorithms.reward.objective:RewardModel"
    kind: Literal["reward"] = "reward"
    margin: Weight = Field(
        0.0,
        description="By how much chosen should lie above rejected; a `margin` column of the data overrides it.",
    )
    center: float = Field(
        0.0,
        ge=0,
        le=MOST_WEIGHT,
        description="Weight of (r(chosen) + r(rejected))², which keeps rewards around zero (Eisenstein et al. 2023).",
    )

    @property
    def head(self) -> Head:
        return "score"

"""Group-relative policy optimisation and its kin. No torch at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from drumline.algorithms.specs import PromptSpec
from drumline.core.section import MOST_WEIGHT, Above0

if TYPE_CHECKING:
    from drumline.algorithms.grpo.objective import GRPO


class GRPOConfig(PromptSpec):
    """Group-relative policy optimisation (Shao et al. 2024), and its kin: Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025)."""

    position: ClassVar[int] = 5
    kind: Literal["grpo"] = "grpo"
    group_size: int = Field(
        8, gt=0, le=10**6, description="Completions of each prompt, 2 or more; an advantage is a reward minus the mean reward of its group."
    )
    scale: Literal["group", "batch", "none"] = Field(
        "group", description="Advantages are divided by the rewards' standard deviation in the group, in the rollout, or not (Dr. GRPO)."
    )
    normalize: Literal["sequence", "token", "constant"] = Field(
        "token",
        description="A token's weight: 1/its completion's length (GRPO), 1/all tokens of the batch (DAPO), or 1/max_new_tokens (Dr. GRPO).",
    )
    clip_high: Above0 | None = Field(None, description="Upper clip (DAPO's clip-higher: 0.28); null: as `clip`.")
    dynamic_sampling: int = Field(
        0,
        ge=0,
        le=10**4,
        description="Roll out again, at most this often, until enough groups have rewards that differ (DAPO). 0: take groups as they are.",
    )
    importance: Literal["none", "token", "sequence"] = Field(
        "none", description="Correct for a generator that is not quite the policy: multiply by min(π_old/π_generator, importance_cap)."
    )
    importance_cap: float = Field(2.0, gt=1, le=MOST_WEIGHT, description="importance: the weight is truncated here.")

    @field_validator("group_size")
    @classmethod
    def _has_peers(cls, size: int) -> int:
        if size < 2:
            raise ValueError("the only episode of a prompt is its group's mean, and learns nothing: take 2 or more, or algorithm.kind: ppo")
        return size

    @property
    def on_policy(self) -> bool:
        return super().on_policy and self.importance == "none"

    @property
    def rounds(self) -> int:
        return 1 + self.dynamic_sampling

    def credited(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        from drumline.algorithms.grpo.objective import credited

        return credited(episodes, rewards_N, self.group_size, self.scale).weighted(self.normalize, self.new_tokens, ~rewards_N.isnan())

    def build(self) -> GRPO:
        from drumline.algorithms.grpo.objective import GRPO
        from drumline.algorithms.policy import policy_options

        return GRPO(
            clip_low=self.clip,
            clip_high=self.clip if self.clip_high is None else self.clip_high,
            importance=self.importance,
            importance_cap=self.importance_cap,
            **policy_options(self),
        )

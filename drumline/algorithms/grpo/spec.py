"""Group-relative policy optimisation and its variants. No torch at the top."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from drumline.algorithms.specs import PromptSpec
from drumline.config.algorithm import MOST_AHEAD
from drumline.config.section import MOST_WEIGHT, Above0, Weight


class GRPOConfig(PromptSpec):
    """Group-relative policy optimisation (Shao et al. 2024), with Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et
    al. 2025), CISPO (MiniMax-M1, 2025), RLOO (Ahmadian et al. 2024)."""

    position: ClassVar[int] = 5
    sees_images: ClassVar[bool] = True
    shares_prompts: ClassVar[bool] = True
    objective: ClassVar[str] = "drumline.algorithms.grpo.objective:GRPO"
    kind: Literal["grpo"] = "grpo"
    group_size: int = Field(
        8,
        gt=0,
        le=10**6,
        description="Completions of each prompt, 2 or more; an advantage is a reward minus the mean reward of its group.",
    )
    estimator: Literal["grpo", "rloo"] = Field(
        "grpo",
        description="An advantage is a reward minus the mean of its group, or (rloo) of the others of its group. rloo also has other"
        " defaults: scale none, ratio product, normalize sequence.",
    )
    scale: Literal["group", "batch", "none"] = Field(
        "group",
        description="Advantages are divided by the rewards' standard deviation in the group, in the rollout, or not (Dr. GRPO).",
    )
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description="What a token's advantage compares within its group. episode: the reward of the episode. turn: the sum of rewards from"
        " the token's turn to the end; rewards of the environment belong to their turns, all others to the last one (advantages by turn:"
        " MT-GRPO, Zeng et al. 2025; with later rewards: GTPO, Ding et al. 2025).",
    )
    normalize: Literal["sequence", "token", "constant"] = Field(
        "token",
        description="A token's weight: 1/its completion's length (GRPO), 1/all tokens of the batch (DAPO), or 1/max_new_tokens, with an"
        " environment 1/max_tokens (Dr. GRPO).",
    )
    ratio: Literal["token", "sequence", "product"] = Field(
        "token",
        description="The probability ratio that is clipped: of each token; the geometric mean over the completion (GSPO); or of the"
        " completion as a whole (RLOO). TRL's importance_sampling_level.",
    )
    surrogate: Literal["clip", "cispo"] = Field(
        "clip",
        description="clip: PPO's. cispo: log-probabilities weighted by the ratio, which is cut at 1 + clip_high and has no gradient.",
    )
    clip_high: Above0 | None = Field(
        None, description="Upper clip (DAPO's clip-higher: 0.28); null: as `clip`."
    )
    delta: Above0 | None = Field(
        None,
        description="Two-sided clip (INTELLECT-2): the ratio is at most this for negative advantages too; above 1 + clip_high. null: off.",
    )
    entropy_weight: Weight = Field(0.0, description="Weight of the entropy bonus.")
    mask_truncated: bool = Field(
        False,
        description="A completion that was cut before its end is not learned from, and counts in no mean of the loss (DAPO). Its reward"
        " still counts in the mean of its group.",
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        le=10**4,
        description="Roll out again, at most this often, until enough groups have rewards that differ (DAPO). 0: take groups as they are.",
    )
    importance: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Correct for a generator that is not quite the policy: multiply a token's loss by the weight π_old/π_generator of the"
        " token, or (sequence) of its whole completion. importance_cap bounds the weight.",
    )
    importance_bound: Literal["truncate", "mask"] = Field(
        "truncate",
        description="importance: what a weight above importance_cap becomes. truncate: importance_cap (truncated importance sampling,"
        " Yao et al. 2025). mask: 0, so that the token or completion teaches nothing, but still counts in the denominator of the loss"
        " (masked importance sampling, Liu et al. 2025, When Speed Kills Stability).",
    )
    ahead: int = Field(
        0,
        ge=0,
        le=MOST_AHEAD,
        description="How many rollouts are sampled ahead, while an earlier one is learned from. The weights that sample a rollout are"
        " then older by as many rollouts. Requires `importance`, which is then token if it is not set. With an environment each rank plays"
        " its episodes in the background. gkd and online_dpo have the key too. ppo does not: its advantages sum errors of values over later"
        " tokens, for which a weight of each token does not correct. 0: nothing is sampled ahead.",
    )
    partial: bool = Field(
        False,
        description="Continue long completions across weight changes: each is sampled in `ahead` segments of max_new_tokens / ahead"
        " tokens, the next one by newer weights, so that learning waits for a segment and not for the longest completion (partial"
        " rollouts: Kimi k1.5, 2025). Requires `ahead` 2 or more, and no environment.",
    )
    importance_cap: float = Field(
        2.0, gt=1, le=MOST_WEIGHT, description="importance: the largest weight."
    )

    @field_validator("group_size")
    @classmethod
    def _has_peers(cls, size: int) -> int:
        """Refuse groups of one, whose advantages are all 0."""
        if size < 2:
            raise ValueError(
                "the only episode of a prompt is its group's mean, and learns nothing: take 2 or more, or algorithm.kind: ppo"
            )
        return size

    @model_validator(mode="before")
    @classmethod
    def _rloo_defaults(cls, values: Any) -> Any:
        """Give `estimator: rloo` the defaults of its paper; the user's own values override them."""
        if isinstance(values, dict) and values.get("estimator") == "rloo":
            return {"scale": "none", "ratio": "product", "normalize": "sequence", **values}
        return values

    @model_validator(mode="before")
    @classmethod
    def _ahead_is_corrected(cls, values: Any) -> Any:
        """Correct for older weights by default if rollouts are sampled ahead."""
        if isinstance(values, dict) and values.get("ahead"):
            return {"importance": "token", **values}
        return values

    @model_validator(mode="after")
    def _refuse_bound_without_importance(self) -> GRPOConfig:
        """Refuse `importance_bound` if there is no weight to bound."""
        if self.importance == "none" and self.importance_bound != "truncate":
            raise ValueError("importance_bound is of importance: set importance: token or sequence")
        return self

    @model_validator(mode="after")
    def _may_go_ahead(self) -> GRPOConfig:
        """Refuse options that contradict `ahead`."""
        if self.ahead and self.importance == "none":
            raise ValueError(
                "ahead samples by older weights, which importance: token or sequence corrects"
            )
        if self.ahead and self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling chooses prompts by rewards, which a rollout that is under way has not got; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _has_segments(self) -> GRPOConfig:
        """Refuse `partial` if completions would have a single segment."""
        if self.partial and self.ahead < 2:
            raise ValueError(
                "partial samples a completion in as many segments as ahead says: set ahead to 2 or more, or take partial out"
            )
        return self

    @model_validator(mode="after")
    def _cuts_above_the_clip(self) -> GRPOConfig:
        """Refuse a `delta` that would clip ratios within the bounds of the clip."""
        if self.delta is None:
            return self
        if self.surrogate == "cispo" or self.delta <= 1 + self.upper_clip:
            raise ValueError("delta requires surrogate: clip, and is above 1 + clip_high")
        return self

    @property
    def upper_clip(self) -> float:
        """How far above 1 the ratio may be before it is clipped. The lower bound is 1 − `clip`."""
        if self.clip_high is None:
            return self.clip
        return self.clip_high

    @property
    def on_policy(self) -> bool:
        """Whether π_old is the policy of the step itself.

        This requires that no step lies between a rollout and its training, and that `importance` does
        not need the log-probs of the rollout's policy.
        """
        return super().on_policy and self.importance == "none"

    @property
    def lookahead(self) -> int:
        """The number of rollouts that may be pending while another one is trained on: the key `ahead`."""
        return self.ahead

    @property
    def segments(self) -> int:
        """The most segments of a completion: `ahead` with `partial`, else 1."""
        if self.partial:
            return self.ahead
        return 1

    @property
    def rounds(self) -> int:
        """The most rounds of sampling for one rollout: the first, and those of `dynamic_sampling`."""
        return 1 + self.dynamic_sampling

    @property
    def credits_turns(self) -> bool:
        """Whether each turn of an episode has an advantage of its own."""
        return self.credit == "turn"

    def assign_credit(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """Return the episodes with advantages and weights.

        `cost_NM` is not used, as the divergence is in the loss. Episodes with an unknown reward (NaN) get
        the weight 0. With `mask_truncated` so do episodes that were cut; their rewards still count in
        the mean of their group.
        """
        from drumline.algorithms.credit import add_group_advantages, add_turn_advantages

        is_trained_N = ~rewards_N.isnan()
        if self.mask_truncated:
            is_trained_N = is_trained_N & episodes.ended_N
        add_advantages = add_group_advantages
        if self.credits_turns:
            add_advantages = add_turn_advantages
        episodes = add_advantages(episodes, rewards_N, self.group_size, self.scale, self.estimator)
        return episodes.add_loss_weights(self.normalize, self.new_tokens, is_trained_N)

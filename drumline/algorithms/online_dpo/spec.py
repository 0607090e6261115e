"""Online direct preference optimisation: pairs of completions that the policy samples. No torch at the top."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import PromptRowSpec
from drumline.config.algorithm import (
    MOST_AHEAD,
    AuxiliaryModel,
    HeadOutput,
    RewardedSpec,
    Trained,
    frozen_reference,
)
from drumline.config.model import Model
from drumline.config.section import Above0
from drumline.plan.plan import Plan


class OnlineDPOConfig(PromptRowSpec, RewardedSpec):
    """Online direct preference optimisation (Guo et al. 2024): of the completions that the model samples for a prompt, those with the
    highest and the lowest reward are a pair, from which it learns as DPO does."""

    position: ClassVar[int] = 5
    shares_prompts: ClassVar[bool] = True
    rate: ClassVar[float] = 5e-7
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs"})
    objective: ClassVar[str] = "drumline.algorithms.online_dpo.objective:build"
    kind: Literal["online_dpo"] = "online_dpo"
    group_size: int = Field(
        2,
        ge=2,
        le=10**6,
        description="Completions of each prompt. Those with the highest and the lowest reward are its pair. If all rewards are equal, or"
        " fewer than two are known, the prompt teaches nothing.",
    )
    beta: Above0 = Field(0.1, description="How closely the policy is held to the reference.")
    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid",
        description="The loss of a pair. sigmoid: DPO; hinge: SLiC (Zhao et al. 2023); ipo: of whole answers, as Azar et al. 2023 have it,"
        " where dpo divides scores by tokens.",
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        le=10**4,
        description="Sample again, at most this often, until enough groups have rewards that differ. 0: take groups as they are.",
    )
    ahead: int = Field(
        0,
        ge=0,
        le=MOST_AHEAD,
        description="How many rollouts are sampled ahead, while an earlier one is learned from. The weights that sample a pair are then"
        " older by as many rollouts. DPO's loss is of any two completions, so nothing corrects for that (Noukhovitch et al. 2024,"
        " Asynchronous RLHF). 0: nothing is sampled ahead.",
    )
    reference_model: Model | None = Field(
        None,
        description="Another reference than the model that training starts from; null: that model, under LoRA without its adapter.",
    )

    @model_validator(mode="after")
    def _knows_rewards(self) -> OnlineDPOConfig:
        """Refuse `ahead` if prompts are chosen by rewards that are not known yet."""
        if self.ahead and self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling chooses prompts by rewards, which a rollout that is under way has not got: leave it or ahead out"
            )
        return self

    @property
    def lookahead(self) -> int:
        """The number of rollouts that may be pending while another one is trained on: the key `ahead`."""
        return self.ahead

    @property
    def rows_per_sample(self) -> int:
        """The two completions of a pair are two rows of a batch."""
        return 2

    @property
    def samples_of_group(self) -> int:
        """1: a group gives at most one pair."""
        return 1

    @property
    def rounds(self) -> int:
        """The most rounds of sampling for one rollout: the first, and those of `dynamic_sampling`."""
        return 1 + self.dynamic_sampling

    @property
    def needs_old_log_probs(self) -> bool:
        """False: the loss compares the policy with the reference, and not with its own past."""
        return False

    @property
    def has_reference(self) -> bool:
        """True: scores are differences from a reference."""
        return True

    @property
    def measures_divergence(self) -> bool:
        """False: the loss computes the divergence itself, so no extra forward pass is needed."""
        return False

    @property
    def loss_temperature(self) -> float:
        """1: scores use log-probs at temperature 1, whatever temperature sampled the completions."""
        return 1.0

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.batches import placeholder_episodes

        return placeholder_episodes(rows, length)

    def learned_episodes(self, rewards_N: Any, tokens_N: Any) -> list[int]:
        """Return the indices of the chosen episodes of all pairs, then those of the rejected ones.

        If no group has a pair, the first two episodes stand in for one, with the weight 0.
        """
        from drumline.algorithms.online_dpo.pairing import choose_pairs

        chosen, rejected = choose_pairs(rewards_N, tokens_N, self.group_size)
        if not chosen:
            return [0, 1]
        return chosen + rejected

    def assign_credit(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """Return the episodes with weights, ½ for each episode of a pair. `cost_NM` is not used."""
        from drumline.algorithms.online_dpo.pairing import weigh_pairs

        return weigh_pairs(episodes, rewards_N)

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        """Return role → model: the reference, and the models of rewards of kind model."""
        where = "algorithm.reference_model"
        reference = frozen_reference(config, self.reference_model, where)
        return reference | super().auxiliary_models(config)

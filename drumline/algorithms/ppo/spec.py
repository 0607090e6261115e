"""Proximal policy optimisation. No torch at the top."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.algorithms.specs import PromptSpec
from drumline.config.algorithm import AuxiliaryModel, Trained
from drumline.config.model import Head, Model
from drumline.config.rollouts import KLConfig
from drumline.config.section import Above0, RefusesNull, Weight

# Defaults that differ from KLConfig's own.
KL_DEFAULTS: dict[str, Any] = {
    "coefficient": 0.05,
    "estimator": "k1",
}


class PPOConfig(PromptSpec):
    """Proximal policy optimisation with a learned value (Schulman et al. 2017; on language models Ziegler et al. 2019)."""

    position: ClassVar[int] = 4
    objective: ClassVar[str] = "drumline.algorithms.ppo.objective:PPO"
    kind: Literal["ppo"] = "ppo"
    group_size: int = Field(1, gt=0, le=10**6, description="Completions of each prompt.")
    epochs: int = Field(4, gt=0, le=10**4, description="Passes over the episodes of a rollout.")
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description="Where the environment's rewards are placed. episode: at the last token of the episode. turn: each at the last token"
        " of the turn that it was given for. All other rewards are always at the end of the episode.",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(
        0.95,
        ge=0,
        le=1,
        description="λ of generalised advantage estimation (Schulman et al. 2016).",
    )
    value_clip: Above0 | None = Field(
        0.2, description="A value may move this far from the rollout's; null: not clipped."
    )
    value_weight: Above0 = Field(0.1, description="Weight of the value's loss beside the policy's.")
    value: Literal["head", "separate"] = Field(
        "head", description="head: linear, on the policy's last hidden states; separate: a model."
    )
    value_model: Model | None = Field(
        None, description="separate: where the value starts from; null: the policy's own start."
    )
    value_lr: float | None = Field(
        None, gt=0, le=1000, description="separate: its peak learning rate; null: the policy's."
    )
    whiten: bool = Field(
        True,
        description="Advantages to mean 0, variance 1 over all tokens of the rollout, on all ranks.",
    )
    entropy_weight: Weight = Field(0.0, description="Weight of the entropy bonus.")
    kl: Annotated[
        KLConfig, RefusesNull("{coefficient: 0} for none, or leave it out for the default")
    ] = Field(
        default_factory=lambda: KLConfig.model_validate(KL_DEFAULTS),
        description="Divergence from a reference model, as a cost.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rest_of_kl(cls, values: Any) -> Any:
        """Fill a partly given section `kl` with PPO's own defaults."""
        if not isinstance(values, dict) or not isinstance(values.get("kl"), dict):
            return values
        # Before validation, which would fill the rest with KLConfig's own defaults.
        kl = {**KL_DEFAULTS, **values["kl"]}
        return {**values, "kl": kl}

    @model_validator(mode="after")
    def _has_a_value(self) -> PPOConfig:
        """Refuse options of a separate value model if the value is a head of the policy."""
        if self.value == "separate":
            return self
        for name in ("value_model", "value_lr"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is of a value model of its own: set value: separate, or take it out"
                )
        return self

    @property
    def head(self) -> Head:
        """The head of the policy: `valued` has a value beside the logits."""
        if self.value == "head":
            return "valued"
        return "lm"

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        """Return role → model of the reference, and of the value if that is separate."""
        models = super().auxiliary_models(config)
        if self.value == "separate":
            # Value and policy share one schedule; this is the ratio of their learning rates.
            lr_ratio = 1.0
            if self.value_lr is not None:
                lr_ratio = self.value_lr / config.optimizer.lr
            models["value"] = AuxiliaryModel(
                self.value_model or config.model,
                "algorithm.value_model",
                "score",
                trainable=True,
                lr_ratio=lr_ratio,
            )
        return models

    @property
    def credits_turns(self) -> bool:
        """Whether the last token of each turn gets the environment's reward for it."""
        return self.credit == "turn"

    def assign_credit(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """Return the episodes with advantages, returns and weights of tokens (`add_gae_advantages`)."""
        from drumline.algorithms.credit import add_gae_advantages

        return add_gae_advantages(
            episodes,
            rewards_N,
            cost_NM,
            self.gamma,
            self.lam,
            self.whiten,
            self.credits_turns,
        )

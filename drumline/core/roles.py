"""Which models an algorithm needs besides the one that learns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumline.core.algorithms import ROLLOUT, DPOConfig, ModelReward, PPOConfig
from drumline.core.config import Config
from drumline.core.model import ModelConfig

ReferenceKind = Literal["none", "precomputed", "live", "adapter"]


def reference_kind(config: Config) -> ReferenceKind:
    """Where DPO has the reference's log-probabilities from; `auto` resolved."""
    algorithm = config.algorithm
    if not isinstance(algorithm, DPOConfig):
        return "none"
    if algorithm.reference != "auto":
        return algorithm.reference
    return "adapter" if config.adapter.kind == "lora" and algorithm.reference_model is None else "precomputed"


@dataclass(frozen=True)
class Wanted:
    """A model besides the policy. `where`: the key of the YAML that it comes from."""

    model: ModelConfig
    where: str
    head: Literal["lm", "score"] = "lm"
    learns: bool = False
    lr_ratio: float = 1.0


def wanted_roles(config: Config) -> dict[str, Wanted]:
    """Name → model: `reference`, `value`, and `reward`, `reward2`, … for rewards by models, in the order of the config.

    Where the reference is the policy without its adapter there is no such role.
    """
    algorithm, roles = config.algorithm, dict[str, Wanted]()
    if isinstance(algorithm, DPOConfig) and reference_kind(config) != "adapter":
        roles["reference"] = Wanted(algorithm.reference_model or config.model, "algorithm.reference_model")
    if not isinstance(algorithm, ROLLOUT):
        return roles
    other = algorithm.kl.reference_model
    if algorithm.kl.coefficient > 0 and (other is not None or config.adapter.kind != "lora"):
        roles["reference"] = Wanted(other or config.model, "algorithm.kl.reference_model")
    if isinstance(algorithm, PPOConfig) and algorithm.value == "separate":
        ratio = 1.0 if algorithm.value_lr is None else algorithm.value_lr / config.optimizer.lr
        roles["value"] = Wanted(algorithm.value_model or config.model, "algorithm.value_model", "score", learns=True, lr_ratio=ratio)
    for index, reward in enumerate(algorithm.rewards):
        if isinstance(reward, ModelReward):
            number = sum(name.startswith("reward") for name in roles) + 1
            name = "reward" if number == 1 else f"reward{number}"
            roles[name] = Wanted(reward.model, f"algorithm.rewards.{index}.model", "score")
    return roles

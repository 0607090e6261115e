"""Which objective a config asks for."""

from __future__ import annotations

from typing import Any

from drumline.algorithms.base import Algorithm
from drumline.algorithms.classify import Classify
from drumline.algorithms.dpo import DPO
from drumline.algorithms.grpo import GRPO
from drumline.algorithms.policy import KLController
from drumline.algorithms.ppo import PPO
from drumline.algorithms.reward import RewardModel
from drumline.algorithms.tokens import NextToken
from drumline.core.algorithms import ClassifyConfig, DPOConfig, GRPOConfig, PPOConfig, PretrainConfig, RewardModelConfig, SFTConfig
from drumline.core.config import Config


def build_algorithm(config: Config) -> Algorithm:
    algorithm = config.algorithm
    if isinstance(algorithm, PretrainConfig | SFTConfig):
        return NextToken(algorithm.loss_chunk, answers=algorithm.kind == "sft")
    if isinstance(algorithm, ClassifyConfig):
        return Classify(algorithm.label_smoothing)
    if isinstance(algorithm, RewardModelConfig):
        return RewardModel(algorithm.margin, algorithm.center)
    if isinstance(algorithm, DPOConfig):
        return DPO(
            beta=algorithm.beta,
            loss={algorithm.loss: 1.0},
            label_smoothing=algorithm.label_smoothing,
            sft_weight=algorithm.sft_weight,
            chunk=algorithm.loss_chunk,
        )
    raise AssertionError(algorithm.kind)


def build_objective(config: PPOConfig | GRPOConfig, kl: KLController) -> PPO | GRPO:
    """`kl`: shared with the rollouts, which steer it."""
    on_policy = config.epochs * config.minibatches == 1
    shared: dict[str, Any] = {
        "kl": kl,
        "estimator": config.kl.estimator,
        "temperature": config.generator.temperature,
        "chunk": config.loss_chunk,
    }
    if isinstance(config, GRPOConfig):
        return GRPO(
            clip_low=config.clip,
            clip_high=config.clip if config.clip_high is None else config.clip_high,
            importance=config.importance,
            importance_cap=config.importance_cap,
            on_policy=on_policy and config.importance == "none",
            **shared,
        )
    return PPO(
        clip=config.clip,
        value_clip=config.value_clip,
        value_weight=config.value_weight,
        entropy_weight=config.entropy_weight,
        on_policy=on_policy,
        value_apart=config.value == "separate",
        **shared,
    )

"""Arithmetic of rollouts: minibatches × global samples episodes each, learned from `epochs` times. Pure."""

from __future__ import annotations

import math

from drumline.config.algorithms import GRPOConfig, PPOConfig, VLLMGenerator
from drumline.config.schema import Config
from drumline.errors import PlanError
from drumline.plan.plan import BatchPlan, DataPlan


def steps_of_rollouts(
    config: Config, algorithm: PPOConfig | GRPOConfig, batch: BatchPlan, data: DataPlan | None, why: list[str]
) -> int | None:
    """Optimizer steps of the whole run; None where that hangs on data which is not prepared. Raises PlanError where groups or rollouts do
    not come out whole, and for a generator that cannot be told the weights."""
    if isinstance(algorithm.generator, VLLMGenerator) and algorithm.generator.weights != "none" and config.adapter.kind == "lora":
        raise PlanError(
            "vLLM is handed whole weights, and an adapter lies beside them",
            where="algorithm.generator",
            fix="generator=hf, or adapter=none",
        )
    episodes, group = algorithm.minibatches * batch.global_samples, algorithm.group_size
    prompts, rest = divmod(episodes, group)
    if rest or not prompts:
        near = sorted({max(1, prompts) * group, (prompts + 1) * group})
        raise PlanError(
            f"a rollout of {algorithm.minibatches} minibatches × {batch.global_samples} episodes does not divide into groups of {group}",
            where="algorithm.group_size",
            fix=f"choose batch.global_samples × algorithm.minibatches as {' or '.join(map(str, near))}",
        )
    each = algorithm.epochs * algorithm.minibatches
    why.append(
        f"a rollout: {prompts} prompts × {group} = {episodes} episodes, learned from in {algorithm.epochs} epochs × {algorithm.minibatches}"
        f" minibatches = {each} steps"
    )
    if config.run.steps is None:
        return None if data is None else each * max(1, math.ceil(config.run.epochs * data.train_samples / prompts))
    if config.run.steps % each:
        near = sorted({max(1, config.run.steps // each) * each, (config.run.steps // each + 1) * each})
        raise PlanError(
            f"{config.run.steps} steps end within a rollout, which has {algorithm.epochs} epochs × {algorithm.minibatches} minibatches"
            f" = {each} steps",
            where="run.steps",
            fix=f"nearest: {' or '.join(map(str, near))}",
        )
    return config.run.steps

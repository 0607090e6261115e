"""Count what an adapter adds to a model: parameters, and the bytes of a training's states."""

from __future__ import annotations

from typing import NamedTuple

from drumline.config.config import Config, LoRAConfig
from drumline.plan.explain import count
from drumline.plan.facts import ModelFacts
from drumline.planner.cost.optimizers import FP32_BYTES, moment_bytes

GB = 1e9
LOW_BYTES = 2


class AdapterSize(NamedTuple):
    """Numbers of all that is trained beside the frozen weights, over all ranks together.

    `parameters`, and `in_experts`, those of them over experts. `weight_bytes` are also the bytes of
    the gradients. `optimizer_bytes`: of the optimizer's states.
    """

    parameters: int
    in_experts: int
    weight_bytes: int
    optimizer_bytes: int


def adapter_size(facts: ModelFacts, config: Config) -> AdapterSize | None:
    """Return the size of a config's adapter; None without one.

    `facts`: of the model under the adapter. Each state is counted once, as one process keeps it.
    """
    if not isinstance(config.adapter, LoRAConfig):
        return None
    entry_bytes = FP32_BYTES
    low_states = 0
    if config.precision.master == "bf16":
        entry_bytes = LOW_BYTES
        low_states = 3 if config.precision.rounding == "kahan" else 2
    weights = [(weight, 1) for weight in facts.end_weights]
    for block, number in facts.kinds_of_blocks:
        weights += [(weight, number) for weight in block]
    in_experts = 0
    optimizer_bytes = 0
    for weight, number in weights:
        if not weight.trainable:
            continue
        if weight.style == "experts":
            in_experts += number * weight.numel
        states = moment_bytes(config.optimizer, weight, weight.numel, LOW_BYTES * low_states)
        optimizer_bytes += number * states
    return AdapterSize(
        parameters=facts.trainable,
        in_experts=in_experts,
        weight_bytes=entry_bytes * facts.trainable,
        optimizer_bytes=optimizer_bytes,
    )


def describe_adapter(facts: ModelFacts, config: Config) -> list[str]:
    """Return the size of a config's adapter as one line; no line without an adapter."""
    size = adapter_size(facts, config)
    if size is None:
        return []
    share = size.parameters / max(1, facts.parameters - size.parameters)
    over_experts = ""
    if size.in_experts:
        over_experts = f", {count(size.in_experts)} of them over experts"
    weights = f"{size.weight_bytes / GB:.3g} GB of weights, as much of gradients"
    optimizer = f"{size.optimizer_bytes / GB:.3g} GB of {config.optimizer.kind}'s states"
    return [
        f"the adapter has {count(size.parameters)} parameters ({share:.2%} of the model's)"
        f"{over_experts}: {weights}, {optimizer}, over all ranks"
    ]

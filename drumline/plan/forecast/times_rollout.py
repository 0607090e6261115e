"""Seconds of what PPO and GRPO do between optimizer steps, and the models that only answer. Pure."""

from __future__ import annotations

import math

from drumline.cluster.cluster import Cluster
from drumline.config.algorithms import ROLLOUT, PPOConfig, VLLMGenerator
from drumline.plan.facts import ModelFacts
from drumline.plan.forecast.others import samples_copy
from drumline.plan.forecast.times_host import STARTS
from drumline.plan.layout import Layout
from drumline.plan.roles import reference_kind


def scoring_flops(layout: Layout, facts: ModelFacts) -> float:
    """For each token of a step, what a reference that answers in every step computes (DPO's, alive or the policy without its adapter)."""
    kind = reference_kind(layout.config)
    if kind == "adapter":
        return forward_flops(facts)
    return forward_flops(layout.role_facts["reference"]) if kind == "live" and "reference" in layout.role_facts else 0.0


def forward_flops(facts: ModelFacts) -> float:
    """Of a token: 2 for each parameter that takes part in a product, where 6 are counted (4 of a frozen one), a third of attention's."""
    attention = facts.layers * facts.attention_flops
    return (facts.flops_per_token - attention) * (2 * facts.parameters) / (6 * facts.learned + 4 * facts.frozen) + attention / 3


def rollout_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """A rollout's time, spread over the optimizer steps that learn from it. Sampling reads all weights for each token of a batch (it is
    bound by memory, Pope et al. 2023), and the keys and values of what is there already; every completion is taken to reach
    `max_new_tokens`. Then log-probabilities, values and rewards by models are one forward each. Where weights are spread and the sampler
    has its own, they are gathered once. Rewards by functions run on the host and are not counted."""
    algorithm = layout.config.algorithm
    if not isinstance(algorithm, ROLLOUT):
        return 0.0
    episodes, world = algorithm.minibatches * layout.batch.global_samples, layout.mesh.world_size
    generator, each = algorithm.generator, math.ceil(episodes / world)
    at_once = min(generator.batch, each)
    vllm, copied = isinstance(generator, VLLMGenerator), samples_copy(layout)
    # Under autocast, the live model's weights are read in fp32; a copy, vLLM's model and DeepSpeed's are in the type that they compute in.
    width = 2 if layout.precision != "fp32" and (vllm or copied or layout.data_parallel == "zero") else 4
    bandwidth = cluster.calibration.memory or cluster.device.bandwidth
    rate = cluster.rate(layout.precision, at_once, facts.hidden) or cluster.rate("fp32")
    kept = 2 * facts.kv_heads * facts.head_dim * facts.layers * width * at_once * layout.length / 2
    token = max((width * facts.parameters + kept) / bandwidth, at_once * forward_flops(facts) / rate)
    if not vllm:  # which replays CUDA graphs
        token = max(token, STARTS[layout.precision][0] * facts.layers)
    answering = [forward_flops(model) for model in layout.role_facts.values()]
    if algorithm.epochs * algorithm.minibatches > 1:  # else the step's own forward tells the old log-probabilities
        answering.append(forward_flops(facts))
    if isinstance(algorithm, PPOConfig) and algorithm.value == "head":
        answering.append(forward_flops(facts))
    scored = sum(answering) * episodes * layout.length / world / rate
    told = copied or (isinstance(generator, VLLMGenerator) and generator.weights != "none")
    spread = told and world > layout.mesh.replicate
    gathered = cluster.collective_seconds("all_gather", 4 * facts.parameters * (world - 1) / world, world) if spread else 0.0
    return (math.ceil(each / at_once) * generator.max_new_tokens * token + scored + gathered) / (algorithm.epochs * algorithm.minibatches)

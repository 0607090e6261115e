"""What an algorithm's other models take on the same device: a reference, a value, rewards; and sampling from the policy. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.rollouts import ContinuousGenerator, VLLMGenerator
from drumline.core.rule import plain
from drumline.planner.cost.activations import block_of, formula
from drumline.planner.cost.states import FULL, LOW, Part, ends, part_of, rank_params, shards_of, state_of


@dataclass(frozen=True)
class Auxiliary:
    """Bytes of one rank. `copy`: of a whole model to sample from, which stays between rollouts; `rollout`: what sampling takes besides."""

    parameters: int
    gradients: int
    optimizer: int
    copy: int
    rollout: float


def auxiliary_of(layout: Layout, facts: ModelFacts, rank: int) -> Auxiliary:
    parameters = gradients = optimizer = 0
    reference = layout.config.algorithm.reference_of(layout.config)
    for name, role in layout.roles.items():
        sizes = facts.roles.get(name)
        if sizes is None:
            continue
        own = layout.of_role(name)
        mine = part_of(sizes, role.layers, layout.mesh.pp, rank)
        if role.trainable:
            state = state_of(own, sizes, mine)
            parameters, gradients, optimizer = parameters + state.parameters, gradients + state.gradients, optimizer + state.optimizer
        # A reference that answers before all is gone by the first gradients, which take as much.
        elif name != "reference" or reference != "precomputed" or sizes.parameters > facts.trainable:
            parameters += _frozen(layout, own, sizes, mine)
    copy = (FULL if layout.precision == "fp32" else LOW) * facts.parameters if samples_copy(layout) else 0
    return Auxiliary(parameters, gradients, optimizer, copy, _rollout(layout, facts))


def _frozen(layout: Layout, own: Layout, sizes: ModelFacts, mine: Part) -> int:
    """Weights of a model that only answers: what is multiplied lies in the type that it computes in (see strategies.build._frozen)."""
    shards = shards_of(own)
    has = rank_params(sizes, mine, own.mesh.tp, shards)
    if own.data_parallel == "fsdp2" and own.strategy.offloads()[0] == "cpu" and layout.device == "cuda":
        return 0
    casts = own.strategy.gathered_in(own.precision, own.config.images_alone) is not None
    if layout.precision == "fp32":
        return FULL * has.entries
    if layout.engine == "deepspeed" and not casts:
        return LOW * has.entries
    in_blocks = has.matrices - ends(sizes, mine, own.mesh.tp, shards).matrices
    return FULL * has.entries - (FULL - LOW) * (has.matrices if casts else in_blocks)


def samples_copy(layout: Layout) -> bool:
    """Whether rollouts are sampled from a model of their own (rl.build): where the one that learns is spread, and where its weights
    are fp32 and continuous batching, which knows no autocast, shall compute in less."""
    algorithm, mesh = layout.config.algorithm.rollout, layout.mesh
    if algorithm is None or isinstance(algorithm.generator, VLLMGenerator):
        return False
    whole = layout.strategy.whole_weights and plain(mesh)
    return not whole or (isinstance(algorithm.generator, ContinuousGenerator) and layout.precision != "fp32")


def _rollout(layout: Layout, facts: ModelFacts) -> float:
    """Keys and values of all sequences that are sampled side by side, and logits of their last tokens."""
    algorithm = layout.config.algorithm.rollout
    if algorithm is None:
        return 0.0
    generator, width = algorithm.generator, FULL if layout.precision == "fp32" else LOW
    if isinstance(generator, VLLMGenerator):
        return 0.0
    sequences = min(generator.batch, math.ceil(algorithm.minibatches * layout.batch.global_samples / layout.mesh.world_size))
    cache = 2.0 * facts.layers * block_of(facts).keys * width * layout.length * sequences
    logits = 3.0 * FULL * sequences * facts.vocab_size
    # The prompts' own forward, whose activations nobody keeps.
    prompt = sequences * max(1, layout.length - generator.max_new_tokens) * formula(layout, facts).live_forward
    return cache + logits + prompt

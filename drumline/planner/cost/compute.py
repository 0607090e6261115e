"""Seconds in which a device computes a step: matrix products, attention, what the operators between them move, unpacking of weights, and
the host that starts all kernels. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from drumline.core.cost import WIDTH
from drumline.core.facts import ModelFacts, of_mlp, takes_fp8
from drumline.core.plan import Layout
from drumline.core.rule import packed_bits
from drumline.hardware.cluster import Cluster, Measured
from drumline.planner.cost import fitted
from drumline.planner.cost.memory import as_kept

# Of what a block moves, what tensor parallelism without sequence parallelism leaves whole (Korthikanti et al. 2022, section 4.1).
WHOLE = 10 / 34
# What the cross-entropy moves for each token and word, as models.losses computes it, counted: 50 bytes.
MOVED_HEAD = 50.0
# Seconds that a host takes to start a block's kernels, forward and backward (38 and 78 of a Llama in fp32; 54 and 100 under autocast): CPU
# time of one core of an EPYC at 2.6 GHz, torch 2.13, blocks so small that nothing else takes time. A layer with an adapter adds kernels.
STARTS = {"fp32": (0.60e-3, 0.54e-3), "bf16": (0.95e-3, 0.92e-3), "fp16": (0.95e-3, 0.92e-3)}
STARTS_ADAPTED = (6 * 0.95e-3 / 54, 9 * 0.92e-3 / 100)
# Attention in tiles computes half of all pairs where it is causal; its backward takes 2.5 times its forward (Dao 2023, section 3.1).
CAUSAL, ATTENTION_BACKWARD = 0.5, 2.5


class Passes(NamedTuple):
    """Of forward, of backward, and of what backward computes again."""

    forward: float
    backward: float
    again: float = 0.0

    def __mul__(self, factor: float) -> Passes:  # type: ignore[override]
        return Passes(*(factor * part for part in self))

    def __add__(self, other: Passes) -> Passes:  # type: ignore[override]
        return Passes(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def both(self) -> tuple[float, float]:
        return self.forward, self.backward + self.again


def computing(layout: Layout, facts: ModelFacts, cluster: Cluster) -> tuple[float, float]:
    """Seconds in which a rank computes forward, and backward with what is computed again; mean over the stages of a pipeline."""
    mesh, precision, rounds, memory = (
        layout.mesh,
        layout.precision,
        layout.batch.accumulation,
        layout.config.memory,
    )
    kind, again = layout.activation_checkpointing, part_again(layout, facts)
    tokens = layout.rows * layout.positions / mesh.cp / layout.devices_per_rank  # of a micro-batch
    calls = rounds * (len(facts.block_weights) or facts.layers) / mesh.pp  # of blocks
    rate = cluster.rate(precision, max(1, round(tokens)), facts.hidden) or cluster.rate("fp32")
    if (
        layout.device == "cuda"
        and precision not in cluster.calibration.products
        and not layout.config.images_alone
    ):
        tiles = tokens / 128 * facts.hidden / mesh.tp / 256
        rate *= tiles / (tiles + fitted.TILES)
    rate, attends = (
        each * mesh.tp * mesh.pp / (rounds * tokens)
        for each in (rate, cluster.attention_rate(precision))
    )
    cast = 0.0
    if layout.fp8:
        rate, cast = _of_fp8(layout, facts, cluster, rate)
    products = flops(facts, kind, again, bool(memory.mlp_chunk)) + Passes(
        scoring_flops(layout, facts), 0.0
    )
    if layout.device == "cuda":
        products *= fitted.PRODUCTS
        of_weights = max(0.0, products.backward - products.forward)
        products += Passes(0.0, (fitted.WEIGHT_GRADIENTS - 1) * of_weights)
    works = products * (1 / rate) + attention_flops(facts, kind, again) * (1 / attends)
    first, second = operators(layout, cluster)
    each = bytes_moved(layout, facts) * (tokens / max(1, facts.layers))  # of a block, in one call
    head = (MOVED_HEAD * facts.vocab_size / mesh.tp + cast) / 3 * rounds * tokens / mesh.pp
    bandwidth = cluster.calibration.memory or cluster.device.bandwidth
    works += Passes(
        *(
            calls * bytes_ / line.bandwidth
            for bytes_, line in zip(each, (first, second, first), strict=True)
        )
    )
    works += Passes(head, 2 * head) * (1 / bandwidth)
    if bits := packed_bits(layout.config):
        entries = (facts.parameters - as_kept(layout, facts).parameters) / (
            1 - bits / 8 / WIDTH[precision]
        )
        packed = rounds * fitted.UNPACKED * entries / (mesh.tp * mesh.pp) / bandwidth
        works += Passes(packed, packed, packed * again)
    layers, _ = adapted(facts)
    starts = Passes(
        *(
            line.latency + layers * more
            for line, more in zip((first, second), STARTS_ADAPTED, strict=True)
        )
    )
    if layout.config.compile.enabled:
        ahead, behind = (
            after / before
            for after, before in zip(fitted.KERNELS_COMPILED, fitted.KERNELS, strict=True)
        )
        starts = Passes(starts.forward * ahead, starts.backward * behind)
    hooks = fitted.HOOK * layout.strategy.hooked * modules(facts)
    starts += Passes(hooks, hooks)
    starts = starts._replace(again=again * starts.forward) * (calls * layout.devices_per_rank)
    if layout.device == "cpu":  # the cores that start kernels run them, too
        block = first.latency + second.latency
        works += starts + Passes(fitted.LOOP[1] * rounds * block, fitted.LOOP[0] * block)
        return works.both
    ahead, behind = (
        (a**fitted.BLEND + b**fitted.BLEND) ** (1 / fitted.BLEND)
        for a, b in zip(works.both, starts.both, strict=True)
    )
    return ahead, behind


def operators(layout: Layout, cluster: Cluster) -> tuple[Measured, Measured]:
    """Lines of what a block takes besides its products, forward and backward: seconds of its host, and bytes over a bandwidth."""
    measured = cluster.calibration.operators.get(layout.precision)
    if (
        measured is not None
    ):  # by the bytes of hidden states, of which a block moves so many in 16 bits
        ahead, back = measured
        return replace(ahead, bandwidth=ahead.bandwidth * fitted.MOVED / 6), replace(
            back, bandwidth=back.bandwidth * fitted.MOVED / 3
        )
    bandwidth = cluster.calibration.memory or cluster.device.bandwidth
    forward, backward = (Measured(latency, bandwidth) for latency in STARTS[layout.precision])
    return forward, backward


def bytes_moved(layout: Layout, facts: ModelFacts) -> Passes:
    """Bytes that all blocks move for each token besides the arithmetic of products: a third of it forward."""
    mesh, width = layout.mesh, WIDTH[layout.precision] / 2
    moved, moved_adapted = fitted.MOVED, fitted.MOVED_ADAPTED
    if layout.config.compile.enabled:
        moved -= fitted.FUSED
        moved_adapted *= fitted.ADAPTED_COMPILED
    third = (
        width
        * moved
        / 3
        * facts.hidden
        * facts.layers
        * (WHOLE / layout.stream_parts + (1 - WHOLE) / mesh.tp)
    )
    third += width * moved_adapted * adapted(facts)[1] / mesh.tp
    return Passes(third, 2 * third, third * part_again(layout, facts))


@lru_cache(maxsize=1024)
def adapted(facts: ModelFacts) -> tuple[float, float]:
    """Layers with an adapter, of a block; and their inputs and outputs, of all blocks."""
    blocks = [
        (w, number) for block, number in facts.kinds_of_blocks for w in block if ".lora_" in w.name
    ]
    layers = sum(number for _, number in blocks) / 2 / max(1, len(facts.block_weights))
    return layers, sum(number * max(w.shape) for w, number in blocks)


@lru_cache(maxsize=1024)
def modules(facts: ModelFacts) -> float:
    """Modules with weights of their own, of a block."""
    each = (
        (len({w.name.rpartition(".")[0] for w in block}), number)
        for block, number in facts.kinds_of_blocks
    )
    return sum(held * number for held, number in each) / max(1, len(facts.block_weights))


def part_again(layout: Layout, facts: ModelFacts) -> float:
    """The part of the blocks that backward computes again."""
    if layout.activation_checkpointing == "none":
        return 0.0
    return min(
        1.0, (layout.config.memory.checkpointed_blocks or facts.layers) / max(1, facts.layers)
    )


@lru_cache(maxsize=1024)
def flops(
    facts: ModelFacts, checkpointing: str, part: float = 1.0, chunked: bool = False
) -> Passes:
    """FLOPs of a token's products: forward, backward, and again: of blocks (full), or of every second product (selective), in this `part`
    of them; and of feed-forward parts that are `chunked`."""
    forward, attention = forward_flops(facts), facts.layers * facts.attention_flops
    products = forward - attention / 3
    blocks = max(0.0, products - 2 * facts.head_parameters)
    again = {"none": 0.0, "selective": blocks / 2, "full": blocks}[checkpointing] * part
    again += 2.0 * sum(map(of_mlp, facts.block_weights)) * chunked
    return Passes(products, facts.flops_per_token - attention - products, again)


def attention_flops(facts: ModelFacts, checkpointing: str, part: float = 1.0) -> Passes:
    """FLOPs of a token's attention as kernels in tiles compute it. Selective checkpointing keeps its result."""
    forward = facts.layers * facts.attention_flops / 3 * (1.0 if facts.bidirectional else CAUSAL)
    return Passes(forward, ATTENTION_BACKWARD * forward, forward * part * (checkpointing == "full"))


def _of_fp8(
    layout: Layout, facts: ModelFacts, cluster: Cluster, rate: float
) -> tuple[float, float]:
    """(the rate of a step whose blocks' linear layers multiply in fp8; bytes for each token that casts move). Products reach the same part
    of the datasheet as those in bf16. Inputs and gradients are read in 16 bits and written in 8, once for each of the two products that
    they are in. An estimate: nothing of it has run on a GPU."""
    weights = [weight for block in facts.block_weights for weight in block if takes_fp8(weight)]
    share = 6.0 * sum(weight.numel for weight in weights) / facts.flops_per_token
    spared = (
        share * (1 - cluster.device.flops.get("bf16", 0.0) / cluster.device.flops["fp8"])
        if "fp8" in cluster.device.flops
        else 0.0
    )
    return rate / (1 - spared), 2 * 3.0 * sum(
        sum(weight.shape) for weight in weights
    ) / layout.mesh.tp


def scoring_flops(layout: Layout, facts: ModelFacts) -> float:
    """For each token of a step, what is computed without gradients: a first pass, and a reference that answers in every step (alive, or
    the policy without its adapter)."""
    algorithm = layout.config.algorithm
    kind = algorithm.reference_of(layout.config)
    policy_forwards = algorithm.extra_forwards
    if kind == "adapter":
        policy_forwards += algorithm.reference_forwards
    flops = policy_forwards * forward_flops(facts)
    if kind == "live" and "reference" in facts.roles:
        flops += algorithm.reference_forwards * forward_flops(facts.roles["reference"])
    return flops


def forward_flops(facts: ModelFacts) -> float:
    """FLOPs of a token in forward: 2 for each parameter of a product, which counts 6 in all (4 if frozen), and a third of attention's."""
    attention = facts.layers * facts.attention_flops
    return (facts.flops_per_token - attention) * (2 * facts.parameters) / (
        6 * facts.trainable + 4 * facts.frozen
    ) + attention / 3

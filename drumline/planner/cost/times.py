"""The estimate of one layout, and in it the seconds of one optimizer step, by category. Pure; microseconds a call.

layout, facts, cluster ──▶ memory.memory ──▶ Memory ──▶ memory.host_memory ──▶ HostMemory
                       ──▶ traffic.flows ──▶ Traffic ──▶ seconds ──▶ Seconds

A device is busy with matrix products, at the rate that large ones reach (or that was measured), and between them with what everything else
moves through its memory: MOVED bytes for each token, layer and entry of the hidden width. MOVED is fitted to published runs, one number a
stack, and frozen; benchmarks/planner_accuracy.py and tests/unit/test_planner_times.py hold predicted against published.
It cannot be faster than its host starts kernels. Communication hides behind computing where the engine lets it (`Flow.beside`); it takes
CONTENTION times as long while both use the device.
"""

from __future__ import annotations

import math
from functools import lru_cache

from drumline.core.cost import FULL, WIDTH, Copied, Flow, Volume
from drumline.core.estimate import Activations, Estimate, Seconds
from drumline.core.facts import ModelFacts, of_mlp, takes_fp8
from drumline.core.plan import Layout
from drumline.core.rollouts import VLLMGenerator
from drumline.core.stages import bubble, stage_cost
from drumline.hardware.cluster import Cluster
from drumline.planner.cost.memory import as_kept, host_memory, memory, offloaded, samples_copy
from drumline.planner.cost.traffic import flows

# Bytes in 16-bit precisions. Eager: four published runs of torchtitan on H100 (7B with full and selective AC, 8B on 8 and on 128), within
# 3%. Compiled: four of llm-foundry's fused kernels (7B and 70B on H100, 13B and 30B on A100), within 9%. The runs are in
# benchmarks/planner_published.py.
MOVED, MOVED_COMPILED = 1700.0, 1150.0
WHOLE = 10 / 34  # of that, what tensor parallelism without sequence parallelism leaves whole (Korthikanti et al. 2022, section 4.1)
# What the cross-entropy moves for each token and word, as models.losses computes it, counted: 50 bytes.
MOVED_HEAD = 50.0
CONTENTION = 1.2  # docs/planning.md, "Constants": 1.1 to 1.3
# Seconds that a host takes to start a block's kernels, forward and backward (38 and 78 of a Llama in fp32; 54 and 100 under autocast): CPU
# time of one core of an EPYC at 2.6 GHz, torch 2.13, blocks so small that nothing else takes time.
STARTS = {"fp32": (0.60e-3, 0.54e-3), "bf16": (0.95e-3, 0.92e-3), "fp16": (0.95e-3, 0.92e-3)}
# A host of eight channels of DDR4-3200 (AMD EPYC 7003 datasheet), which its ranks share.
HOST_BANDWIDTH = 204.8e9
CLIPPED = 4 + 8  # the norm reads gradients, clipping reads and writes them


def estimate(layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None) -> Estimate:
    """The estimate of a layout. `activations` None: by formula (cost.activations)."""
    volume, needs = flows(layout, facts), memory(layout, facts, cluster, activations)
    taken = seconds(layout, facts, cluster, volume)
    rate = layout.tokens_per_step / taken.total
    peak = cluster.device.flops.get(layout.precision)
    devices = layout.mesh.world_size * layout.devices_per_rank
    return Estimate(
        memory=needs,
        host=host_memory(layout, facts, cluster, needs.peak),
        traffic=volume.traffic(),
        seconds=taken,
        tokens_per_s=rate,
        mfu=rate * facts.flops_per_token / (peak * devices) if peak else None,
        limit=cluster.device.memory_bytes,
        host_limit=cluster.host_memory_bytes,
        calibrated=layout.precision in cluster.calibration.matmul,
    )


def seconds(layout: Layout, facts: ModelFacts, cluster: Cluster, volume: Volume) -> Seconds:
    """Seconds of a step. `volume`: of traffic.flows; `communication` is the exposed one. Of a pipeline the slowest stage sets the pace; the
    time that the other stages wait for it is in `bubble`."""
    parts = [_busy(layout, model, cluster) for _, model in layout.trainable(facts)]
    forward, backward = sum(part[0] for part in parts), sum(part[1] for part in parts)
    hidden = {"forward": forward, "backward": backward, "last": backward / layout.batch.accumulation}
    busy, waits, devices = forward + backward, 0.0, layout.devices_per_rank
    hidden["steps"] = busy * layout.strategy.overlap()
    communication = _exposed(layout, cluster, volume.flows, hidden)
    if devices > 1:  # nn.DataParallel: for each micro-batch the first device hands its weights to the others, and adds up their gradients
        bytes_ = 4.0 * (facts.parameters + facts.trainable) * (devices - 1) / devices
        communication += layout.batch.accumulation * cluster.collective_seconds("all_gather", bytes_, devices)
    if layout.pipeline is not None:
        idle = bubble(layout.pipeline.schedule, layout.mesh.pp, layout.pipeline.stages_per_rank, layout.batch.accumulation)
        waits = busy * (_slowest(facts, layout.pipeline.layers, layout.mesh.pp) / (1 - idle) - 1)
    optimizer, offload = _update(layout, facts, cluster, busy)
    if layout.device == "cuda" and (moved := offloaded(layout, facts, rounds=False)):
        moved *= layout.batch.accumulation
        offload += max(0.0, cluster.host_seconds("to_host", moved) - forward) + max(
            0.0, cluster.host_seconds("to_device", moved) - backward
        )
    return Seconds(
        compute=busy,
        communication=communication,
        bubble=waits,
        optimizer=optimizer,
        offload=offload,
        rollout=rollout_seconds(layout, facts, cluster),
    )


def _busy(layout: Layout, facts: ModelFacts, cluster: Cluster) -> tuple[float, float]:
    """Seconds in which a rank computes forward, and backward with what is computed again; mean over the stages of a pipeline."""
    mesh, precision, rounds = layout.mesh, layout.precision, layout.batch.accumulation
    tokens = layout.rows * layout.positions / mesh.cp / layout.devices_per_rank  # of a micro-batch
    rate = (cluster.rate(precision, max(1, round(tokens)), facts.hidden) or cluster.rate("fp32")) * mesh.tp * mesh.pp
    bandwidth = (cluster.calibration.memory or cluster.device.bandwidth) * mesh.pp
    whole = WHOLE / layout.stream_parts + (1 - WHOLE) / mesh.tp
    moved = (MOVED_COMPILED if layout.config.compile.enabled else MOVED) * facts.hidden * facts.layers * whole
    moved = WIDTH[precision] / 2 * moved + MOVED_HEAD * facts.vocab_size / mesh.tp
    memory = layout.config.memory
    again = min(1.0, (memory.checkpointed_blocks or facts.layers) / facts.layers) if layout.activation_checkpointing != "none" else 0.0
    if layout.fp8:
        rate, cast = _of_fp8(layout, facts, cluster, rate)
        moved += cast
    forward, backward = flops(facts, layout.activation_checkpointing, again, bool(memory.mlp_chunk))
    first = rounds * tokens * ((forward + scoring_flops(layout, facts)) / rate + moved / 3 / bandwidth)
    second = rounds * tokens * (backward / rate + (2 + again) * moved / 3 / bandwidth)
    starts = rounds * (len(facts.block_weights) or facts.layers) / mesh.pp * layout.devices_per_rank
    start_first, start_second = starts * STARTS[precision][0], starts * (STARTS[precision][1] + again * STARTS[precision][0])
    if layout.device == "cpu":  # the cores that start kernels run them, too
        return first + start_first, second + start_second
    return max(first, start_first), max(second, start_second)


def _of_fp8(layout: Layout, facts: ModelFacts, cluster: Cluster, rate: float) -> tuple[float, float]:
    """(the rate of a step whose blocks' linear layers multiply in fp8; bytes for each token that casts move). Products reach the same part
    of the datasheet as those in bf16. Inputs and gradients are read in 16 bits and written in 8, once for each of the two products that
    they are in. An estimate: nothing of it has run on a GPU."""
    weights = [weight for block in facts.block_weights for weight in block if takes_fp8(weight)]
    share = 6.0 * sum(weight.numel for weight in weights) / facts.flops_per_token
    spared = share * (1 - cluster.device.flops.get("bf16", 0.0) / cluster.device.flops["fp8"]) if "fp8" in cluster.device.flops else 0.0
    return rate / (1 - spared), 2 * 3.0 * sum(sum(weight.shape) for weight in weights) / layout.mesh.tp


@lru_cache(maxsize=1024)
def flops(facts: ModelFacts, checkpointing: str, part: float = 1.0, chunked: bool = False) -> tuple[float, float]:
    """FLOPs of a token: forward, and backward with the recomputation: of blocks (full), or of every second product without attention
    (selective), in this `part` of the blocks; and of feed-forward parts that are `chunked`."""
    forward, attention = forward_flops(facts), facts.layers * facts.attention_flops / 3
    blocks = max(0.0, forward - attention - 2 * facts.head_parameters)
    again = {"none": 0.0, "selective": blocks / 2, "full": blocks + attention}[checkpointing] * part
    again += 2.0 * sum(map(of_mlp, facts.block_weights)) * chunked
    return forward, facts.flops_per_token - forward + again


def _exposed(layout: Layout, cluster: Cluster, flows: list[Flow], hidden: dict[str, float]) -> float:
    """Seconds of exposed communication: all that nothing is computed beside, the surplus of what takes longer than the computing beside
    it, and one call of each flow, before the first block can start or after the last has ended."""
    wires: dict[str, float] = {}
    exposed, mesh = 0.0, layout.mesh
    # Neighbours in the mesh share a host, tensor parallel ones first.
    strides = {"tp": 1, "cp": mesh.tp, "shard": mesh.tp, "gradients": mesh.tp, "ep": mesh.tp * mesh.cp}
    strides["replicate"] = mesh.tp * mesh.cp * mesh.ep * mesh.shard
    for flow in flows:
        together = max(1, min(flow.ranks, cluster.per_node // strides.get(flow.axis, mesh.world_size // mesh.pp)))
        each = cluster.collective_seconds(flow.kind, flow.bytes_ / flow.calls, flow.ranks, together)
        alone = flow.calls if flow.beside == "nothing" else 0.0 if flow.beside == "steps" else min(1.0, flow.calls)
        exposed += alone * each
        if flow.beside != "nothing":
            wires[flow.beside] = wires.get(flow.beside, 0.0) + CONTENTION * (flow.calls - alone) * each
    return exposed + sum(max(0.0, wire - hidden[beside]) for beside, wire in wires.items())


@lru_cache(maxsize=1024)
def _slowest(facts: ModelFacts, layers: tuple[tuple[int, int], ...], ranks: int) -> float:
    """The largest FLOPs of a rank of the pipeline over the mean."""
    if not layers:
        return 1.0
    taken = [sum(stage_cost(facts, first, stop).flops for first, stop in layers[rank::ranks]) for rank in range(ranks)]
    return max(taken) * ranks / sum(taken)


def _update(layout: Layout, facts: ModelFacts, cluster: Cluster, busy: float) -> tuple[float, float]:
    """Seconds of clipping and the update: bytes over the bandwidth of the memory that holds the optimizer's states; and of copies between
    device, host and disk: of those beside computing, what takes longer counts."""
    options, mesh, strategy = layout.config.optimizer, layout.mesh, layout.strategy
    # Parameters that a rank updates, of all trainable models.
    trainable = sum(model.trainable for _, model in layout.trainable(facts)) / (mesh.tp * mesh.pp * strategy.optimizer_shards(mesh))
    moved = trainable * (options.does.moved[not options.fused] + CLIPPED)
    place, on_host = (
        "cpu" if options.offload else strategy.offloads()[0],
        min(cluster.per_node, mesh.world_size),
    )  # ranks that share its memory and its drive
    if layout.device == "cpu" or place == "none":
        step = moved / (cluster.calibration.memory or cluster.device.bandwidth)
    else:
        step = moved * on_host / HOST_BANDWIDTH
    if place == "none" or (layout.device == "cpu" and place != "nvme"):
        return step, 0.0
    copied = Copied(FULL * trainable, FULL * trainable) if options.offload else strategy.copied(layout, as_kept(layout, facts), trainable)
    taken = cluster.host_seconds("to_device", copied.up) + cluster.host_seconds("to_host", copied.down)
    if copied.hidden:
        return step, max(0.0, taken - busy)
    stored = copied.stored * on_host
    return step, taken + (cluster.disk_seconds("read", stored) + cluster.disk_seconds("write", stored))


def scoring_flops(layout: Layout, facts: ModelFacts) -> float:
    """For each token of a step, what is computed without gradients: a first pass, and a reference that answers in every step (alive, or
    the policy without its adapter)."""
    algorithm = layout.config.algorithm
    kind = algorithm.reference_of(layout.config)
    reference = forward_flops(facts.roles["reference"]) if kind == "live" and "reference" in facts.roles else 0.0
    return (algorithm.extra_forwards + (kind == "adapter")) * forward_flops(facts) + reference


def forward_flops(facts: ModelFacts) -> float:
    """FLOPs of a token in forward: 2 for each parameter of a product, which counts 6 in all (4 if frozen), and a third of attention's."""
    attention = facts.layers * facts.attention_flops
    return (facts.flops_per_token - attention) * (2 * facts.parameters) / (6 * facts.trainable + 4 * facts.frozen) + attention / 3


def rollout_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """A rollout's time, spread over the optimizer steps that learn from it. Sampling reads all weights for each token of a batch (it is
    bound by memory, Pope et al. 2023), and the keys and values of what is there already; every completion is taken to reach
    `max_new_tokens`. Then log-probabilities, values and rewards by models are one forward each. Where weights are spread and the sampler
    has its own, they are gathered once. Rewards by functions run on the host and are not counted."""
    algorithm = layout.config.algorithm.rollout
    if algorithm is None:
        return 0.0
    episodes, world = algorithm.minibatches * layout.batch.global_samples, layout.mesh.world_size
    generator, each = algorithm.generator, math.ceil(episodes / world)
    at_once = min(generator.batch, each)
    vllm, copied = isinstance(generator, VLLMGenerator), samples_copy(layout)
    # Under autocast, sampling reads the policy's fp32 weights; a copy, vLLM's model and DeepSpeed's are in the type that they compute in.
    width = 2 if layout.precision != "fp32" and (vllm or copied or layout.strategy.keeps_low) else 4
    bandwidth = cluster.calibration.memory or cluster.device.bandwidth
    rate = cluster.rate(layout.precision, at_once, facts.hidden) or cluster.rate("fp32")
    kept = 2 * facts.kv_heads * facts.head_dim * facts.layers * width * at_once * layout.length / 2
    token = max((width * facts.parameters + kept) / bandwidth, at_once * forward_flops(facts) / rate)
    if not vllm:  # which replays CUDA graphs
        token = max(token, STARTS[layout.precision][0] * facts.layers)
    answering = [forward_flops(model) for model in facts.roles.values()]
    # The old log-probabilities, unless the step's own forward gives them; and values.
    answering += [forward_flops(facts)] * ((algorithm.steps_in_turn > 1) + (layout.config.head == "valued"))
    scored = sum(answering) * episodes * layout.length / world / rate
    refreshed = copied or (isinstance(generator, VLLMGenerator) and generator.weights != "none")
    spread = refreshed and world > layout.mesh.replicate
    gathered = cluster.collective_seconds("all_gather", 4 * facts.parameters * (world - 1) / world, world) if spread else 0.0
    return (math.ceil(each / at_once) * generator.max_new_tokens * token + scored + gathered) / algorithm.steps_in_turn

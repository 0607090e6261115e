"""The estimate of one layout, and in it the seconds of one optimizer step, by category. Pure; microseconds a call.

layout, facts, cluster ──▶ memory.memory ──▶ Memory ──▶ memory.host_memory ──▶ HostMemory
                       ──▶ traffic.flows ──▶ Traffic ──▶ seconds ──▶ Seconds

A device is busy with matrix products, at the rate that large ones reach (or that was measured), with attention at a rate of its own, and
between them with what everything else moves through its memory (cost.fitted has these bytes). benchmarks/planner_accuracy.py holds
predicted against published.
It cannot be faster than its host starts kernels. Communication hides behind computing where the engine lets it (`Flow.beside`); it takes
CONTENTION times as long while both use the device. On a CPU the cores do both, and nothing hides.
"""

from __future__ import annotations

import math
from functools import lru_cache

from drumline.core.cost import FULL, Copied, Flow, Volume
from drumline.core.estimate import Activations, Estimate, Seconds
from drumline.core.facts import ModelFacts
from drumline.core.plan import Layout
from drumline.core.rollouts import VLLMGenerator
from drumline.core.stages import bubble, stage_cost
from drumline.hardware.cluster import Cluster
from drumline.planner.cost import fitted
from drumline.planner.cost.compute import STARTS, computing, forward_flops
from drumline.planner.cost.memory import as_kept, host_memory, memory, offloaded, samples_copy
from drumline.planner.cost.traffic import flows

CONTENTION = 1.2  # docs/planner.md, "Constants": 1.1 to 1.3
CLIPPED = 4 + 8  # the norm reads gradients, clipping reads and writes them
# Bytes of an entry that AdamW's step reads and writes there: what cost.fitted's seconds are of.
HOST_MOVED = 28 + CLIPPED
SWITCHES = 4  # that join GPUs to a host; of eight two share one (NVIDIA DGX A100 and H100 user guides, system topology)


def estimate(
    layout: Layout, facts: ModelFacts, cluster: Cluster, activations: Activations | None = None
) -> Estimate:
    """The estimate of a layout. `activations` None: by formula (cost.activations)."""
    volume, needs = flows(layout, facts), memory(layout, facts, cluster, activations)
    taken = seconds(layout, facts, cluster, volume)
    rate = layout.tokens_per_step / taken.total
    peak = cluster.device.flops.get(layout.precision)
    devices, calibrated = (
        layout.mesh.world_size * layout.devices_per_rank,
        layout.precision in cluster.calibration.matmul,
    )
    bytes_range, seconds_range = fitted.RANGES[
        fitted.group_of(layout, bool(cluster.calibration.operators))
    ]
    return Estimate(
        memory=needs,
        host=host_memory(layout, facts, cluster, needs.peak),
        traffic=volume.traffic(),
        seconds=taken,
        startup=compiling(layout, facts),
        tokens_per_s=rate,
        mfu=rate * facts.flops_per_token / (peak * devices) if peak else None,
        limit=cluster.device.memory_bytes,
        host_limit=cluster.host_memory_bytes,
        host_assumed=cluster.host_memory_assumed,
        calibrated=calibrated,
        memory_range=bytes_range,
        seconds_range=seconds_range,
    )


def compiling(layout: Layout, facts: ModelFacts) -> float:
    """Return the seconds in which a run compiles its blocks before the first step: blocks of a kind share one compilation."""
    if not layout.config.compile.enabled:
        return 0.0
    return fitted.COMPILING * max(1, len(facts.kinds_of_blocks))


def seconds(layout: Layout, facts: ModelFacts, cluster: Cluster, volume: Volume) -> Seconds:
    """Seconds of a step. `volume`: of traffic.flows; `communication` is the exposed one. Of a pipeline the slowest stage sets the pace; the
    time that the other stages wait for it is in `bubble`."""
    parts = [computing(layout, model, cluster) for _, model in layout.trainable(facts)]
    forward, backward = sum(part[0] for part in parts), sum(part[1] for part in parts)
    hidden = {
        "forward": forward,
        "backward": backward,
        "last": backward / layout.batch.accumulation,
    }
    if layout.device == "cpu" and cluster.nodes == 1:
        hidden = dict.fromkeys(hidden, 0.0)
    busy, waits, devices = forward + backward, 0.0, layout.devices_per_rank
    hidden["steps"] = busy * layout.strategy.overlap()
    communication = _exposed(layout, cluster, volume.flows, hidden)
    if (
        devices > 1
    ):  # nn.DataParallel: for each micro-batch the first device hands its weights to the others, and adds up their gradients
        bytes_ = 4.0 * (facts.parameters + facts.trainable) * (devices - 1) / devices
        communication += layout.batch.accumulation * cluster.collective_seconds(
            "all_gather", bytes_, devices
        )
    if layout.pipeline is not None:
        idle = bubble(
            layout.pipeline.schedule,
            layout.mesh.pp,
            layout.pipeline.stages_per_rank,
            layout.batch.accumulation,
        )
        waits = busy * (_slowest(facts, layout.pipeline.layers, layout.mesh.pp) / (1 - idle) - 1)
    optimizer, offload = _update(layout, facts, cluster, busy)
    if layout.device == "cuda" and (moved := offloaded(layout, facts, rounds=False)):
        moved *= layout.batch.accumulation * _shared(layout, cluster)
        offload += max(0.0, cluster.host_seconds("to_host", moved) - forward) + max(
            0.0, cluster.host_seconds("to_device", moved) - backward
        )
    rollout, algorithm = rollout_seconds(layout, facts, cluster), layout.config.algorithm.rollout
    if (
        algorithm is not None
        and algorithm.lookahead
        and isinstance(algorithm.generator, VLLMGenerator)
        and algorithm.generator.url
    ):
        # The server samples meanwhile; on the device that trains nothing is gained.
        rollout = max(0.0, rollout - busy - optimizer)
    return Seconds(
        compute=busy,
        communication=communication,
        bubble=waits,
        optimizer=optimizer,
        offload=offload,
        rollout=rollout,
    )


def _exposed(
    layout: Layout, cluster: Cluster, flows: list[Flow], hidden: dict[str, float]
) -> float:
    """Seconds of exposed communication: all that nothing is computed beside, the surplus of what takes longer than the computing beside
    it, and one call of each flow, before the first block can start or after the last has ended."""
    wires: dict[str, float] = {}
    exposed, mesh, contention = 0.0, layout.mesh, CONTENTION if any(hidden.values()) else 1.0
    # Neighbours in the mesh share a host, tensor parallel ones first.
    strides = {
        "tp": 1,
        "cp": mesh.tp,
        "shard": mesh.tp,
        "gradients": mesh.tp,
        "ep": mesh.tp * mesh.cp,
    }
    strides["replicate"] = mesh.tp * mesh.cp * mesh.ep * mesh.shard
    for flow in flows:
        stride = strides.get(flow.axis, mesh.world_size // mesh.pp)
        together, near = (
            max(1, hosts * cluster.per_node // stride)
            for hosts in (1, cluster.pod or cluster.nodes)
        )
        each = cluster.collective_seconds(
            flow.kind, flow.bytes_ / flow.calls, flow.ranks, min(flow.ranks, together), near
        )
        each += fitted.WAIT * (layout.device == "cpu" and flow.ranks > 1)
        alone = (
            flow.calls
            if flow.beside == "nothing"
            else 0.0
            if flow.beside == "steps"
            else min(1.0, flow.calls)
        )
        exposed += alone * each
        if flow.beside != "nothing":
            wires[flow.beside] = (
                wires.get(flow.beside, 0.0) + contention * (flow.calls - alone) * each
            )
    return exposed + sum(max(0.0, wire - hidden[beside]) for beside, wire in wires.items())


@lru_cache(maxsize=1024)
def _slowest(facts: ModelFacts, layers: tuple[tuple[int, int], ...], ranks: int) -> float:
    """The largest FLOPs of a rank of the pipeline over the mean."""
    if not layers:
        return 1.0
    taken = [
        sum(stage_cost(facts, first, stop).flops for first, stop in layers[rank::ranks])
        for rank in range(ranks)
    ]
    return max(taken) * ranks / sum(taken)


def _update(
    layout: Layout, facts: ModelFacts, cluster: Cluster, busy: float
) -> tuple[float, float]:
    """Seconds of clipping and the update: bytes over the bandwidth of the memory that holds the optimizer's states; and of copies between
    device, host and disk: of those beside computing, what takes longer counts."""
    options, mesh, strategy = layout.config.optimizer, layout.mesh, layout.strategy
    # Parameters that a rank updates, of all trainable models.
    trainable = sum(model.trainable for _, model in layout.trainable(facts)) / (
        mesh.tp * mesh.pp * strategy.optimizer_shards(mesh)
    )
    moved = trainable * (options.does.moved[not options.fused] + CLIPPED)
    place, on_host = "cpu" if options.offload else strategy.offloads()[0], _on_host(layout, cluster)
    if layout.device == "cpu" or place == "none":
        step = moved / (cluster.calibration.memory or cluster.device.bandwidth)
    else:
        step = fitted.HOST_STEP * on_host * moved / HOST_MOVED
    if place == "none" or (layout.device == "cpu" and place != "nvme"):
        return step, 0.0
    copied = (
        Copied(FULL * trainable, FULL * trainable)
        if options.offload
        else strategy.copied(layout, as_kept(layout, facts), trainable)
    )
    taken = cluster.host_seconds("to_device", copied.up) + cluster.host_seconds(
        "to_host", copied.down
    )
    taken *= _shared(layout, cluster)
    if copied.hidden:
        return step, max(0.0, taken - busy)
    stored = copied.stored * on_host
    return step, taken + (
        cluster.disk_seconds("read", stored) + cluster.disk_seconds("write", stored)
    )


def _on_host(layout: Layout, cluster: Cluster) -> int:
    """Ranks that share a host, its memory and its drive."""
    return min(cluster.per_node, layout.mesh.world_size)


def _shared(layout: Layout, cluster: Cluster) -> int:
    """Devices that share a link to the host."""
    return 2 if _on_host(layout, cluster) > SWITCHES else 1


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
    token = max(
        (width * facts.parameters + kept) / bandwidth, at_once * forward_flops(facts) / rate
    )
    if not vllm:  # which replays CUDA graphs
        token = max(token, STARTS[layout.precision][0] * facts.layers)
    answering = [forward_flops(model) for model in facts.roles.values()]
    # The old log-probabilities, unless the step's own forward gives them; and values.
    answering += [forward_flops(facts)] * (
        (algorithm.steps_in_turn > 1) + (layout.config.head == "valued")
    )
    scored = sum(answering) * episodes * layout.length / world / rate
    refreshed = copied or (isinstance(generator, VLLMGenerator) and generator.weights != "none")
    spread = refreshed and world > layout.mesh.replicate
    gathered = (
        cluster.collective_seconds("all_gather", 4 * facts.parameters * (world - 1) / world, world)
        if spread
        else 0.0
    )
    return (
        math.ceil(each / at_once) * generator.max_new_tokens * token + scored + gathered
    ) / algorithm.steps_in_turn

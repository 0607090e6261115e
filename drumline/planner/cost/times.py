"""Estimate a layout: its memory, its traffic, and the seconds of one optimizer step by category.

layout, facts, cluster ──▶ memory.memory ──▶ Memory ──▶ memory.host_memory ──▶ HostMemory
                       ──▶ traffic.flows ──▶ Traffic ──▶ seconds ──▶ Seconds

A device computes matrix products at the rate that large ones reach (or that was measured), and
attention at a rate of its own. Between them it moves bytes through its memory (cost.fitted), and it
cannot be faster than its host starts kernels. Communication overlaps with computing if the engine
lets it (`Flow.beside`); it takes CONTENTION times as long while both use the device. On a CPU the
cores do both, and nothing overlaps. benchmarks/planner_accuracy.py compares predicted with published
values.

All functions are pure, and an estimate takes microseconds.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from drumline.config.algorithm import SamplingSpec
from drumline.config.mesh import Mesh
from drumline.config.rollouts import Generator, ServerGenerator
from drumline.hardware.cluster import Cluster
from drumline.plan.estimate import Activations, Estimate, Seconds
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.plan.stages import bubble, stage_cost
from drumline.planner.cost import fitted
from drumline.planner.cost.compute import (
    START_SECONDS,
    ComputeSeconds,
    compute_seconds,
    forward_flops,
    memory_bandwidth,
)
from drumline.planner.cost.memory import (
    as_stored,
    generates_with_weight_copy,
    host_memory,
    memory,
    offloaded_bytes,
)
from drumline.planner.cost.terms import (
    FP32_BYTES,
    LOW_BYTES,
    Beside,
    CommunicationVolume,
    Copied,
    Flow,
    entry_bytes,
)
from drumline.planner.cost.traffic import flows
from drumline.planner.strategies.base import cost_of

# How many times as long communication takes while the device computes beside it. Published: 1.1 to
# 1.3 (docs/explanations/planner.md, "Constants").
CONTENTION = 1.2
# Bytes that clipping moves for an entry of a gradient, in fp32: the norm reads it (4), and the
# clipping reads and writes it (8).
CLIPPING_BYTES = 4 + 8
# Bytes of an entry that a step of AdamW on the host reads and writes, to which cost.fitted.HOST_STEP
# was fitted: fp32 weight and two moments, each read and written, and the gradient.
HOST_STEP_BYTES = 28 + CLIPPING_BYTES
# Switches between the GPUs of a host and the host: of eight GPUs, two share one (system topology in
# the user guides of NVIDIA DGX A100 and H100).
SWITCHES_OF_HOST = 4


class Pace(NamedTuple):
    """How fast a layout is, whether or not it fits into memory.

    `startup`: seconds in which it compiles before its first step.
    """

    volume: CommunicationVolume
    seconds: Seconds
    startup: float
    tokens_per_s: float


def predict_pace(layout: Layout, facts: ModelFacts, cluster: Cluster) -> Pace:
    """Return what a layout sends, its seconds of a step, and its tokens/s."""
    volume = flows(layout, facts)
    step = seconds(layout, facts, cluster, volume)
    startup = compile_seconds(layout, facts)
    return Pace(volume, step, startup, layout.tokens_per_step / step.total)


def estimate(
    layout: Layout,
    facts: ModelFacts,
    cluster: Cluster,
    activations: Activations | None = None,
    pace: Pace | None = None,
) -> Estimate:
    """Return the estimate of a layout: memory, traffic and seconds, each with the range around it.

    `activations`: traced ones; without them the formula of cost.activations is used.
    `pace`: that of the layout, if it is known already.
    """
    if pace is None:
        pace = predict_pace(layout, facts, cluster)
    device_memory = memory(layout, facts, cluster, activations)
    # The share of the datasheet's FLOP/s that the model's own FLOPs reach (PaLM, Chowdhery et al.
    # 2022, appendix B). What backward computes again does not count.
    peak_flops = cluster.device.flops.get(layout.precision)
    mfu = None
    if peak_flops:
        devices = layout.mesh.world_size * layout.devices_per_rank
        mfu = pace.tokens_per_s * facts.flops_per_token / (peak_flops * devices)
    is_calibrated = bool(cluster.calibration.operators)
    # No mixture's memory was published that can be compared, so it has the range of its kind of run.
    memory_range = fitted.RANGES[fitted.group_of(layout, is_calibrated)][0]
    group = fitted.group_of(layout, is_calibrated, is_mixture=facts.experts > 0)
    seconds_range = fitted.RANGES[group][1]
    return Estimate(
        memory=device_memory,
        host=host_memory(layout, facts, cluster, device_memory.peak),
        traffic=pace.volume.traffic(),
        seconds=pace.seconds,
        startup=pace.startup,
        tokens_per_s=pace.tokens_per_s,
        mfu=mfu,
        limit=cluster.device.memory_bytes,
        host_limit=cluster.host_memory_bytes,
        host_assumed=cluster.host_memory_assumed,
        calibrated=layout.precision in cluster.calibration.matmul,
        memory_range=memory_range,
        seconds_range=seconds_range,
    )


def compile_seconds(layout: Layout, facts: ModelFacts) -> float:
    """Return the seconds in which a run compiles its blocks before the first step.

    Equal blocks share one compilation.
    """
    if not layout.config.compile.enabled:
        return 0.0
    return fitted.COMPILING * max(1, len(facts.kinds_of_blocks))


def seconds(
    layout: Layout, facts: ModelFacts, cluster: Cluster, volume: CommunicationVolume
) -> Seconds:
    """Return the seconds of a step by category.

    `volume`: the flows of the step (traffic.flows). `communication` is only the exposed one. In a
    pipeline the slowest stage sets the pace; `bubble` is the time in which the other stages wait.
    """
    compute = _compute_of_all_models(layout, facts, cluster)
    busy = compute.forward + compute.backward
    communication = _exposed_communication(layout, cluster, volume.flows, compute)
    communication += _data_parallel_copy_seconds(layout, facts, cluster)
    update = _update(layout, facts, cluster, busy)
    offload = update.copies
    offload += _activation_offload(layout, facts, cluster, compute)
    rollout = rollout_seconds(layout, facts, cluster)
    if _samples_on_server_ahead(layout):
        # The server samples during the steps; the device that trains does not wait for it.
        rollout = max(0.0, rollout - busy - update.step)
    return Seconds(
        compute=busy,
        communication=communication,
        bubble=_bubble(layout, facts, busy),
        optimizer=update.step,
        offload=offload,
        rollout=rollout,
        forward=compute.forward,
    )


def _compute_of_all_models(layout: Layout, facts: ModelFacts, cluster: Cluster) -> ComputeSeconds:
    """Return the seconds in which a rank computes, for all trainable models together."""
    forward = 0.0
    backward = 0.0
    for _, model in layout.trainable_models(facts):
        compute = compute_seconds(layout, model, cluster)
        forward += compute.forward
        backward += compute.backward
    return ComputeSeconds(forward, backward)


def _data_parallel_copy_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """Return the seconds of nn.DataParallel's copies, if a rank has several devices.

    In each micro-batch the first device sends its weights to the others and adds up their gradients.
    """
    devices = layout.devices_per_rank
    if devices <= 1:
        return 0.0
    # Weights go out, gradients come back.
    entries = facts.parameters + facts.trainable
    bytes_ = float(FP32_BYTES) * entries * (devices - 1) / devices
    once = cluster.collective_seconds("all_gather", bytes_, devices)
    return layout.batch.accumulation * once


def _bubble(layout: Layout, facts: ModelFacts, busy: float) -> float:
    """Return the seconds in which the mean stage of a pipeline waits.

    `busy`: the seconds in which the mean stage computes.
    """
    pipeline = layout.pipeline
    if pipeline is None:
        return 0.0
    ranks = layout.mesh.pp
    # The share of a step that a stage waits if all stages are equally fast.
    idle = bubble(pipeline.schedule, ranks, pipeline.stages_per_rank, layout.batch.accumulation)
    slowest = _slowest_over_mean(facts, pipeline.layers, ranks)
    # The step lasts slowest / (1 − idle) times as long as the mean stage computes.
    return busy * (slowest / (1 - idle) - 1)


@lru_cache(maxsize=1024)
def _slowest_over_mean(facts: ModelFacts, layers: tuple[tuple[int, int], ...], ranks: int) -> float:
    """Return the most FLOPs of a rank of the pipeline over the mean.

    `layers`: the blocks [first, stop) of each stage. Stages go around the ranks in turn.
    """
    if not layers:
        return 1.0
    flops = [0.0] * ranks
    for stage, (first, stop) in enumerate(layers):
        flops[stage % ranks] += stage_cost(facts, first, stop).flops
    return max(flops) * ranks / sum(flops)


def _activation_offload(
    layout: Layout, facts: ModelFacts, cluster: Cluster, compute: ComputeSeconds
) -> float:
    """Return the seconds by which copies of activations take longer than the computing beside them."""
    if layout.device != "cuda":
        return 0.0
    moved = offloaded_bytes(layout, facts, as_pinned=False)
    if not moved:
        return 0.0
    moved *= layout.batch.accumulation
    devices = _devices_per_link(layout, cluster)
    # Forward sends activations to the host, and backward brings them back.
    seconds_down = cluster.host_seconds("to_host", moved, devices)
    seconds_up = cluster.host_seconds("to_device", moved, devices)
    exposed_down = max(0.0, seconds_down - compute.forward)
    exposed_up = max(0.0, seconds_up - compute.backward)
    return exposed_down + exposed_up


def _samples_on_server_ahead(layout: Layout) -> bool:
    """Return whether rollouts run ahead of the steps, on a server elsewhere.

    How far ahead makes no difference to the mean: the slower of both sides sets the pace, and a longer
    queue evens out rollouts that take longer than others.
    """
    rollout = layout.config.algorithm.rollout
    if rollout is None or not rollout.lookahead:
        return False
    return isinstance(rollout.generator, ServerGenerator) and bool(rollout.generator.url)


def _exposed_communication(
    layout: Layout, cluster: Cluster, flows: list[Flow], compute: ComputeSeconds
) -> float:
    """Return the seconds of exposed communication.

    Exposed are: flows beside which nothing is computed; the surplus of flows that take longer than
    the computing beside them; and one call of each flow, before the first block can start or after
    the last has ended.
    """
    overlap_seconds = _overlap_seconds(layout, cluster, compute)
    contention = 1.0
    if any(overlap_seconds.values()):
        contention = CONTENTION
    exposed = 0.0
    # Seconds of the flows that overlap with computing, by the computing.
    overlapping: dict[Beside, float] = {}
    for flow in flows:
        call = _call_seconds(layout, cluster, flow)
        if flow.beside == "nothing":
            exposed += flow.calls * call
            continue
        # The first or last call has nothing beside it. `calls` may be below 1: a mean over stages.
        alone = 0.0
        if flow.beside != "steps":
            alone = min(1.0, flow.calls)
        exposed += alone * call
        hidden = contention * (flow.calls - alone) * call
        overlapping[flow.beside] = overlapping.get(flow.beside, 0.0) + hidden
    surplus = 0.0
    for kind, communicating in overlapping.items():
        surplus += max(0.0, communicating - overlap_seconds[kind])
    return exposed + surplus


def _overlap_seconds(
    layout: Layout, cluster: Cluster, compute: ComputeSeconds
) -> dict[Beside, float]:
    """Return the seconds of computing that can hide communication, by `Flow.beside`."""
    busy = compute.forward + compute.backward
    overlap_seconds: dict[Beside, float] = {
        "forward": compute.forward,
        "backward": compute.backward,
        "last": compute.backward / layout.batch.accumulation,
    }
    if layout.device == "cpu" and cluster.nodes == 1:
        # The cores that compute also copy between ranks.
        overlap_seconds = dict.fromkeys(overlap_seconds, 0.0)
    overlap_seconds["steps"] = busy * cost_of(layout.strategy).overlap()
    return overlap_seconds


def _call_seconds(layout: Layout, cluster: Cluster, flow: Flow) -> float:
    """Return the seconds of one call of a flow.

    The links that it takes follow from how many of its ranks share a host, and a pod of hosts.
    """
    # Ranks of a pipeline are the furthest apart: a stage has all other axes.
    furthest = layout.mesh.world_size // layout.mesh.pp
    stride = _strides(layout.mesh).get(flow.axis, furthest)
    in_host = max(1, cluster.per_node // stride)
    hosts_near = cluster.pod or cluster.nodes
    in_pod = max(1, hosts_near * cluster.per_node // stride)
    bytes_of_call = flow.bytes_ / flow.calls
    call = cluster.collective_seconds(
        flow.kind,
        bytes_of_call,
        flow.ranks,
        min(flow.ranks, in_host),
        in_pod,
    )
    if layout.device == "cpu" and flow.ranks > 1:
        call += fitted.WAIT
    return call


def _strides(mesh: Mesh) -> dict[str, int]:
    """Return the distance between neighbours along each axis of the mesh, in ranks.

    Neighbours share a host, tensor-parallel ones first.
    """
    return {
        "tp": 1,
        "cp": mesh.tp,
        "shard": mesh.tp,
        "gradients": mesh.tp,
        "ep": mesh.tp * mesh.cp,
        # Of cp neighbours of tp ranks each, those of one are in the group.
        "ep_tp": mesh.cp,
        "replicate": mesh.tp * mesh.cp * mesh.ep * mesh.shard,
    }


class UpdateSeconds(NamedTuple):
    """Seconds of clipping and the optimizer's step, and of exposed copies between memories."""

    step: float
    copies: float


def _update(layout: Layout, facts: ModelFacts, cluster: Cluster, busy: float) -> UpdateSeconds:
    """Return the seconds of an update.

    The step takes its bytes over the bandwidth of the memory that holds the optimizer's states.
    Copies go between device, host and disk; of those beside computing, only the seconds beyond
    `busy` count.
    """
    options = layout.config.optimizer
    mesh = layout.mesh
    strategy = layout.strategy
    parts = mesh.tp * mesh.pp * strategy.optimizer_shards(mesh)
    # Parameters that a rank updates, of all trainable models.
    trainable = sum(model.trainable for _, model in layout.trainable_models(facts)) / parts
    moved_fused, moved_unfused = options.traits.moved
    moved_by_step = moved_unfused
    if options.fused:
        moved_by_step = moved_fused
    moved = trainable * (moved_by_step + CLIPPING_BYTES)
    # The memory that has the optimizer's states: none is the device's own.
    place = strategy.offloads()[0]
    if options.offload:
        place = "cpu"
    ranks_on_host = _ranks_on_host(layout, cluster)
    if layout.device == "cpu" or place == "none":
        step = moved / memory_bandwidth(cluster)
    else:
        # All ranks of a host share its memory and its cores. Another optimizer than AdamW takes as
        # much longer as it moves more bytes.
        step = fitted.HOST_STEP * ranks_on_host * moved / HOST_STEP_BYTES
    # On a CPU the states already lie in the host's memory; only a disk is further away.
    is_in_place = layout.device == "cpu" and place != "nvme"
    if place == "none" or is_in_place:
        return UpdateSeconds(step, 0.0)
    if options.offload:
        # fp32 gradients go to the host, fp32 weights come back.
        copied = Copied(up=FP32_BYTES * trainable, down=FP32_BYTES * trainable)
    else:
        stored_facts = as_stored(layout, facts)
        copied = cost_of(strategy).copied(layout, stored_facts, trainable)
    devices = _devices_per_link(layout, cluster)
    up = copied.up - copied.pageable_up
    copies = cluster.host_seconds("to_device", up, devices, copied.is_pinned)
    copies += cluster.host_seconds("to_device", copied.pageable_up, devices, is_pinned=False)
    copies += cluster.host_seconds("to_host", copied.down, devices, copied.is_pinned)
    if copied.hidden:
        return UpdateSeconds(step, max(0.0, copies - busy))
    stored = copied.stored * ranks_on_host
    disk = cluster.disk_seconds("read", stored) + cluster.disk_seconds("write", stored)
    return UpdateSeconds(step, copies + disk)


def _ranks_on_host(layout: Layout, cluster: Cluster) -> int:
    """Return the number of ranks that share a host, its memory and its drive."""
    return min(cluster.per_node, layout.mesh.world_size)


def _devices_per_link(layout: Layout, cluster: Cluster) -> int:
    """Return the number of devices that share a link to the host."""
    if _ranks_on_host(layout, cluster) > SWITCHES_OF_HOST:
        return 2
    return 1


def rollout_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """Return the seconds of a rollout over the number of optimizer steps that learn from it.

    Each completion is taken to have `max_new_tokens`, and each episode its most turns.
    Log-probabilities, values and rewards by models are one forward each. Rewards by functions and
    environments run on the host and are not counted, nor is the reading of prompts.
    """
    rollout = layout.config.algorithm.rollout
    if rollout is None:
        return 0.0
    world = layout.mesh.world_size
    generator = rollout.generator
    episodes = rollout.episodes_of_rollout(layout.batch.global_samples)
    sampled = episodes * rollout.sampled_share
    # In segments, one call has those of as many rollouts, and each is shorter by the same factor.
    sequences_of_rank = math.ceil(sampled * rollout.segments / world)
    batch = min(generator.batch, sequences_of_rank)
    rate = cluster.rate(layout.precision, batch, facts.hidden) or cluster.rate("fp32")

    token = _token_seconds(layout, facts, cluster, generator, batch, rate)
    # Batches run one after the other.
    batches = math.ceil(sequences_of_rank / batch)
    tokens_of_sequence = rollout.turns * math.ceil(generator.max_new_tokens / rollout.segments)
    if rollout.environment is not None:
        tokens_of_sequence = min(tokens_of_sequence, rollout.environment.max_tokens)
    sampling = batches * tokens_of_sequence * token
    flops_per_token = _reading_flops(layout, facts, rollout, sampled)
    scoring = flops_per_token * layout.max_length / world / rate
    refreshing = _refresh_seconds(layout, facts, cluster, generator)
    return (sampling + scoring + refreshing) / rollout.steps_per_rollout


def _reading_flops(
    layout: Layout, facts: ModelFacts, rollout: SamplingSpec, sampled: float
) -> float:
    """Return the FLOPs of all models that read a rollout, for each token of an episode.

    `sampled`: the number of episodes that are sampled.
    """
    # Of a group that is compared in pairs, the reference reads the pair alone.
    compared = sampled
    if layout.batch.rows_per_sample > 1:
        samples = rollout.minibatches * layout.batch.global_samples
        compared = samples * layout.batch.rows_per_sample
    flops = 0.0
    for name, model in facts.roles.items():
        if name == "reference":
            flops += compared * forward_flops(model)
        elif name != "teacher":
            # What answers in every step is counted there (`scoring_flops`).
            flops += sampled * forward_flops(model)
    if rollout.has_reference and "reference" not in facts.roles:
        # The policy without its adapter.
        flops += compared * forward_flops(facts)
    if rollout.steps_per_rollout > 1 and rollout.needs_old_log_probs:
        # The old log-probabilities, which otherwise the forward of the step gives.
        flops += sampled * forward_flops(facts)
    if layout.config.head == "valued":
        # The values of the policy's own value head.
        flops += sampled * forward_flops(facts)
    return flops


def _token_seconds(
    layout: Layout,
    facts: ModelFacts,
    cluster: Cluster,
    generator: Generator,
    batch: int,
    rate: float,
) -> float:
    """Return the seconds in which a rank samples the next token of each sequence of a batch.

    Sampling is bound by memory (Pope et al. 2023): each token reads all weights, and the keys and
    values of the tokens before it. `rate`: FLOP/s of products.
    """
    has_own_engine = isinstance(generator, ServerGenerator)
    # Under autocast, sampling reads the fp32 weights of the policy. A copy and the models of servers and
    # DeepSpeed are in the type in which they compute.
    bytes_per_entry = FP32_BYTES
    has_low_weights = (
        has_own_engine
        or generates_with_weight_copy(layout)
        or layout.strategy.keeps_low
        or layout.is_pure_bf16
    )
    if layout.precision != "fp32" and has_low_weights:
        bytes_per_entry = LOW_BYTES
    bandwidth = memory_bandwidth(cluster)
    entries_of_token = facts.latent_dim
    if not facts.latent_dim:
        # A key and a value for each head.
        entries_of_token = facts.kv_heads * (facts.head_dim + facts.size_of_values)
    entries = entries_of_token * facts.layers
    # The mean over a sequence is half of its length.
    cache = entries * bytes_per_entry * batch * layout.max_length / 2
    reading = (bytes_per_entry * facts.parameters + cache) / bandwidth
    computing = batch * forward_flops(facts) / rate
    token = max(reading, computing)
    if has_own_engine:
        # vLLM and SGLang replay CUDA graphs, so their hosts start no kernels.
        return token
    starts = START_SECONDS[layout.precision].forward * facts.layers
    return max(token, starts)


def _refresh_seconds(
    layout: Layout, facts: ModelFacts, cluster: Cluster, generator: Generator
) -> float:
    """Return the seconds in which sharded weights are gathered once for a sampler with its own."""
    world = layout.mesh.world_size
    has_own_weights = generates_with_weight_copy(layout)
    # An adapter that is handed over alone is small.
    if isinstance(generator, ServerGenerator) and generator.weights == "folder":
        has_own_weights = True
    # With a whole copy of the weights on each rank there is nothing to gather.
    is_sharded = world > layout.mesh.replicate
    if not has_own_weights or not is_sharded:
        return 0.0
    bytes_ = entry_bytes(layout) * facts.parameters * (world - 1) / world
    return cluster.collective_seconds("all_gather", bytes_, world)

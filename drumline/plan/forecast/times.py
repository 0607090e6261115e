"""Seconds of one optimizer step, by category. Pure; microseconds a call.

A device is busy with matrix products, at the rate that large ones reach (or that was measured), and between them with what everything else
moves through its memory: MOVED bytes for each token, layer and entry of the hidden width. MOVED is fitted to published runs, one number a
stack, and frozen; benchmarks/planner_accuracy.py and tests/unit/test_planner_times.py hold predicted against published.
It cannot be faster than its host starts kernels. Communication hides behind computing where the engine lets it (`Flow.beside`); it takes
CONTENTION times as long while both use the device.
"""

from __future__ import annotations

from functools import lru_cache

from drumline.cluster.cluster import Cluster
from drumline.plan.facts import ModelFacts
from drumline.plan.figures import Seconds
from drumline.plan.forecast.sent import WIDTH, Flow, Sent
from drumline.plan.forecast.times_host import STARTS, offload_seconds, optimizer_seconds
from drumline.plan.forecast.times_rollout import forward_flops, rollout_seconds, scoring_flops
from drumline.plan.layout import Layout
from drumline.plan.stages import bubble, stage_cost

# Bytes in 16-bit precisions. Eager: four published runs of torchtitan on H100 (7B with full and selective AC, 8B on 8 and on 128), within
# 3%. Compiled: four of llm-foundry's fused kernels (7B and 70B on H100, 13B and 30B on A100), within 9%. The runs are in
# benchmarks/planner_published.py.
MOVED, MOVED_COMPILED = 1700.0, 1150.0
WHOLE = 10 / 34  # of that, what tensor parallelism leaves whole (Korthikanti et al. 2022, section 4.1)
# What the cross-entropy moves for each token and word, as models.losses computes it, counted: 50 bytes.
MOVED_HEAD = 50.0
CONTENTION = 1.2  # docs/planning.md, "Constants": 1.1 to 1.3


def seconds(layout: Layout, facts: ModelFacts, cluster: Cluster, sent: Sent) -> Seconds:
    """`sent`: of traffic.flows. What computing does not hide of communication is told apart. Of a pipeline the slowest stage sets the
    pace; what the others wait for it is in `bubble`."""
    learning = [layout.role_facts[name] for name, role in layout.roles.items() if role.learns and name in layout.role_facts]
    parts = [_busy(layout, model, cluster) for model in (facts, *learning)]
    forward, backward = sum(part[0] for part in parts), sum(part[1] for part in parts)
    hidden = {"forward": forward, "backward": backward, "last": backward / layout.batch.accumulation}
    busy, waits = forward + backward, 0.0
    if layout.pipeline is not None:
        idle = bubble(layout.pipeline.schedule, layout.mesh.pp, layout.pipeline.stages_per_rank, layout.batch.accumulation)
        waits = busy * (_slowest(facts, layout.pipeline.layers, layout.mesh.pp) / (1 - idle) - 1)
    return Seconds(
        compute=busy,
        communication=_exposed(layout, cluster, sent.flows, hidden) + _threads(layout, facts, cluster),
        bubble=waits,
        optimizer=optimizer_seconds(layout, facts, cluster),
        offload=offload_seconds(layout, facts, cluster, busy),
        rollout=rollout_seconds(layout, facts, cluster),
    )


def _busy(layout: Layout, facts: ModelFacts, cluster: Cluster) -> tuple[float, float]:
    """Seconds in which a rank computes forward, and backward with what is computed again; mean over the stages of a pipeline."""
    mesh, precision, rounds = layout.mesh, layout.precision, layout.batch.accumulation
    tokens = layout.rows * layout.positions / mesh.cp / layout.devices_per_rank  # of a micro-batch
    rate = (cluster.rate(precision, max(1, round(tokens)), facts.hidden) or cluster.rate("fp32")) * mesh.tp * mesh.pp
    bandwidth = (cluster.calibration.memory or cluster.device.bandwidth) * mesh.pp
    moved = (MOVED_COMPILED if layout.config.compile.enabled else MOVED) * facts.hidden * facts.layers * (WHOLE + (1 - WHOLE) / mesh.tp)
    moved = WIDTH[precision] / 2 * moved + MOVED_HEAD * facts.vocab_size / mesh.tp
    forward, backward = flops(facts, layout.activation_checkpointing)
    again = layout.activation_checkpointing != "none"
    first = rounds * tokens * ((forward + scoring_flops(layout, facts)) / rate + moved / 3 / bandwidth)
    second = rounds * tokens * (backward / rate + (2 + again) * moved / 3 / bandwidth)
    starts = rounds * (len(facts.block_weights) or facts.layers) / mesh.pp * layout.devices_per_rank
    start_first, start_second = starts * STARTS[precision][0], starts * (STARTS[precision][1] + again * STARTS[precision][0])
    if layout.device == "cpu":  # the cores that start kernels run them, too
        return first + start_first, second + start_second
    return max(first, start_first), max(second, start_second)


@lru_cache(maxsize=1024)
def flops(facts: ModelFacts, checkpointing: str) -> tuple[float, float]:
    """Of a token: forward, and backward with what is computed again: blocks whole (full), or every second product and no attention
    (selective)."""
    forward, attention = forward_flops(facts), facts.layers * facts.attention_flops / 3
    blocks = max(0.0, forward - attention - 2 * facts.head_parameters)
    again = {"none": 0.0, "selective": blocks / 2, "full": blocks + attention}[checkpointing]
    return forward, facts.flops_per_token - forward + again


def _exposed(layout: Layout, cluster: Cluster, flows: list[Flow], hidden: dict[str, float]) -> float:
    """Seconds in which nothing is computed for the sake of communication: what lies beside nothing, what is longer than what it lies
    beside, and of all that is beside something one call, before the first block can start or after the last has ended."""
    wires: dict[str, float] = {}
    exposed = 0.0
    for flow in flows:
        each = cluster.collective_seconds(flow.kind, flow.bytes_ / flow.calls, flow.ranks, _together(layout, cluster, flow))
        alone = flow.calls if flow.beside == "nothing" else min(1.0, flow.calls)
        exposed += alone * each
        if flow.beside != "nothing":
            wires[flow.beside] = wires.get(flow.beside, 0.0) + CONTENTION * (flow.calls - alone) * each
    return exposed + sum(max(0.0, wire - hidden[beside]) for beside, wire in wires.items())


def _together(layout: Layout, cluster: Cluster, flow: Flow) -> int:
    """How many ranks of a group share a host: neighbours in the mesh do, tensor parallel ones first."""
    mesh = layout.mesh
    strides = {"tp": 1, "cp": mesh.tp, "shard": mesh.tp, "gradients": mesh.tp, "replicate": mesh.tp * mesh.cp * mesh.shard}
    stride = strides.get(flow.way, mesh.world_size // mesh.pp)
    return max(1, min(flow.ranks, cluster.per_node // stride))


def _threads(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """nn.DataParallel's: for each micro-batch the first device hands its weights to the others, and adds up their gradients."""
    if layout.data_parallel != "dp" or layout.devices_per_rank == 1:
        return 0.0
    devices, bytes_ = layout.devices_per_rank, 4.0 * (facts.parameters + facts.learned)
    return layout.batch.accumulation * cluster.collective_seconds("all_gather", bytes_ * (devices - 1) / devices, devices)


@lru_cache(maxsize=1024)
def _slowest(facts: ModelFacts, layers: tuple[tuple[int, int], ...], ranks: int) -> float:
    """FLOPs of the rank of a pipeline that has most, over the mean."""
    if not layers:
        return 1.0
    taken = [sum(stage_cost(facts, first, stop).flops for first, stop in layers[rank::ranks]) for rank in range(ranks)]
    return max(taken) * ranks / sum(taken)

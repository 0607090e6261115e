"""Seconds that hang on the host: starting kernels, the optimizer's step, what is kept off the device. Pure."""

from __future__ import annotations

from drumline.cluster.cluster import Cluster
from drumline.config import strategies as s
from drumline.config.schema import OptimizerConfig
from drumline.plan.facts import ModelFacts
from drumline.plan.forecast.states import shards_of
from drumline.plan.layout import Layout

# Seconds that a host takes to start a block's kernels, forward and backward (38 and 78 of a Llama in fp32; 54 and 100 under autocast): CPU
# time of one core of an EPYC at 2.6 GHz, torch 2.13, blocks so small that nothing else takes time.
STARTS = {"fp32": (0.60e-3, 0.54e-3), "bf16": (0.95e-3, 0.92e-3), "fp16": (0.95e-3, 0.92e-3)}
# A host of eight channels of DDR4-3200 (AMD EPYC 7003 datasheet), which its ranks share.
HOST_BANDWIDTH = 204.8e9
# Bytes that a step moves for each parameter. One kernel: AdamW reads weight, gradient and both moments and writes three; SGD with momentum
# reads three and writes two. Several kernels, counted in torch's _multi_tensor_adamw: 18 passes.
FUSED, SEVERAL = {"adamw": 28, "sgd": 20}, {"adamw": 72, "sgd": 32}
CLIPPED = 4 + 8  # the norm reads gradients, clipping reads and writes them


def optimizer_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster) -> float:
    """Bytes over the bandwidth of the memory where the step is taken."""
    options, learned = layout.config.optimizer, _learned_here(layout, facts)
    here = learned * (step_bytes(options) + CLIPPED)
    if layout.device == "cpu" or not _steps_on_host(layout):
        return here / (cluster.calibration.memory or cluster.device.bandwidth)
    return here * min(cluster.per_node, layout.mesh.world_size) / HOST_BANDWIDTH


def step_bytes(options: OptimizerConfig) -> int:
    return (FUSED if options.fused else SEVERAL)[options.kind]


def offload_seconds(layout: Layout, facts: ModelFacts, cluster: Cluster, busy: float) -> float:
    """Copies between device and host, and between host and disk. FSDP2 copies beside computing: what takes longer counts. DeepSpeed
    waits: gradients go down after each micro-batch, weights come up after the step (stage 3 with parameters on the host: for each
    micro-batch too)."""
    strategy = layout.strategy
    if layout.device == "cpu" and not _on_disk(strategy):
        return 0.0
    learned, rounds = _learned_here(layout, facts), layout.batch.accumulation
    low = 4 if layout.precision == "fp32" else 2
    if isinstance(strategy, s.FSDP2Strategy) and strategy.offload == "cpu":
        up = 4 * facts.parameters / _parts(layout) * rounds * (2 if strategy.reshard_after_forward else 1)
        down = 4 * learned * (rounds if strategy.sync_each_micro_batch else 1)
        return max(0.0, _copy(cluster, up, down) - busy)
    if not isinstance(strategy, s.ZeroStrategy) or strategy.offload_optimizer.kind == "none":
        return 0.0
    up, down = low * learned, 4 * learned * rounds
    if isinstance(strategy, s.Zero3Strategy) and strategy.offload_parameters.kind != "none":
        up += low * facts.parameters / _parts(layout) * rounds
    taken = _copy(cluster, up, down)
    if _on_disk(strategy):  # fp32 weights and moments are read and written back; all ranks of a host share the drive
        stored = 12 * learned * min(cluster.per_node, layout.mesh.world_size)
        taken += cluster.disk_seconds("read", stored) + cluster.disk_seconds("write", stored)
    return taken


def _copy(cluster: Cluster, up: float, down: float) -> float:
    """Seconds of bytes to the device and to the host; 0 on a CPU."""
    return cluster.host_seconds("to_device", up) + cluster.host_seconds("to_host", down)


def _on_disk(strategy: s.AnyStrategy) -> bool:
    return isinstance(strategy, s.ZeroStrategy) and strategy.offload_optimizer.kind == "nvme"


def _steps_on_host(layout: Layout) -> bool:
    strategy = layout.strategy
    if isinstance(strategy, s.ZeroStrategy):
        return strategy.offload_optimizer.kind != "none"
    return isinstance(strategy, s.FSDP2Strategy) and strategy.offload == "cpu"


def _parts(layout: Layout) -> int:
    """Ranks that share the weights."""
    mesh = layout.mesh
    return mesh.tp * mesh.pp * (mesh.shard if layout.data_parallel == "zero" else shards_of(layout))


def _learned_here(layout: Layout, facts: ModelFacts) -> float:
    """Parameters that a rank steps, of all models that learn."""
    learning = [layout.role_facts[name] for name, role in layout.roles.items() if role.learns and name in layout.role_facts]
    return sum(model.learned for model in (facts, *learning)) / _parts(layout)

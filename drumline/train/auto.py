"""`strategy: auto` of a run that starts now: the planner is asked about the devices that are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

from drumline.core.config import Config
from drumline.core.facts import ModelFacts
from drumline.core.plan import DataPlan, RolePlan
from drumline.core.resolve import device_of, processes_of
from drumline.hardware.calibration import calibration_for
from drumline.hardware.cluster import Cluster
from drumline.hardware.detect import Machine
from drumline.planner.cluster import cluster_of
from drumline.planner.search.answer import Question
from drumline.planner.search.auto import choose


def settle(
    config: Config,
    machine: Machine,
    launched: int | None,
    facts: ModelFacts,
    data: DataPlan | None,
    roles: Mapping[str, RolePlan],
) -> tuple[Config, list[str]]:
    """The config with what the planner chose, and why; as it is where its strategy is said. `launched`: processes that are there already.

    Raises PlanError where nothing fits.
    """
    if config.strategy.kind != "auto":
        return config, []
    device = device_of(config, machine)
    cluster, why = cluster_here(config, machine, device, processes_of(config, machine, device, launched))
    said, deepspeed = launched is not None or config.launch.nproc is not None, find_spec("deepspeed") is not None
    chosen, reason = choose(Question(config, cluster, facts, data, roles, processes=said, deepspeed=deepspeed))
    return chosen, [reason, *why] if reason else why


def cluster_here(config: Config, machine: Machine, device: Literal["cpu", "cuda"], world: int) -> tuple[Cluster, list[str]]:
    """The devices that `world` processes have: as the YAML says them where they are these, else as they are found; and a line where they
    are not these. `device`: what the run computes on, which may be the CPU of a host with GPUs."""
    if device != machine.device:
        machine = machine.without_devices()
    measured = calibration_for(machine)
    said = cluster_of(config.cluster, machine, world, measured)
    here = _of(cluster_of(None, machine, world, measured), world)
    if said.world_size == world and said.device.kind == here.device.kind and said.device.name == here.device.name:
        return said, []
    other = f"the cluster that is said ({said.world_size} × {said.device.name}) is not the one here ({world} × {here.device.name})"
    return here, [f"strategy auto: {other}, which was planned for"] if config.cluster else []


def _of(cluster: Cluster, world: int) -> Cluster:
    """Its first devices, or as many such hosts as it takes."""
    per_node = next(n for n in range(min(cluster.per_node, world), 0, -1) if world % n == 0)
    return replace(cluster, per_node=per_node, nodes=world // per_node)

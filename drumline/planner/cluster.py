"""The cluster that a run is planned for: the YAML's, completed with what this machine has."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Literal

from drumline.core.cluster import ClusterConfig
from drumline.core.config import Config
from drumline.hardware import catalog
from drumline.hardware.cluster import (
    Calibration,
    Cluster,
    DeviceSpec,
    Link,
    calibration_for,
    hardware,
    is_processor,
    read_calibration,
)
from drumline.hardware.detect import Machine

# FLOP of fp32 in a cycle of one core: two fused multiply-adds on eight numbers each (AVX2: Intel's and AMD's optimisation manuals).
# Wider units are not counted on, nor 16-bit ones: `drumline calibrate` measures what they do. One channel of DDR4-3200 (JEDEC).
FLOP_PER_CYCLE, CLOCK, CHANNEL = 32, 2.5e9, 25.6e9
# A GPU that the catalog lacks is planned for as if it were this one, the slowest that has bf16.
STAND_IN = "3090"
MANY_NODES = 64  # from here on networks have switches over switches, which many hosts share


def cluster_of(
    described: ClusterConfig | None,
    machine: Machine,
    processes: int,
    calibration: Calibration | None = None,
) -> Cluster:
    """The cluster of the YAML. `processes`: ranks of this machine, where it is the one to plan for; `calibration`: of this machine. A
    calibration counts where the device is the one that is here, on any number of hosts; a file that the YAML names goes before it. Raises
    EnvironmentFault where that file is damaged or missing."""
    if described is None:
        return found(machine, processes, calibration)
    ranks = described.per_node or processes
    spec, base = described.spec(), found(machine, ranks, calibration)
    if (
        spec is None and described.device is not None and base.device.kind == "cuda"
    ):  # a CPU is meant, and here are GPUs
        spec = processor(machine, ranks)
    own = described.device in described.devices
    if (
        spec is not None and own and spec.name == base.device.name
    ):  # the device that is here, in the user's words
        base = replace(
            base,
            device=spec,
            intra=described.link(spec.intra),
            host_link=described.link(spec.host_link),
        )
    elif spec is not None and spec.name != base.device.name:
        taken = catalog.AMBIGUOUS.get(catalog.plain(described.device or "")) if not own else None
        notes = (f"cluster.device {described.device}: taken for {taken}",) if taken else ()
        intra, host_link = described.link(spec.intra), described.link(spec.host_link)
        inter = described.link(catalog.OTHER_NETWORK)
        base = Cluster(spec, 1, 1, intra, inter, host_link, notes=notes)
    named, about = _named(described, base.device, machine)
    if named is not None:
        measured = named.shared(ranks) if base.device.kind == "cpu" else named
    else:  # of this machine, which has measured its own link alone
        measured = (
            base.calibration
            if described.intra is None
            else replace(base.calibration, collectives={})
        )
    per_node = described.per_node or base.per_node
    host = int(described.host_memory_gb * catalog.GIGA) if described.host_memory_gb else None
    device = (
        base.device
        if host is None or base.device.kind != "cpu"
        else replace(base.device, memory_bytes=host // per_node)
    )
    host = host or base.host_memory_bytes
    is_assumed = host is None
    if host is None:
        host = per_node * catalog.usual_host_memory(device)[0]
    intra = base.intra if described.intra is None else described.link(described.intra)
    network = described.inter or catalog.usual_network(intra.name, per_node)[0]
    return replace(
        base,
        device=device,
        per_node=per_node,
        nodes=described.nodes,
        intra=intra,
        inter=described.link(network),
        host_memory_bytes=host,
        host_memory_assumed=is_assumed,
        price_per_device_hour=described.price_per_device_hour,
        mtbf_hours=described.mtbf_hours,
        restart_seconds=described.restart_seconds,
        repair_hours=described.repair_hours,
        pod=described.pod,
        oversubscription=described.oversubscription,
        found=base.found and described.nodes == 1 and per_node == base.per_node,
        calibration=measured,
        notes=(*base.notes, *about, *network_assumed(described, described.nodes, network)),
    )


def _named(
    described: ClusterConfig, device: DeviceSpec, machine: Machine
) -> tuple[Calibration | None, tuple[str, ...]]:
    """The calibration of the file that the YAML names, and a note where that is of another device. None without a file, and for rates of a
    CPU where there are GPUs, or the other way round: these say nothing."""
    if described.calibration is None:
        return None, ()
    named = read_calibration(Path(described.calibration))
    where, of_processor = (
        f"cluster.calibration is of {named.hardware}",
        is_processor(named.hardware),
    )
    if of_processor != (device.kind == "cpu"):
        return None, (
            f"{where}, which is {'no GPU' if of_processor else 'no CPU'}: it is not used for {device.name}",
        )
    if of_processor:  # `cpu` names no model
        same = described.device is not None or named.hardware == hardware(machine)
    else:
        known = catalog.by_driver(named.hardware, device.memory_bytes)
        same = described.device in described.devices or device.name == (
            known.name if known else named.hardware
        )
    return named, () if same else (
        f"{where}, and used for {'this machine' if of_processor else device.name}",
    )


def usual_inter(intra: str, per_node: int) -> Link:
    """Return the link that is assumed between hosts of `per_node` devices. `intra`: the name of the link within one."""
    return ClusterConfig().link(catalog.usual_network(intra, per_node)[0])


def cluster_here(
    config: Config, machine: Machine, device: Literal["cpu", "cuda"], world: int
) -> tuple[Cluster, list[str]]:
    """The devices that `world` processes have: the YAML's where it describes these, else those found; and a line where it does not.
    `device`: what the run computes on, which may be the CPU of a host with GPUs."""
    if device != machine.device:
        machine = machine.without_devices()
    measured, counts = calibration_for(machine), config.launch.host_ranks()
    share = gcd(*counts) if sum(counts) == world else world  # of one host
    described = cluster_of(config.cluster, machine, share, measured)
    here = cluster_of(None, machine, share, measured)
    per_node = next(n for n in range(min(here.per_node, share), 0, -1) if world % n == 0)
    # The first `world` devices, or as many such hosts as they need.
    here = replace(
        here,
        per_node=per_node,
        nodes=world // per_node,
        inter=usual_inter(here.intra.name, per_node),
    )
    if (
        described.world_size == world
        and described.device.kind == here.device.kind
        and described.device.name == here.device.name
    ):
        return described, list(
            network_assumed(config.cluster, described.nodes, described.inter.name)
        )
    other = f"the cluster of the YAML ({described.world_size} × {described.device.name}) is not the one here ({world} × {here.device.name})"
    lines = [f"strategy auto: {other}, which was planned for"] if config.cluster else []
    return here, [*lines, *network_assumed(None, here.nodes, here.inter.name)]


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """The cluster with another number of the same hosts."""
    return replace(cluster, nodes=nodes, found=cluster.found and nodes == cluster.nodes)


def network_assumed(described: ClusterConfig | None, nodes: int, network: str) -> tuple[str, ...]:
    """Notes where nobody has set the link between several hosts, since nothing matters more to plans on these, and where links are shared
    that many hosts have between them. `network`: what is assumed between hosts."""
    described, notes = described or ClusterConfig(), list[str]()
    if nodes > 1 and described.inter is None:
        usual = f"cluster.inter is not set: {network} between hosts is assumed"
        if network != catalog.OTHER_NETWORK:
            usual += ", as hosts of eight such devices have"
        notes.append(f"{usual}; set what there is, such as cluster.inter=400Gb or 8x400Gb")
    if nodes >= MANY_NODES and described.pod is None:
        notes.append(
            f"cluster.pod is not set: no link between {nodes} hosts is taken to be congested; see cluster.oversubscription"
        )
    return tuple(notes)


def found(machine: Machine, processes: int, calibration: Calibration | None = None) -> Cluster:
    """This machine, as `processes` ranks share it: a rank has a GPU of its own, or its part of the cores and of the memory. More ranks
    than GPUs need more hosts like this one."""
    measured, notes = calibration or Calibration(), tuple[str, ...]()
    if machine.devices:
        used = machine.devices[:processes]
        first, names = (
            min(used, key=lambda device: device.memory_bytes),
            dict.fromkeys(device.name for device in used),
        )
        if len(names) > 1:
            notes = (
                f"there are GPUs of several kinds ({', '.join(names)}): planned as if all were {first.name}, of the least memory",
            )
        if first.name != used[0].name:  # whose calibration it is
            measured = Calibration()
        known = catalog.by_driver(first.name, first.memory_bytes) or catalog.DEVICES.get(first.name)
        if known is None and not measured.matmul:
            notes += (
                f"{first.name} is not in the catalog: taken for as fast as a {STAND_IN}; `drumline calibrate` measures it",
            )
        spec = replace(
            known or catalog.DEVICES[STAND_IN],
            name=known.name if known else first.name,
            memory_bytes=first.memory_bytes,
        )
        if "PCIE" in first.name.upper():  # drivers write both: A100-PCIE-40GB, H100 PCIe
            spec = replace(spec, intra=spec.host_link)
        per_node = len(used)
    else:
        spec, per_node, measured = (
            processor(machine, processes),
            processes,
            measured.shared(processes),
        )
    intra, host_link, network = (
        catalog.LINKS[spec.intra],
        catalog.LINKS[spec.host_link],
        usual_inter(spec.intra, per_node),
    )
    nodes, host = -(-processes // per_node), machine.memory_bytes
    return Cluster(
        spec,
        per_node,
        nodes,
        intra,
        network,
        host_link,
        host,
        found=True,
        calibration=measured,
        notes=notes,
    )


def processor(machine: Machine, processes: int) -> DeviceSpec:
    """The part of this machine's cores and memory that each of `processes` ranks has."""
    flops = dict.fromkeys(
        ("fp32", "bf16", "fp16"), FLOP_PER_CYCLE * CLOCK * machine.cores / processes
    )
    memory, source = machine.memory_bytes // processes, "AVX2 at 2.5 GHz, one channel of DDR4-3200"
    return DeviceSpec(
        "cpu",
        "cpu",
        memory,
        CHANNEL / processes,
        flops,
        source,
        intra="loopback",
        host_link="loopback",
    )

"""The cluster that a run is planned for: the YAML's, completed with what this machine has."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from drumline.config.cluster import ClusterConfig
from drumline.config.config import Config
from drumline.hardware import catalog
from drumline.hardware.cluster import (
    Calibration,
    Cluster,
    DeviceSpec,
    Link,
    calibration_for,
    hardware_name,
    is_processor,
    read_calibration,
)
from drumline.hardware.detect import Machine

# FLOP of fp32 in a cycle of one core: two fused multiply-adds on eight numbers each (AVX2: Intel's
# and AMD's optimisation manuals). Wider units are not counted on, nor 16-bit ones: `drumline
# calibrate` measures what they do.
FLOP_PER_CYCLE = 32
# Cycles a second of a core: a choice.
CLOCK_HZ = 2.5e9
# Bytes a second of one channel of DDR4-3200 (JEDEC): 3.2e9 transfers of 8 bytes.
CHANNEL_BYTES_PER_S = 25.6e9
PROCESSOR_SOURCE = "AVX2 at 2.5 GHz, one channel of DDR4-3200"
# A GPU that the catalog lacks is planned for as if it were this one, the slowest that has bf16.
STAND_IN = "3090"
# From this number of hosts on, networks have switches over switches, which many hosts share.
MANY_HOSTS = 64


def cluster_of(
    described: ClusterConfig | None,
    machine: Machine,
    processes: int,
    calibration: Calibration | None = None,
) -> Cluster:
    """Return the cluster that the YAML describes, completed with what this machine has.

    `described`: the section `cluster` of the YAML; None for this machine as it is.
    `processes`: ranks of this machine, if it is the one to plan for.
    `calibration`: of this machine. It is used if the device to plan for is the one of this machine, on
    any number of hosts. A file that the YAML names is used in its place.

    Raises EnvironmentFault if that file is damaged or missing.
    """
    if described is None:
        return cluster_of_machine(machine, processes, calibration)
    ranks = described.per_node or processes
    base = _host_with_device(described, machine, ranks, calibration)
    named = _named_calibration(described, base.device, machine)
    if named.calibration is None:
        measured = base.calibration
        if described.intra is not None:
            # The collectives were measured over this machine's link, not over the one that is set.
            measured = replace(measured, collectives={})
    elif base.device.kind == "cpu":
        # The file has the rates of a whole host, of which each rank has its part.
        measured = named.calibration.share_among(ranks)
    else:
        measured = named.calibration
    per_node = described.per_node or base.per_node
    host = _host_memory(described, base, per_node)
    intra = base.intra
    if described.intra is not None:
        intra = described.link(described.intra)
    usual_network, _ = catalog.usual_network(intra.name, per_node)
    network = described.inter or usual_network
    assumed = network_notes(described, described.nodes, network)
    # It is this machine if neither the hosts nor the ranks of a host differ.
    is_this_machine = base.is_this_machine and described.nodes == 1 and per_node == base.per_node
    return replace(
        base,
        device=host.device,
        per_node=per_node,
        nodes=described.nodes,
        intra=intra,
        inter=described.link(network),
        host_memory_bytes=host.bytes_,
        host_memory_assumed=host.is_assumed,
        price_per_device_hour=described.price_per_device_hour,
        mtbf_hours=described.mtbf_hours,
        restart_seconds=described.restart_seconds,
        repair_hours=described.repair_hours,
        pod=described.pod,
        oversubscription=described.oversubscription,
        is_this_machine=is_this_machine,
        calibration=measured,
        notes=(*base.notes, *named.notes, *assumed),
    )


def _host_with_device(
    described: ClusterConfig, machine: Machine, ranks: int, calibration: Calibration | None
) -> Cluster:
    """Return one host with the device that the YAML names.

    It is this machine if the YAML names no device, or the one that is here.
    """
    here = cluster_of_machine(machine, ranks, calibration)
    spec = described.spec()
    if spec is None and described.device is not None and here.device.kind == "cuda":
        # A CPU is meant, and here are GPUs.
        spec = processor(machine, ranks)
    if spec is None:
        return here
    is_own = described.device in described.devices
    intra = described.link(spec.intra)
    host_link = described.link(spec.host_link)
    if spec.name == here.device.name:
        if is_own:
            # The device that is here, as the user describes it.
            return replace(here, device=spec, intra=intra, host_link=host_link)
        return here
    # A name such as "a100" stands for several devices of the catalog.
    notes: tuple[str, ...] = ()
    taken = catalog.AMBIGUOUS.get(catalog.normalise_name(described.device or ""))
    if taken is not None and not is_own:
        notes = (f"cluster.device {described.device}: taken for {taken}",)
    inter = described.link(catalog.OTHER_NETWORK)
    return Cluster(spec, 1, 1, intra, inter, host_link, notes=notes)


class _HostMemory(NamedTuple):
    """The memory of a host in bytes."""

    bytes_: int
    # Nobody has set it, and the host is not here to be asked.
    is_assumed: bool
    # The device. A CPU has its share of this memory.
    device: DeviceSpec


def _host_memory(described: ClusterConfig, base: Cluster, per_node: int) -> _HostMemory:
    """Return the memory of a host with `per_node` devices.

    It is as set in the YAML, else as found, else what such hosts usually have.
    """
    device = base.device
    set_bytes = None
    if described.host_memory_gb:
        set_bytes = int(described.host_memory_gb * catalog.GIGA)
        if device.kind == "cpu":
            device = replace(device, memory_bytes=set_bytes // per_node)
    known_bytes = set_bytes or base.host_memory_bytes
    if known_bytes is not None:
        return _HostMemory(known_bytes, False, device)
    bytes_a_device, _ = catalog.usual_host_memory(device)
    return _HostMemory(per_node * bytes_a_device, True, device)


class _NamedCalibration(NamedTuple):
    """The calibration that the YAML names, None if it is not used; and notes on it."""

    calibration: Calibration | None
    notes: tuple[str, ...]


def _named_calibration(
    described: ClusterConfig, device: DeviceSpec, machine: Machine
) -> _NamedCalibration:
    """Return the calibration of the file that the YAML names, with a note if it is of another device.

    None without a file. None also for the rates of a CPU if GPUs are planned for, or the other way
    round: these say nothing.
    """
    if described.calibration is None:
        return _NamedCalibration(None, ())
    named = read_calibration(Path(described.calibration))
    about = f"cluster.calibration is of {named.hardware}"
    is_of_processor = is_processor(named.hardware)
    if is_of_processor != (device.kind == "cpu"):
        lacking = "no GPU" if is_of_processor else "no CPU"
        note = f"{about}, which is {lacking}: it is not used for {device.name}"
        return _NamedCalibration(None, (note,))
    if is_of_processor:
        # The name `cpu` in a YAML names no model, so any processor is the same.
        is_same = described.device is not None or named.hardware == hardware_name(machine)
        user = "this machine"
    else:
        known = catalog.find_by_driver_name(named.hardware, device.memory_bytes)
        measured_name = named.hardware
        if known is not None:
            measured_name = known.name
        # A device that the user describes may have any name, so it is taken for the same.
        is_own = described.device in described.devices
        is_same = is_own or device.name == measured_name
        user = device.name
    if is_same:
        return _NamedCalibration(named, ())
    note = f"{about}, and used for {user}"
    return _NamedCalibration(named, (note,))


def usual_inter(intra: str, per_node: int) -> Link:
    """Return the link that is assumed between hosts of `per_node` devices.

    `intra`: the name of the link within a host.
    """
    network, _ = catalog.usual_network(intra, per_node)
    return ClusterConfig().link(network)


def cluster_here(
    config: Config, machine: Machine, device: Literal["cpu", "cuda"], world: int
) -> tuple[Cluster, list[str]]:
    """Return the devices that `world` processes of this run have, and notes for the user.

    `train.setup` and `train.replan` call it. These are the devices of the YAML if it describes what
    is here, else those that are found, with a note.

    `device`: what the run computes on, which may be the CPU of a host with GPUs.
    """
    if device != machine.device:
        machine = machine.without_devices()
    measured = calibration_for(machine)
    host_ranks = config.launch.host_ranks()
    # Ranks of one host. Hosts with unequal numbers are split into equal parts.
    ranks = world
    if sum(host_ranks) == world:
        ranks = math.gcd(*host_ranks)
    described = cluster_of(config.cluster, machine, ranks, measured)
    this_host = cluster_of(None, machine, ranks, measured)
    here = _split_into_hosts(this_host, ranks, world)
    is_here = (
        described.world_size == world
        and described.device.kind == here.device.kind
        and described.device.name == here.device.name
    )
    if is_here:
        notes = network_notes(config.cluster, described.nodes, described.inter.name)
        return described, list(notes)
    lines = []
    if config.cluster is not None:
        planned = f"{described.world_size} × {described.device.name}"
        actual = f"{world} × {here.device.name}"
        lines.append(
            f"strategy auto: the cluster of the YAML ({planned}) is not the one here ({actual}),"
            " which was planned for"
        )
    lines += network_notes(None, here.nodes, here.inter.name)
    return here, lines


def _split_into_hosts(here: Cluster, ranks: int, world: int) -> Cluster:
    """Return the first `world` devices of a host, or as many equal hosts as they need.

    `ranks`: of one host.
    """
    per_node = min(here.per_node, ranks)
    # A cluster has the same number of devices on each host.
    while world % per_node != 0:
        per_node -= 1
    inter = usual_inter(here.intra.name, per_node)
    return replace(here, per_node=per_node, nodes=world // per_node, inter=inter)


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """Return the cluster with another number of the same hosts."""
    return replace(
        cluster, nodes=nodes, is_this_machine=cluster.is_this_machine and nodes == cluster.nodes
    )


def network_notes(described: ClusterConfig | None, nodes: int, network: str) -> tuple[str, ...]:
    """Return notes on what is assumed of the network between hosts.

    It matters more to plans than anything else. There is a note if nobody has set the link between
    several hosts, and one if so many hosts usually share links.

    `network`: the name of the link that is planned with between hosts.
    """
    described = described or ClusterConfig()
    notes = []
    if nodes > 1 and described.inter is None:
        usual = f"cluster.inter is not set: {network} between hosts is assumed"
        if network != catalog.OTHER_NETWORK:
            usual += ", as hosts of eight such devices have"
        notes.append(f"{usual}; set what there is, such as cluster.inter=400Gb or 8x400Gb")
    if nodes >= MANY_HOSTS and described.pod is None:
        notes.append(
            f"cluster.pod is not set: no link between {nodes} hosts is taken to be congested;"
            " see cluster.oversubscription"
        )
    return tuple(notes)


class _Devices(NamedTuple):
    """The devices of a host."""

    # What each of them is.
    spec: DeviceSpec
    number: int
    # What was measured of them.
    calibration: Calibration
    # For the user.
    notes: tuple[str, ...]


def cluster_of_machine(
    machine: Machine, processes: int, calibration: Calibration | None = None
) -> Cluster:
    """Return this machine as a cluster that `processes` ranks share.

    A rank has a GPU of its own, or its part of the cores and of the memory. More ranks than GPUs need
    more hosts like this one.
    """
    measured = calibration or Calibration()
    if machine.devices:
        devices = _devices_of_gpus(machine, processes, measured)
    else:
        spec = processor(machine, processes)
        devices = _Devices(spec, processes, measured.share_among(processes), ())
    intra = catalog.LINKS[devices.spec.intra]
    return Cluster(
        device=devices.spec,
        per_node=devices.number,
        nodes=math.ceil(processes / devices.number),
        intra=intra,
        inter=usual_inter(intra.name, devices.number),
        host_link=catalog.LINKS[devices.spec.host_link],
        host_memory_bytes=machine.memory_bytes,
        is_this_machine=True,
        calibration=devices.calibration,
        notes=devices.notes,
    )


def _devices_of_gpus(machine: Machine, processes: int, calibration: Calibration) -> _Devices:
    """Return the first `processes` GPUs, all taken for the one with the least memory.

    A run needs the same plan to fit on all of them.
    """
    used = machine.devices[:processes]
    least = min(used, key=lambda device: device.memory_bytes)
    names = dict.fromkeys(device.name for device in used)
    notes = []
    if len(names) > 1:
        notes.append(
            f"there are GPUs of several kinds ({', '.join(names)}): planned as if all were"
            f" {least.name}, of the least memory"
        )
    if least.name != used[0].name:
        # The calibration is of the first one.
        calibration = Calibration()
    known = catalog.find_by_driver_name(least.name, least.memory_bytes) or catalog.DEVICES.get(
        least.name
    )
    if known is None and not calibration.matmul:
        notes.append(
            f"{least.name} is not in the catalog: taken for as fast as a {STAND_IN};"
            " `drumline calibrate` measures it"
        )
    if known is None:
        spec = replace(catalog.DEVICES[STAND_IN], name=least.name)
    else:
        spec = known
    # As the driver says, which is a little less than the catalog has.
    spec = replace(spec, memory_bytes=least.memory_bytes)
    return _Devices(spec, len(used), calibration, tuple(notes))


def processor(machine: Machine, processes: int) -> DeviceSpec:
    """Return the part of this machine's cores and memory that each of `processes` ranks has."""
    rate = FLOP_PER_CYCLE * CLOCK_HZ * machine.cores / processes
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        memory_bytes=machine.memory_bytes // processes,
        bandwidth=CHANNEL_BYTES_PER_S / processes,
        flops=dict.fromkeys(("fp32", "bf16", "fp16"), rate),
        source=PROCESSOR_SOURCE,
        intra="loopback",
        host_link="loopback",
    )

"""This machine as a cluster."""

from __future__ import annotations

from dataclasses import replace

from drumline.cluster import catalog
from drumline.cluster.calibration import Calibration
from drumline.cluster.cluster import Cluster, DeviceSpec
from drumline.cluster.detect import Machine

# FLOP of fp32 in a cycle of one core: two fused multiply-adds on eight numbers each (AVX2: Intel's and AMD's optimisation manuals).
# Wider units are not counted on, nor 16-bit ones: `drumline calibrate` measures what they do. One channel of DDR4-3200 (JEDEC).
FLOP_PER_CYCLE, CLOCK, CHANNEL = 32, 2.5e9, 25.6e9
# A GPU that the catalog lacks is planned for as if it were this one, the slowest that has bf16.
STAND_IN = "3090"


def found(machine: Machine, processes: int, calibration: Calibration | None = None) -> Cluster:
    """This machine, as `processes` ranks share it: a rank has a GPU of its own, or its part of the cores and of their memory. Where there
    are more ranks than GPUs, as many hosts like this one as they need."""
    measured, notes = calibration or Calibration(), tuple[str, ...]()
    if machine.devices:
        first = machine.devices[0]
        known = catalog.by_driver(first.name, first.memory_bytes)
        if known is None and not measured.matmul:
            notes = (f"{first.name} is not in the catalog: taken for as fast as a {STAND_IN}; `drumline calibrate` measures it",)
        spec = replace(known or catalog.DEVICES[STAND_IN], name=known.name if known else first.name, memory_bytes=first.memory_bytes)
        if "PCIE" in first.name.upper():  # drivers write both: A100-PCIE-40GB, H100 PCIe
            spec = replace(spec, intra=spec.host_link)
        per_node = min(processes, len(machine.devices))
    else:
        spec, per_node, measured = processor(machine, processes), processes, measured.shared(processes)
    intra, host_link = catalog.LINKS[spec.intra], catalog.LINKS[spec.host_link]
    network = catalog.link("100Gb")
    assert network is not None
    host = machine.memory_bytes
    return Cluster(
        spec, per_node, -(-processes // per_node), intra, network, host_link, host, found=True, calibration=measured, notes=notes
    )


def processor(machine: Machine, processes: int) -> DeviceSpec:
    """The part of this machine's cores and memory that each of `processes` ranks has."""
    rate = FLOP_PER_CYCLE * CLOCK * machine.cores / processes
    flops = dict.fromkeys(("fp32", "bf16", "fp16"), rate)
    source = "AVX2 at 2.5 GHz, one channel of DDR4-3200"
    return DeviceSpec(
        "cpu", "cpu", machine.memory_bytes // processes, CHANNEL / processes, flops, source, intra="loopback", host_link="loopback"
    )

"""Which cluster a run is planned for: what the YAML says, filled up with what is found here."""

from __future__ import annotations

from drumline.cluster.catalog import PEAKS
from drumline.cluster.cluster import Cluster, DeviceSpec, Link
from drumline.cluster.detect import Machine

HALF, TERA = ("bf16", "fp16"), 1e12


def found(machine: Machine, processes: int) -> Cluster:
    """This machine, as `processes` ranks share it."""
    if machine.devices:
        device = machine.devices[0]
        half, full = next((rates for name, rates in PEAKS.items() if name in device.name), (100 * TERA, 50 * TERA))
        spec = DeviceSpec(device.name, "cuda", device.memory_bytes, 1e12, {**dict.fromkeys(HALF, half), "fp32": full})
        per_node = len(machine.devices)
    else:
        rate = 50e9 * machine.cores / processes
        spec = DeviceSpec("cpu", "cpu", machine.memory_bytes // processes, 10e9, {"fp32": rate, **dict.fromkeys(HALF, rate)})
        per_node = processes
    link = Link("pcie4", 25e9, 10e-6)
    return Cluster(spec, per_node, 1, link, link, link, machine.memory_bytes, found=True)

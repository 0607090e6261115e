"""The devices that a run is planned for, and the links between them: found here, or set in the YAML. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from drumline.hardware.calibration import Calibration, Measured

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"]
# What large matrix products reach of a datasheet's rate where nobody measured it: H100 SXM's 80.3%, in the middle of what was published
# (A100 SXM 86.9%, MI300X 51.4%; S. Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS", 2025).
MATMUL_EFFICIENCY = 0.80
# Seconds before a collective's first step, whatever the link: NCCL's own constant for the ring (src/graph/tuning.cc, baseLat, Simple).
BASE_LATENCY = 8.4e-6
# Of a link's datasheet, what copies from and to pinned memory of the host reach: 26.1 and 25.6 of 31.5 GB/s (A100, PCIe 4), 12.4 and 13.1
# of 15.75 (PCIe 3), all by NVIDIA's bandwidthTest, as people published it.
HOST_EFFICIENCY = 0.80
# Bytes/s of a disk where nobody measured it: an NVMe drive (Samsung PM9A3 datasheet, 3.84 TB).
DISK = {"read": 6.5e9, "write": 3.5e9}


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device. `memory_bytes`: as torch reports it; `bandwidth`: of that memory, bytes/s; `flops`: precision → dense FLOP/s by its
    datasheet; `efficiency`: the part that large matrix products reach; `intra`, `host_link`: usual links, by their catalog names."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str = ""
    efficiency: float = MATMUL_EFFICIENCY
    intra: str = "pcie4"
    host_link: str = "pcie4"


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes/s in one direction by the datasheet: what one device sends, or of a link between hosts what one host sends;
    `latency`: seconds of one step of a ring; `efficiency`: of the bandwidth, what collectives on large tensors reach; `per_peer`: bytes/s
    to each other device, where devices are joined pair by pair and not by a switch."""

    name: str
    bandwidth: float
    latency: float
    efficiency: float = 1.0
    per_peer: float | None = None
    source: str = ""

    def reached(self, ranks: int) -> float:
        """Bytes/s that a rank sends in a collective of `ranks` on this link alone."""
        limit = self.bandwidth if self.per_peer is None else min(self.bandwidth, self.per_peer * (ranks - 1))
        return self.efficiency * limit


@dataclass(frozen=True)
class Cluster:
    """nodes × per_node equal devices. `host_memory_bytes` of one host, None: not known. `found`: it is this machine; `notes`: assumptions,
    for the user."""

    device: DeviceSpec
    per_node: int
    nodes: int
    intra: Link
    inter: Link
    host_link: Link
    host_memory_bytes: int | None = None
    price_per_device_hour: float | None = None
    found: bool = False
    calibration: Calibration = field(default_factory=Calibration)
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.per_node * self.nodes

    def rate(self, precision: str, rows: int | None = None, width: int | None = None) -> float:
        """FLOP/s of matrix products on one device: as measured, at the shape nearest to (rows × width) · (width × width) where that is
        given; else the datasheet's times what large products reach of it. 0 for a precision that the device lacks."""
        measured = self.calibration.matmul_rate(precision, rows, width)
        return measured if measured is not None else self.device.efficiency * self.device.flops.get(precision, 0.0)

    def host_seconds(self, direction: Literal["to_device", "to_host"], bytes_: float) -> float:
        """Seconds to copy bytes between one device and its host's pinned memory; 0 for a CPU, which is its host."""
        if self.device.kind == "cpu" or bytes_ <= 0:
            return 0.0
        usual = Measured(self.host_link.latency, HOST_EFFICIENCY * self.host_link.bandwidth)
        return self.calibration.host.get(direction, usual).seconds(bytes_)

    def disk_seconds(self, direction: Literal["write", "read"], bytes_: float) -> float:
        """Seconds to write or read bytes of one host's disk, all its ranks' together."""
        line = self.calibration.disk.get(direction)
        return bytes_ / DISK[direction] if line is None or bytes_ <= 0 else line.seconds(bytes_)

    def collective_seconds(self, kind: Collective, volume: float, ranks: int, per_node: int | None = None) -> float:
        """Seconds of one collective on a large tensor, in the ring algorithm; 0 with one rank alone.

        `volume`: what a rank sends, as `telemetry.traffic` counts it; `ranks`: of the group, of which `per_node` share a host
        (None: as many as fit). On one host what was measured goes before the link's datasheet. Over several hosts a ring leaves
        each host once, and all groups that cross at the same time share its network card; pairs of an all-to-all cross each on
        their own. NCCL has faster ways for some (trees for small tensors, reductions in the NVSwitch: 482 GB/s for 368 on 8×H200), so
        this errs to the slow side.
        """
        if ranks < 2 or volume <= 0:
            return 0.0
        together = min(ranks, self.per_node) if per_node is None else min(per_node, ranks)
        steps = ring_steps(kind, ranks)
        if together >= ranks:
            line = self.calibration.line(kind, ranks)
            if line is not None:
                return line.seconds(volume)
            return BASE_LATENCY + steps * self.intra.latency + volume / self.intra.reached(ranks)
        if kind == "all_to_all":
            leaving = self.per_node * volume * (ranks - together) / (ranks - 1)
        else:
            leaving = volume * max(1.0, self.per_node / together)
        across = leaving / self.inter.reached(ranks)
        measured = self.calibration.line(kind, together)
        within = volume / (measured.bandwidth if measured else self.intra.reached(together)) if together > 1 else 0.0
        outside = min(steps, ring_steps(kind, -(-ranks // together)))
        latency = outside * self.inter.latency + (steps - outside) * self.intra.latency
        return BASE_LATENCY + latency + max(across, within)


def ring_steps(kind: Collective, ranks: int) -> int:
    """Messages that follow one another in the ring algorithm (Thakur et al. 2005)."""
    return {"all_reduce": 2 * (ranks - 1), "p2p": 1}.get(kind, ranks - 1)

"""The devices that a run is planned for, and the links between them: found here, or set in the YAML. Their rates are those of datasheets,
or what `drumline calibrate` measured; its file is one for each kind of device and version of the software, in the cache folder."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumline.errors import EnvironmentFault
from drumline.foreign import read_bytes
from drumline.hardware.detect import Machine, cache_dir

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
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Entries = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Measured:
    """A line through timings: seconds of S bytes = latency + S / bandwidth."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of the file that it is read from
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth: Rate

    def seconds(self, bytes_: float) -> float:
        return self.latency + bytes_ / self.bandwidth


def line_through(points: Sequence[tuple[float, float]]) -> Measured:
    """The line through (bytes, seconds) with the least squares of relative errors; neither its latency nor its bandwidth is negative."""
    rows = [(1 / t**2, s, t) for s, t in points]
    w, ws, wt = (
        sum(w for w, _, _ in rows),
        sum(w * s for w, s, _ in rows),
        sum(w * t for w, _, t in rows),
    )
    wss, wst = sum(w * s * s for w, s, _ in rows), sum(w * s * t for w, s, t in rows)
    spread = w * wss - ws * ws
    slope = (w * wst - ws * wt) / spread if len({s for s, _ in points}) > 1 else 0.0
    latency = (wt - slope * ws) / w
    if (
        slope <= 0 or latency < 0
    ):  # of one size, or noise: the mean rate, as if nothing had to be waited for
        return Measured(0.0, wss / wst)
    return Measured(latency, 1 / slope)


@dataclass(frozen=True)
class Product:
    """A measured matrix product (rows × inner) · (inner × columns), FLOP/s."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rows: Entries
    inner: Entries
    columns: Entries
    rate: Rate


@dataclass(frozen=True)
class Calibration:
    """Measured rates; empty: not measured. `matmul`: precision → FLOP/s of large products; `products`: precision → the
    measured shapes; `memory`: bytes/s that a device copies (read and write counted); `collectives`: (kind, ranks) → line, kind one
    of all_reduce, all_gather, reduce_scatter, all_to_all, p2p, and bytes what a rank sends, as `telemetry.traffic` counts;
    `host`: to_device, to_host → line; `disk`: write, read → line; `operators`: precision → what a Llama's block takes besides its
    products, forward and backward, by the bytes of its hidden states; `ranks`: that measured side by side, a core each."""

    hardware: str = ""
    software: str = ""
    matmul: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    collectives: Mapping[tuple[str, int], Measured] = field(default_factory=dict)
    host: Mapping[str, Measured] = field(default_factory=dict)
    operators: Mapping[str, tuple[Measured, Measured]] = field(default_factory=dict)
    disk: Mapping[str, Measured] = field(default_factory=dict)
    ranks: int = 1
    products: Mapping[str, tuple[Product, ...]] = field(default_factory=dict)

    def line(self, kind: str, ranks: int) -> Measured | None:
        """The line of a collective on one host, for the measured group nearest in size. A broadcast takes the steps of an all-gather."""
        kind = "all_gather" if kind == "broadcast" else kind
        sizes = [size for name, size in self.collectives if name == kind]
        return (
            self.collectives[kind, min(sizes, key=lambda size: abs(math.log(size / ranks)))]
            if sizes
            else None
        )

    def _own(self, line: Measured, processes: int) -> Measured:
        """A rank's line, by the line of one among `ranks`: a core starts the kernels of one process at a time."""
        return Measured(
            line.latency * max(1.0, processes / self.ranks), line.bandwidth * self.ranks / processes
        )

    def shared(self, processes: int) -> Calibration:
        """The rates of one of `processes` processes that share a processor, which was measured as a whole."""
        return replace(
            self,
            matmul={precision: rate / processes for precision, rate in self.matmul.items()},
            memory=self.memory and self.memory / processes,
            products={
                kind: tuple(replace(p, rate=p.rate / processes) for p in products)
                for kind, products in self.products.items()
            },
            operators={
                kind: (self._own(forward, processes), self._own(backward, processes))
                for kind, (forward, backward) in self.operators.items()
            },
        )


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device. `memory_bytes`: as torch reports it; `bandwidth`: of that memory, bytes/s; `flops`: precision → dense FLOP/s by its
    datasheet; `efficiency`: the part that large matrix products reach; `attention`: the same of attention's kernels, None: as products;
    `intra`, `host_link`: usual links, by their catalog names."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str = ""
    efficiency: float = MATMUL_EFFICIENCY
    attention: float | None = None
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
        limit = (
            self.bandwidth
            if self.per_peer is None
            else min(self.bandwidth, self.per_peer * (ranks - 1))
        )
        return self.efficiency * limit


@dataclass(frozen=True)
class Cluster:
    """nodes × per_node equal devices. `pod`: hosts that reach each other at the full rate, None: all; its links to other pods carry what
    they send divided by `oversubscription`. `host_memory_bytes` of one host, None: without a limit; `host_memory_assumed`: nobody has
    set it. `found`: it is this machine; `notes`: assumptions, for the user."""

    device: DeviceSpec
    per_node: int
    nodes: int
    intra: Link
    inter: Link
    host_link: Link
    host_memory_bytes: int | None = None
    host_memory_assumed: bool = False
    price_per_device_hour: float | None = None
    mtbf_hours: float | None = None
    restart_seconds: float | None = None
    repair_hours: float = 24.0
    pod: int | None = None
    oversubscription: float = 1.0
    found: bool = False
    calibration: Calibration = field(default_factory=Calibration)
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.per_node * self.nodes

    def rate(self, precision: str, rows: int | None = None, width: int | None = None) -> float:
        """FLOP/s of matrix products on one device: as measured, at the shape nearest by ratios to (rows × width) · (width × width) where
        that is given; else the datasheet's times what large products reach of it. 0 for a precision that the device lacks."""
        products, measured = (
            self.calibration.products.get(precision),
            self.calibration.matmul.get(precision),
        )
        if products and rows is not None and width is not None:
            measured = nearest(products, rows, width).rate
        return (
            measured
            if measured is not None
            else self.device.efficiency * self.device.flops.get(precision, 0.0)
        )

    def attention_rate(self, precision: str) -> float:
        """FLOP/s of attention's kernels: slower than products by as much as its device's are."""
        share = (
            1.0 if self.device.attention is None else self.device.attention / self.device.efficiency
        )
        return share * (self.rate(precision) or self.rate("fp32"))

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

    def collective_seconds(
        self,
        kind: Collective,
        volume: float,
        ranks: int,
        per_node: int | None = None,
        per_pod: int | None = None,
    ) -> float:
        """Seconds of one collective on a large tensor, in the ring algorithm; 0 with one rank alone.

        `volume`: what a rank sends, as `telemetry.traffic` counts it; `ranks`: of the group, of which `per_node` share a host and
        `per_pod` a pod (None: as many as fit). On one host what was measured goes before the link's datasheet. Over several hosts a
        ring leaves each host once, and all groups that cross at the same time share its network card, as pods share their links to
        others; pairs of an all-to-all cross each on their own. NCCL has faster ways for some (trees for small tensors, reductions in
        the NVSwitch: 482 GB/s for 368 on 8×H200), so this errs to the slow side.
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
        across = self._leaving(kind, volume, ranks, together, self.per_node) / self.inter.reached(
            ranks
        )
        if self.pod is not None and self.oversubscription > 1:
            devices = self.pod * self.per_node
            near = min(ranks, devices if per_pod is None else per_pod)
            uplinks = self.pod * self.inter.reached(ranks) / self.oversubscription
            across = max(across, self._leaving(kind, volume, ranks, near, devices) / uplinks)
        measured = self.calibration.line(kind, together)
        within = (
            volume / (measured.bandwidth if measured else self.intra.reached(together))
            if together > 1
            else 0.0
        )
        outside = min(steps, ring_steps(kind, -(-ranks // together)))
        latency = outside * self.inter.latency + (steps - outside) * self.intra.latency
        return BASE_LATENCY + latency + max(across, within)

    @staticmethod
    def _leaving(kind: Collective, volume: float, ranks: int, together: int, devices: int) -> float:
        """Bytes that leave so many neighbouring devices, where each is in such a group, of which `together` ranks are neighbours."""
        if together >= ranks:
            return 0.0
        if kind == "all_to_all":
            return devices * volume * (ranks - together) / (ranks - 1)
        return volume * max(1.0, devices / together)


def nearest(products: Sequence[Product], rows: int, width: int) -> Product:
    """The measured product nearest by ratios to (rows × width) · (width × width)."""
    return min(
        products,
        key=lambda p: (
            abs(math.log(p.rows / rows))
            + abs(math.log(p.inner / width))
            + abs(math.log(p.columns / width))
        ),
    )


def ring_steps(kind: Collective, ranks: int) -> int:
    """Messages that follow one another in the ring algorithm (Thakur et al. 2005)."""
    return {"all_reduce": 2 * (ranks - 1), "p2p": 1}.get(kind, ranks - 1)


class _File(BaseModel):
    """The file's own form. `measured`: when, in words; `quick`: with --quick."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=1, le=1)]
    hardware: str
    software: str
    measured: str
    quick: bool
    matmul: dict[str, Rate]
    products: dict[str, tuple[Product, ...]]
    memory: Rate | None
    collectives: dict[str, dict[Annotated[int, Field(ge=2)], Measured]]
    host: dict[str, Measured]
    operators: dict[str, tuple[Measured, Measured]] = Field({})
    ranks: Entries = 1
    disk: dict[str, Measured]


def hardware(machine: Machine) -> str:
    """The kind of device: a GPU's name, or the processor's and how many of its cores may be used."""
    return (
        machine.devices[0].name if machine.devices else f"{processor_name()}, {machine.cores} cores"
    )


def is_processor(hardware: str) -> bool:
    """Whether this kind of device, by `hardware`, is a processor."""
    return re.search(r", \d+ cores$", hardware) is not None


def software(machine: Machine) -> str:
    """torch's version and what its ranks talk through."""
    return f"torch {metadata.version('torch')}, {'nccl' if machine.devices else 'gloo'}"


def calibration_path(machine: Machine) -> Path:
    """The path of this machine's calibration; the file need not exist."""
    kind, versions = hardware(machine), software(machine)
    key = hashlib.sha256(f"{kind}\n{versions}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return cache_dir() / "calibration" / f"{slug}-{key}.json"


def calibration_for(machine: Machine) -> Calibration | None:
    """The calibration of machines like this one with this software; None without one. Raises EnvironmentFault for a damaged file."""
    path = calibration_path(machine)
    if not path.exists():
        return None
    calibration = read_calibration(path)
    return (
        calibration
        if (calibration.hardware, calibration.software) == (hardware(machine), software(machine))
        else None
    )


def read_calibration(path: Path) -> Calibration:
    """The calibration of a file. Raises EnvironmentFault where it is missing, unreadable, or no calibration."""
    try:
        content = _File.model_validate_json(
            read_bytes(
                path, EnvironmentFault, "give the path of a file that `drumline calibrate` wrote"
            )
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inside = ".".join(str(part) for part in first["loc"])
        what = first["msg"][0].lower() + first["msg"][1:]
        fix = "remove it, and run `drumline calibrate` again"
        raise EnvironmentFault(
            "is no calibration: " + (f"{inside}: " if inside else "") + what,
            where=str(path),
            fix=fix,
        ) from None
    collectives = {
        (kind, ranks): line
        for kind, lines in content.collectives.items()
        for ranks, line in lines.items()
    }
    return Calibration(
        **{name: getattr(content, name) for name in Calibration.__dataclass_fields__}
        | {"collectives": collectives}
    )


def processor_name() -> str:
    """The processor's name by the kernel; where it gives none, as macOS, the architecture."""
    listing = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*:\s*(.+)$", listing.read_text(), re.MULTILINE)
        if listing.exists()
        else None
    )
    return found[1].strip() if found else os.uname().machine

"""The devices that a run is planned for, the links between them, and what a collective costs.

Devices and links are found on this machine, or set in the YAML. Their rates are those of
datasheets, or those that `drumline calibrate` measured. A calibration is a file in the cache
folder, one for each kind of device and version of the software.

The seconds of S bytes follow the alpha-beta model: a latency, and S over a bandwidth. Collectives
are counted with the ring algorithm.
"""

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
# The share of a datasheet's rate that large matrix products reach, if nobody has measured it: H100
# SXM's 80.3%, which is in the middle of what was published (A100 SXM 86.9%, MI300X 51.4%; S.
# Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS", 2025).
MATMUL_EFFICIENCY = 0.80
# Seconds before the first step of a collective, on any link: NCCL's constant for the ring
# (src/graph/tuning.cc, baseLat, Simple).
BASE_LATENCY = 8.4e-6
# The share of a link's datasheet that copies from and to pinned host memory reach. Published
# results of NVIDIA's bandwidthTest are 26.1 and 25.6 of 31.5 GB/s (A100, PCIe 4), and 12.4 and 13.1
# of 15.75 (PCIe 3).
HOST_EFFICIENCY = 0.80
# Bytes/s of a disk that nobody has measured: those of an NVMe drive (Samsung PM9A3 datasheet,
# 3.84 TB).
DISK = {"read": 6.5e9, "write": 3.5e9}
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class CostLine:
    """A measured cost in the alpha-beta model: S bytes take latency + S / bandwidth seconds.

    `latency`: in seconds. `bandwidth`: in bytes/s.
    """

    # Refuse other keys in a calibration's file.
    __pydantic_config__ = ConfigDict(extra="forbid")
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth: Rate

    def seconds(self, bytes_: float) -> float:
        """Return the seconds for a number of bytes."""
        return self.latency + bytes_ / self.bandwidth


def line_through(points: Sequence[tuple[float, float]]) -> CostLine:
    """Fit a line to timings (bytes, seconds), with the least squares of relative errors.

    Neither its latency nor its bandwidth is negative.
    """
    # Weighted least squares: errors are divided by the seconds, so each point weighs 1 / seconds².
    rows = [(1 / seconds**2, bytes_, seconds) for bytes_, seconds in points]
    weight_sum = sum(weight for weight, _, _ in rows)
    bytes_sum = sum(weight * bytes_ for weight, bytes_, _ in rows)
    seconds_sum = sum(weight * seconds for weight, _, seconds in rows)
    square_sum = sum(weight * bytes_ * bytes_ for weight, bytes_, _ in rows)
    product_sum = sum(weight * bytes_ * seconds for weight, bytes_, seconds in rows)
    sizes = {bytes_ for bytes_, _ in points}
    slope = 0.0
    if len(sizes) > 1:
        spread = weight_sum * square_sum - bytes_sum * bytes_sum
        slope = (weight_sum * product_sum - bytes_sum * seconds_sum) / spread
    latency = (seconds_sum - slope * bytes_sum) / weight_sum
    # All points have one size, or noise gave a negative number: take the best line through the
    # origin, without a latency.
    if slope <= 0 or latency < 0:
        return CostLine(0.0, square_sum / product_sum)
    return CostLine(latency, 1 / slope)


@dataclass(frozen=True)
class Product:
    """A matrix product (rows × inner) · (inner × columns), and its measured rate in FLOP/s."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rows: PositiveInt
    inner: PositiveInt
    columns: PositiveInt
    rate: Rate


@dataclass(frozen=True)
class Calibration:
    """Measured rates of a machine. An empty field was not measured.

    `ranks` processes measured side by side: one for each GPU, or one for each core of a processor.
    `matmul`, `products` and `memory` are those of one GPU, or of the whole processor; the lines of
    `operators` are always those of one process.

    `hardware`, `software`: as `hardware_name` and `software_name` return them.
    `matmul`: precision → FLOP/s of large matrix products.
    `memory`: bytes/s of copies within a device's memory; bytes read and bytes written both count.
    `collectives`: (kind, ranks) → line. Kind is all_reduce, all_gather, reduce_scatter, all_to_all
    or p2p; the bytes are those that a rank sends, as `telemetry.traffic` counts them.
    `host`: to_device, to_host → line of copies between a device and pinned host memory.
    `operators`: precision → lines (forward, backward) of what a block of a Llama computes besides
    matrix products: norms, rotary embedding, softmax, activation. The bytes are those of the
    block's hidden states.
    `disk`: write, read → line.
    `products`: precision → matrix products of several shapes.
    """

    hardware: str = ""
    software: str = ""
    matmul: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    collectives: Mapping[tuple[str, int], CostLine] = field(default_factory=dict)
    host: Mapping[str, CostLine] = field(default_factory=dict)
    operators: Mapping[str, tuple[CostLine, CostLine]] = field(default_factory=dict)
    disk: Mapping[str, CostLine] = field(default_factory=dict)
    ranks: int = 1
    products: Mapping[str, tuple[Product, ...]] = field(default_factory=dict)

    def line(self, kind: str, ranks: int) -> CostLine | None:
        """Return the line of a collective among `ranks` ranks of one host.

        It was measured in a group of the nearest size. None if that kind was not measured. A
        broadcast is taken for an all-gather, which has as many steps.
        """
        if kind == "broadcast":
            kind = "all_gather"
        sizes = [size for name, size in self.collectives if name == kind]
        if not sizes:
            return None
        nearest_size = min(sizes, key=lambda size: _log_distance(size, ranks))
        return self.collectives[kind, nearest_size]

    def _rescale(self, line: CostLine, processes: int) -> CostLine:
        """Return a line of `operators` for one of `processes` processes.

        It was measured in each of `self.ranks` processes. A core starts the kernels of one process
        at a time, so the latency grows in proportion if there are more processes than measured.
        """
        latency = line.latency * max(1.0, processes / self.ranks)
        return CostLine(latency, line.bandwidth * self.ranks / processes)

    def share_among(self, processes: int) -> Calibration:
        """Return the rates of one of `processes` processes that share a processor.

        The processor was measured as a whole, except for `operators`.
        """
        memory = self.memory
        if memory:
            memory /= processes
        products = {}
        for precision, measured in self.products.items():
            products[precision] = tuple(
                replace(product, rate=product.rate / processes) for product in measured
            )
        operators = {}
        for precision, (forward, backward) in self.operators.items():
            own_forward = self._rescale(forward, processes)
            own_backward = self._rescale(backward, processes)
            operators[precision] = (own_forward, own_backward)
        return replace(
            self,
            matmul={precision: rate / processes for precision, rate in self.matmul.items()},
            memory=memory,
            products=products,
            operators=operators,
        )


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device.

    `memory_bytes`: as torch reports it. `bandwidth`: bytes/s of this memory. `flops`: precision →
    dense FLOP/s by its datasheet. `efficiency`: the share of these that large matrix products
    reach. `attention`: the share that the kernels of attention reach; None: the same.
    `is_power_limited`: in a long run its power limit lowers its clock below that of a short product.
    `intra`, `host_link`: the catalog's names of its usual links, to other devices of a host and to
    the host.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str = ""
    efficiency: float = MATMUL_EFFICIENCY
    attention: float | None = None
    is_power_limited: bool = False
    intra: str = "pcie4"
    host_link: str = "pcie4"


@dataclass(frozen=True)
class Link:
    """A link between devices or hosts.

    `bandwidth`: bytes/s in one direction by the datasheet: what one device sends, or on a link
    between hosts what one host sends. `latency`: seconds of one step of a ring. `efficiency`: the
    share of the bandwidth that collectives on large tensors reach. `per_peer`: bytes/s to each
    other device, if devices are joined pair by pair and not by a switch.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float = 1.0
    per_peer: float | None = None
    source: str = ""

    def collective_rate(self, ranks: int) -> float:
        """Return the bytes/s that a rank sends in a collective of `ranks` on this link alone."""
        limit = self.bandwidth
        if self.per_peer is not None:
            limit = min(limit, self.per_peer * (ranks - 1))
        return self.efficiency * limit


@dataclass(frozen=True)
class Cluster:
    """Equal devices: `per_node` on each of `nodes` hosts.

    `pod`: the number of hosts that reach one another at the full rate; None: all do. Links from a
    pod to others have the rate divided by `oversubscription`. `host_memory_bytes`: of one host;
    None: no limit. `host_memory_assumed`: nobody has set it. `is_this_machine`: it is exactly the
    machine that this process runs on. `notes`: assumptions, for the user.
    """

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
    is_this_machine: bool = False
    calibration: Calibration = field(default_factory=Calibration)
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of all devices."""
        return self.per_node * self.nodes

    def rate(self, precision: str, rows: int | None = None, width: int | None = None) -> float:
        """Return the FLOP/s of matrix products on one device; 0 for a precision that it lacks.

        `rows`, `width`: the products are (rows × width) · (width × width). Of several measured
        shapes, the one nearest by ratios counts. Without a measurement the rate is the share of the
        datasheet's that large products reach.
        """
        products = self.calibration.products.get(precision)
        if products and rows is not None and width is not None:
            return nearest_product(products, rows, width).rate
        measured = self.calibration.matmul.get(precision)
        if measured is not None:
            return measured
        return self.device.efficiency * self.device.flops.get(precision, 0.0)

    def attention_rate(self, precision: str) -> float:
        """Return the FLOP/s of attention's kernels.

        They are not calibrated: they are slower than matrix products by the device's usual share.
        """
        share = 1.0
        if self.device.attention is not None:
            share = self.device.attention / self.device.efficiency
        rate = self.rate(precision) or self.rate("fp32")
        return share * rate

    def host_seconds(self, direction: Literal["to_device", "to_host"], bytes_: float) -> float:
        """Return the seconds to copy bytes between one device and pinned memory of its host.

        It is 0 for a CPU, which computes in that memory.
        """
        if self.device.kind == "cpu" or bytes_ <= 0:
            return 0.0
        usual = CostLine(self.host_link.latency, HOST_EFFICIENCY * self.host_link.bandwidth)
        return self.calibration.host.get(direction, usual).seconds(bytes_)

    def disk_seconds(self, direction: Literal["write", "read"], bytes_: float) -> float:
        """Return the seconds to write bytes to a host's disk, or to read them.

        `bytes_`: the sum over the host's ranks.
        """
        line = self.calibration.disk.get(direction)
        if line is None or bytes_ <= 0:
            return bytes_ / DISK[direction]
        return line.seconds(bytes_)

    def collective_seconds(
        self,
        kind: Collective,
        volume: float,
        ranks: int,
        per_node: int | None = None,
        per_pod: int | None = None,
    ) -> float:
        """Return the seconds of one collective on a large tensor, by the ring algorithm.

        They are 0 for one rank.

        `volume`: bytes that a rank sends, as `telemetry.traffic` counts them. `ranks`: of the
        group, of which `per_node` share a host and `per_pod` a pod; None: as many as fit.

        On one host a measurement counts more than the link's datasheet. Over several hosts a ring
        leaves each host once. All groups that cross at the same time share the host's network card,
        and likewise a pod's links to others; in an all-to-all each pair crosses by itself. NCCL has
        faster algorithms for some cases (trees for small tensors, reductions in the NVSwitch: 482
        GB/s for 368 on 8×H200), so the result errs to the slow side.
        """
        if ranks < 2 or volume <= 0:
            return 0.0
        on_host = min(ranks, self.per_node if per_node is None else per_node)
        if on_host >= ranks:
            return self._seconds_on_one_host(kind, volume, ranks)
        leaving = self._bytes_through_uplink(kind, volume, ranks, on_host, self.per_node)
        across = leaving / self.inter.collective_rate(ranks)
        if self.pod is not None and self.oversubscription > 1:
            devices = self.pod * self.per_node
            in_pod = min(ranks, devices if per_pod is None else per_pod)
            uplinks = self.pod * self.inter.collective_rate(ranks) / self.oversubscription
            across = max(
                across, self._bytes_through_uplink(kind, volume, ranks, in_pod, devices) / uplinks
            )
        within = 0.0
        if on_host > 1:
            within = volume / self._bandwidth_within(kind, on_host)
        steps = ring_steps(kind, ranks)
        hosts = math.ceil(ranks / on_host)
        steps_across = min(steps, ring_steps(kind, hosts))
        steps_within = steps - steps_across
        latency = steps_across * self.inter.latency + steps_within * self.intra.latency
        return BASE_LATENCY + latency + max(across, within)

    def _seconds_on_one_host(self, kind: Collective, volume: float, ranks: int) -> float:
        line = self.calibration.line(kind, ranks)
        if line is not None:
            return line.seconds(volume)
        latency = ring_steps(kind, ranks) * self.intra.latency
        return BASE_LATENCY + latency + volume / self.intra.collective_rate(ranks)

    def _bandwidth_within(self, kind: Collective, ranks: int) -> float:
        """Return the bytes/s that each of `ranks` on one host sends.

        A measurement counts more than the link's datasheet.
        """
        measured = self.calibration.line(kind, ranks)
        if measured is not None:
            return measured.bandwidth
        return self.intra.collective_rate(ranks)

    @staticmethod
    def _bytes_through_uplink(
        kind: Collective, volume: float, ranks: int, together: int, devices: int
    ) -> float:
        """Return the bytes that go up through one uplink: that of a host, or that of a pod.

        Args:
            kind: The collective.
            volume: Bytes that each rank sends.
            ranks: The size of a group. Each device is in one group.
            together: How many ranks of a group are below the same uplink.
            devices: All devices below the uplink.
        """
        if together >= ranks:
            return 0.0
        if kind == "all_to_all":
            # Each rank sends an equal part to each other rank.
            return devices * volume * (ranks - together) / (ranks - 1)
        # A ring leaves once. So many groups share the uplink.
        groups = max(1.0, devices / together)
        return volume * groups


def nearest_product(products: Sequence[Product], rows: int, width: int) -> Product:
    """Return the measured product nearest by ratios to (rows × width) · (width × width)."""

    def distance(product: Product) -> float:
        return (
            _log_distance(product.rows, rows)
            + _log_distance(product.inner, width)
            + _log_distance(product.columns, width)
        )

    return min(products, key=distance)


def _log_distance(number: int, other: int) -> float:
    """Return how far two numbers are apart by their ratio: 0 for equal ones."""
    return abs(math.log(number / other))


def ring_steps(kind: Collective, ranks: int) -> int:
    """Return the number of steps of the ring algorithm, one after another (Thakur et al. 2005)."""
    if kind == "p2p":
        return 1
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1


class _File(BaseModel):
    """The keys of a calibration's file.

    `measured`: when it was measured, as text. `quick`: whether with --quick. The others are those
    of `Calibration`.
    """

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=1, le=1)]
    hardware: str
    software: str
    measured: str
    quick: bool
    matmul: dict[str, Rate]
    products: dict[str, tuple[Product, ...]]
    memory: Rate | None
    collectives: dict[str, dict[Annotated[int, Field(ge=2)], CostLine]]
    host: dict[str, CostLine]
    operators: dict[str, tuple[CostLine, CostLine]] = Field({})
    ranks: PositiveInt = 1
    disk: dict[str, CostLine]


def hardware_name(machine: Machine) -> str:
    """Return the name of a machine's devices: a GPU's, or the processor's and its usable cores."""
    if machine.devices:
        return machine.devices[0].name
    return f"{processor_name()}, {machine.cores} cores"


def is_processor(name: str) -> bool:
    """Return whether a name of `hardware_name` is that of a processor."""
    return re.search(r", \d+ cores$", name) is not None


def software_name(machine: Machine) -> str:
    """Return torch's version, and the library that ranks communicate through."""
    library = "nccl" if machine.devices else "gloo"
    return f"torch {metadata.version('torch')}, {library}"


def calibration_path(machine: Machine) -> Path:
    """Return the path of this machine's calibration; the file need not exist."""
    kind = hardware_name(machine)
    versions = software_name(machine)
    key = hashlib.sha256(f"{kind}\n{versions}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return cache_dir() / "calibration" / f"{slug}-{key}.json"


def calibration_for(machine: Machine) -> Calibration | None:
    """Return the calibration of machines like this one with this software; None without one.

    Raises EnvironmentFault for a damaged file.
    """
    path = calibration_path(machine)
    if not path.exists():
        return None
    calibration = read_calibration(path)
    if calibration.hardware != hardware_name(machine) or calibration.software != software_name(
        machine
    ):
        return None
    return calibration


def read_calibration(path: Path) -> Calibration:
    """Return the calibration of a file.

    Raises EnvironmentFault if it is missing, unreadable, or no calibration.
    """
    content = read_bytes(
        path, EnvironmentFault, "give the path of a file that `drumline calibrate` wrote"
    )
    try:
        file = _File.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"]
        what = message[0].lower() + message[1:]
        if key:
            what = f"{key}: {what}"
        raise EnvironmentFault(
            f"is no calibration: {what}",
            where=str(path),
            fix="remove it, and run `drumline calibrate` again",
        ) from None
    values = {name: getattr(file, name) for name in Calibration.__dataclass_fields__}
    collectives = {}
    for kind, lines in file.collectives.items():
        for ranks, line in lines.items():
            collectives[kind, ranks] = line
    values["collectives"] = collectives
    return Calibration(**values)


def processor_name() -> str:
    """Return the processor's name, as the kernel gives it.

    If it gives none, as on macOS, the architecture is returned.
    """
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", listing.read_text(), re.MULTILINE)
        if match is not None:
            return match[1].strip()
    return os.uname().machine

"""The devices that a run is planned for, and what joins them: found here, or said in the YAML. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from drumline.cluster.calibration import Calibration


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device. `memory_bytes`: its memory; `bandwidth`: of that, bytes/s; `flops`: precision → dense FLOP/s by its datasheet."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str = ""


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes/s that one device sends (between hosts: that one host sends); `latency`: seconds."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """nodes × per_node equal devices. `host_memory_bytes` of one host, None: not known. `found`: it is this machine."""

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

    @property
    def world_size(self) -> int:
        return self.per_node * self.nodes

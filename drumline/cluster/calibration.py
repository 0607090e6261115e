"""What `drumline calibrate` measured of this machine: a value, stored per hardware and software version. Pure but for its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measured:
    """A line through timings: seconds of S bytes = latency + S / bandwidth."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Calibration:
    """Rates as they were measured; empty where nothing was. `matmul`: precision → FLOP/s of large products; `memory`: bytes/s that a device
    copies; `collectives`: (kind, ranks) → line, kind one of all_reduce, all_gather, reduce_scatter, all_to_all, p2p, and bytes what a rank
    sends, as `dist.traffic` counts; `host`: to_device, to_host → line; `disk`: write, read → line."""

    hardware: str = ""
    software: str = ""
    matmul: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    collectives: Mapping[tuple[str, int], Measured] = field(default_factory=dict)
    host: Mapping[str, Measured] = field(default_factory=dict)
    disk: Mapping[str, Measured] = field(default_factory=dict)

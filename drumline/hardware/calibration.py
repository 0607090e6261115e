"""The rates that `drumline calibrate` measured, and their file: one for each kind of device and version of the software, in the cache
folder."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumline.errors import EnvironmentFault
from drumline.foreign import read_bytes
from drumline.hardware.detect import Machine, cache_dir

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
    w, ws, wt = sum(w for w, _, _ in rows), sum(w * s for w, s, _ in rows), sum(w * t for w, _, t in rows)
    wss, wst = sum(w * s * s for w, s, _ in rows), sum(w * s * t for w, s, t in rows)
    spread = w * wss - ws * ws
    slope = (w * wst - ws * wt) / spread if len({s for s, _ in points}) > 1 else 0.0
    latency = (wt - slope * ws) / w
    if slope <= 0 or latency < 0:  # of one size, or noise: the mean rate, as if nothing had to be waited for
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
    `host`: to_device, to_host → line; `disk`: write, read → line."""

    hardware: str = ""
    software: str = ""
    matmul: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    collectives: Mapping[tuple[str, int], Measured] = field(default_factory=dict)
    host: Mapping[str, Measured] = field(default_factory=dict)
    disk: Mapping[str, Measured] = field(default_factory=dict)
    products: Mapping[str, tuple[Product, ...]] = field(default_factory=dict)

    def matmul_rate(self, precision: str, rows: int | None = None, width: int | None = None) -> float | None:
        """FLOP/s at the measured shape nearest by ratios to (rows × width) · (width × width); without a shape, of large products; None
        where nothing of that precision was measured."""
        products = self.products.get(precision, ())
        if rows is None or width is None or not products:
            return self.matmul.get(precision)

        def distance(p: Product) -> float:
            return abs(math.log(p.rows / rows)) + abs(math.log(p.inner / width)) + abs(math.log(p.columns / width))

        return min(products, key=distance).rate

    def line(self, kind: str, ranks: int) -> Measured | None:
        """The line of a collective on one host, for the measured group nearest in size. A broadcast takes the steps of an all-gather."""
        kind = "all_gather" if kind == "broadcast" else kind
        sizes = [size for name, size in self.collectives if name == kind]
        return self.collectives[kind, min(sizes, key=lambda size: abs(math.log(size / ranks)))] if sizes else None

    def shared(self, processes: int) -> Calibration:
        """The rates of one of `processes` processes that share a processor, which was measured as a whole."""
        return replace(
            self,
            matmul={precision: rate / processes for precision, rate in self.matmul.items()},
            memory=self.memory and self.memory / processes,
            products={kind: tuple(replace(p, rate=p.rate / processes) for p in products) for kind, products in self.products.items()},
        )


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
    disk: dict[str, Measured]


def hardware(machine: Machine) -> str:
    """The kind of device: a GPU's name, or the processor's and how many of its cores may be used."""
    return machine.devices[0].name if machine.devices else f"{processor_name()}, {machine.cores} cores"


def software(machine: Machine) -> str:
    """torch's version and what its ranks talk through."""
    return f"torch {metadata.version('torch')}, {'nccl' if machine.devices else 'gloo'}"


def place(machine: Machine) -> Path:
    """The path of this machine's calibration; the file need not exist."""
    kind, versions = hardware(machine), software(machine)
    key = hashlib.sha256(f"{kind}\n{versions}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return cache_dir() / "calibration" / f"{slug}-{key}.json"


def calibration_for(machine: Machine) -> Calibration | None:
    """The calibration of machines like this one with this software; None without one. Raises EnvironmentFault for a damaged file."""
    path = place(machine)
    if not path.exists():
        return None
    calibration = read(path)
    return calibration if (calibration.hardware, calibration.software) == (hardware(machine), software(machine)) else None


def read(path: Path) -> Calibration:
    """The calibration of a file. Raises EnvironmentFault where it is missing, unreadable, or no calibration."""
    try:
        content = _File.model_validate_json(read_bytes(path, EnvironmentFault, "give the path of a file that `drumline calibrate` wrote"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inside = ".".join(str(part) for part in first["loc"])
        what = first["msg"][0].lower() + first["msg"][1:]
        fix = "remove it, and run `drumline calibrate` again"
        raise EnvironmentFault("is no calibration: " + (f"{inside}: " if inside else "") + what, where=str(path), fix=fix) from None
    collectives = {(kind, ranks): line for kind, lines in content.collectives.items() for ranks, line in lines.items()}
    return Calibration(**{name: getattr(content, name) for name in Calibration.__dataclass_fields__} | {"collectives": collectives})


def processor_name() -> str:
    """The processor's name by the kernel; where it gives none, as macOS, the architecture."""
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", listing.read_text(), re.MULTILINE) if listing.exists() else None
    return found[1].strip() if found else os.uname().machine
